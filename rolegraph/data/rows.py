"""From the many shapes a row comes in (chat, plain prompt, from/value, content parts) to one.

A row becomes a `Sample`: what the model sees, what it should answer if the row says so, and the columns that pass
through. Whatever cannot be read raises `BadRowError` with the reason.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rolegraph.data.report import BadRowError

Row = dict[str, Any]
Needs = Literal["prompt", "response", "text", "chat"]
"""What an algorithm reads: prompts in tokens (RL), with a response (sft), raw text (pt), or prompts as text (chat)."""

_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "chatgpt", "model", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function"), "tool"),
}
"""By the name that a data set has for it, in lower case; others stay as they are."""
_CHAT_KEYS = ("messages", "conversations", "conversation")


@dataclass
class Sample:
    """One row, understood."""

    columns: Row
    """Every column of the dataset; `messages` in the role/content form and without the response."""
    messages: list[Row] | None = None
    """The chat the model answers; null for a prompt of raw text."""
    text: str | None = None
    """A prompt of raw text, or the text of pt."""
    response: str | None = None
    teacher_messages: list[Row] | None = None
    """The chat that the teacher answers instead, where the row has a `teacher_prompt`."""
    teacher_text: str | None = None
    """The same, of raw text."""
    changes: list[str] = field(default_factory=list)
    """What was read as something that it is not quite."""


def read(row: Row, needs: Needs, *, system_prompt: str | None, prompt_as: str) -> Sample:
    """Understand one row.

    Raises:
        BadRowError: the row has no prompt (or response, or text, where it is needed), or one in no known shape.
    """
    if needs == "text":
        return Sample(columns=row, text=_string(row, "text", "no text"))
    columns, changes = dict(row), list[str]()
    for name in ("prompt", "response"):
        if name in columns:
            columns[name] = _number_as_text(columns[name], f"`{name}`", changes)
    messages = _messages(columns, changes)
    text = None
    if messages is None:
        prompt = _string(columns, "prompt", "no messages and no prompt")
        if prompt_as == "user":
            messages = columns["messages"] = [{"role": "user", "content": prompt}]
        else:
            text = prompt
    response = _response(columns, messages, changes)
    if messages is not None:
        _complete(messages, system_prompt)
        columns["messages"] = list(messages)  # who takes text reads the same chat as who takes tokens
    teacher_messages, teacher_text = _teacher_prompt(columns, system_prompt, prompt_as)
    if needs == "response" and response is None:
        raise BadRowError("no response", "neither a last assistant message nor a `response`")
    if needs == "response" and not (response or "").strip():
        raise BadRowError("empty response")
    if response is not None:
        columns["response"] = response
    return Sample(columns, messages, text, response, teacher_messages, teacher_text, changes)


def _complete(messages: list[Row], system_prompt: str | None) -> None:
    """Put the system prompt first where the chat has none of its own; a chat that asks nothing is refused."""
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    if not any(message["content"].strip() for message in messages if message["role"] != "system"):
        raise BadRowError("empty prompt")


def _teacher_prompt(columns: Row, system_prompt: str | None, prompt_as: str) -> tuple[list[Row] | None, str | None]:
    """What the teacher sees in place of the prompt: messages or text; neither where the row says nothing about it."""
    value = columns.get("teacher_prompt")
    if value is None:
        return None, None
    if isinstance(value, str):
        if not value:
            raise BadRowError("empty teacher_prompt", "leave it out, or null, for a teacher that sees the prompt")
        if prompt_as != "user":
            return None, value
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, Sequence) and value:
        messages = [_message(message, []) for message in value]
        if messages[-1]["role"] == "assistant":
            raise BadRowError("`teacher_prompt` ends with an assistant message", "the response comes after it")
    else:
        raise BadRowError("`teacher_prompt` is neither text nor messages", f"it is of type {type(value).__name__}")
    _complete(messages, system_prompt)
    return messages, None


def content_id(row: Mapping[str, Any]) -> str:
    """A name for a row that depends on its content alone, not on its place or on the order of its columns."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def repair(value: Any, room: int = 200) -> tuple[Any, bool]:
    """The value with lone surrogates in its strings replaced by U+FFFD (halves of a pair joined), and if any were.

    JSON can carry them as escapes; UTF-8, and so Arrow and every tokenizer, cannot. Raises BadRowError for a value that
    is nested deeper than `room` levels.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), True
        return value, False
    if not room:
        raise BadRowError("nested too deep", "lists or objects in each other, more than 200 levels")
    if isinstance(value, dict):
        pairs = [(repair(k), repair(v, room - 1)) for k, v in value.items()]
        if any(key_changed or changed for (_, key_changed), (_, changed) in pairs):
            return {key: item for (key, _), (item, _) in pairs}, True
        return value, False
    if isinstance(value, list):
        items = [repair(item, room - 1) for item in value]
        if any(changed for _, changed in items):
            return [item for item, _ in items], True
    return value, False


def missing(value: Any) -> bool:
    """Whether a row has no such value: null, or the NaN that tables of numbers have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _number_as_text(value: Any, what: str, changes: list[str]) -> Any:
    """A number as its text, where a column holds numbers among its texts; a missing one as null."""
    if missing(value):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    changes.append(f"a number as {what}, read as its text")
    return str(value)


def _messages(columns: Row, changes: list[str]) -> list[Row] | None:
    """Take the chat out of whichever column holds it and put it back, normalised, as `messages`."""
    for key in (*_CHAT_KEYS, "prompt"):
        value = columns.get(key)
        if key == "prompt" and isinstance(value, str):
            return None
        if missing(value):
            continue
        if isinstance(value, str) and value.lstrip().startswith("[{"):
            value = _parsed(value, key)
            changes.append("messages that were JSON in a text")
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise BadRowError(f"`{key}` is no list of messages", f"it is of type {type(value).__name__}")
        if not value:
            raise BadRowError("empty prompt", f"`{key}` is an empty list")
        del columns[key]
        answered = value[:-1] if _is_missing_answer(value[-1]) else value
        if not answered:
            raise BadRowError("empty prompt", "only an assistant message")
        columns["messages"] = [_message(message, changes) for message in answered]
        return list(columns["messages"])
    return None


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"`{key}` is no list of messages", "but a text") from error


def _is_missing_answer(message: Any) -> bool:
    """Whether the assistant's turn is there and what it says is not."""
    if not isinstance(message, Mapping) or message.get("tool_calls"):
        return False
    role = message.get("role") or message.get("from")
    said = [value for key in ("content", "value") if not missing(value := message.get(key))]
    return isinstance(role, str) and _ROLES.get(role.strip().lower()) == "assistant" and said in ([], [""])


def _message(message: Any, changes: list[str]) -> Row:
    if not isinstance(message, Mapping):
        raise BadRowError("a message is no object", f"it is of type {type(message).__name__}")
    # Arrow files give every message the keys of all messages: absent ones come as null.
    given = {key: value for key, value in message.items() if not missing(value)}
    role = given.get("role", given.get("from"))
    if not isinstance(role, str) or not role:
        raise BadRowError("a message without a role", f"its keys are {', '.join(map(str, message)) or 'none'}")
    role = _ROLES.get(role.strip().lower(), role)
    content = _number_as_text(given.get("content", given.get("value")), "the content of a message", changes)
    rest = {key: value for key, value in given.items() if key not in ("role", "from", "content", "value")}
    if content is None and not rest.get("tool_calls"):
        raise BadRowError("a message without content", f"role {role}")
    return {"role": role, "content": _content(content), **rest}


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise BadRowError(
            "message content is neither text nor a list of parts", f"it is of type {type(content).__name__}"
        )
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or kind not in (None, "text"):
            raise BadRowError("message content other than text", f"a part of type {kind or type(part).__name__}")
        texts.append(text)
    return "".join(texts)


def _response(columns: Row, messages: list[Row] | None, changes: list[str]) -> str | None:
    """The response of the row: its own column, else what the assistant wrote last (then removed from the chat)."""
    response = columns.get("response")
    if isinstance(response, Mapping):
        response = [response]
    if isinstance(response, Sequence) and not isinstance(response, str | bytes):
        if len(response) != 1:
            raise BadRowError("`response` is a list of more or less than one message", f"it has {len(response)}")
        response = _message(response[0], changes)["content"]
    if response is not None and not isinstance(response, str):
        raise BadRowError("`response` is no text", f"it is of type {type(response).__name__}")
    written: list[str] = []
    while messages and messages[-1]["role"] == "assistant":
        written.insert(0, messages.pop()["content"])
    if len(written) > 1:
        changes.append("several assistant messages at the end, taken for one response")
    if written:
        columns["messages"] = list(messages or ())
        if not messages:
            raise BadRowError("empty prompt", "only an assistant message")
        response = "\n".join(filter(None, written)) if response is None else response
    return response


def _string(row: Row, key: str, absent: str) -> str:
    value = row.get(key)
    if missing(value):
        raise BadRowError(absent, f"its columns are {', '.join(map(str, row)) or 'none'}")
    if not isinstance(value, str):
        raise BadRowError(f"`{key}` is no text", f"it is of type {type(value).__name__}")
    if not value.strip():
        raise BadRowError("empty prompt" if key == "prompt" else f"empty {key}")
    return value
