"""From the many shapes a row comes in (chat, plain prompt, from/value, content parts) to one.

A row becomes a `Sample`: what the model sees, what it should answer if the row says so, and the columns that pass
through. Whatever cannot be read raises `BadRowError` with the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolegraph.data.report import BadRowError

Row = dict[str, Any]
Needs = Literal["prompt", "response", "text"]
"""What an algorithm trains on: prompts (RL), prompts with a response (sft), or raw text (pt)."""

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool", "function": "tool"}
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


def read(row: Row, needs: Needs, *, system_prompt: str | None, prompt_as: str) -> Sample:
    """Understand one row.

    Raises:
        BadRowError: the row has no prompt (or response, or text, where it is needed), or one in no known shape.
    """
    if needs == "text":
        return Sample(columns=row, text=_string(row, "text", "no text"))
    columns = dict(row)
    messages = _messages(columns)
    text = None
    if messages is None:
        prompt = _string(columns, "prompt", "no messages and no prompt")
        if prompt_as == "user":
            messages = columns["messages"] = [{"role": "user", "content": prompt}]
        else:
            text = prompt
    response = _response(columns, messages)
    if messages is not None:
        _complete(messages, system_prompt)
    teacher_messages, teacher_text = _teacher_prompt(columns, system_prompt, prompt_as)
    if needs == "response" and response is None:
        raise BadRowError("no response", "neither a last assistant message nor a `response`")
    if response is not None:
        columns["response"] = response
    return Sample(columns, messages, text, response, teacher_messages, teacher_text)


def _complete(messages: list[Row], system_prompt: str | None) -> None:
    """Put the system prompt first where the chat has none of its own; a chat that asks nothing is refused."""
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    if not any(message["content"] for message in messages if message["role"] != "system"):
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
        messages = [_message(message) for message in value]
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


def repair(value: Any) -> tuple[Any, bool]:
    """The value with lone surrogates in its strings replaced by U+FFFD (halves of a pair joined), and if any were.

    JSON can carry them as escapes; UTF-8, and so Arrow and every tokenizer, cannot.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), True
        return value, False
    if isinstance(value, dict):
        pairs = [(repair(k), repair(v)) for k, v in value.items()]
        if any(key_changed or changed for (_, key_changed), (_, changed) in pairs):
            return {key: item for (key, _), (item, _) in pairs}, True
        return value, False
    if isinstance(value, list):
        items = [repair(item) for item in value]
        if any(changed for _, changed in items):
            return [item for item, _ in items], True
    return value, False


def _messages(columns: Row) -> list[Row] | None:
    """Take the chat out of whichever column holds it and put it back, normalised, as `messages`."""
    for key in (*_CHAT_KEYS, "prompt"):
        value = columns.get(key)
        if key == "prompt" and isinstance(value, str):
            return None
        if value is None:
            continue
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise BadRowError(f"`{key}` is no list of messages", f"it is of type {type(value).__name__}")
        if not value:
            raise BadRowError("empty prompt", f"`{key}` is an empty list")
        del columns[key]
        columns["messages"] = [_message(message) for message in value]
        return list(columns["messages"])
    return None


def _message(message: Any) -> Row:
    if not isinstance(message, Mapping):
        raise BadRowError("a message is no object", f"it is of type {type(message).__name__}")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or not role:
        raise BadRowError("a message without a role", f"its keys are {', '.join(map(str, message)) or 'none'}")
    content = message.get("content", message.get("value"))
    # Arrow files give every message the keys of all messages: absent ones come as null.
    rest = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value") and v is not None}
    if content is None and not rest.get("tool_calls"):
        raise BadRowError("a message without content", f"role {role}")
    return {"role": _ROLES.get(role, role), "content": _content(content), **rest}


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


def _response(columns: Row, messages: list[Row] | None) -> str | None:
    """The response of the row: its own column, else the last message when the assistant wrote it (then removed)."""
    response = columns.get("response")
    if isinstance(response, Sequence) and not isinstance(response, str | bytes):
        if len(response) != 1:
            raise BadRowError("`response` is a list of more or less than one message", f"it has {len(response)}")
        response = _message(response[0])["content"]
    if response is not None and not isinstance(response, str):
        raise BadRowError("`response` is no text", f"it is of type {type(response).__name__}")
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        columns["messages"] = list(messages)
        if not messages:
            raise BadRowError("empty prompt", "only an assistant message")
        response = last["content"] if response is None else response
    return response


def _string(row: Row, key: str, missing: str) -> str:
    value = row.get(key)
    if value is None:
        raise BadRowError(missing, f"its columns are {', '.join(map(str, row)) or 'none'}")
    if not isinstance(value, str):
        raise BadRowError(f"`{key}` is no text", f"it is of type {type(value).__name__}")
    if not value:
        raise BadRowError("empty prompt" if key == "prompt" else f"empty {key}")
    return value
