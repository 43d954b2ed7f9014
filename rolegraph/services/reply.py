"""What a service answered, read from its JSON without trust in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rolegraph.data.rows import repair

SHOWN = 200
"""Characters of a service's own words that a message repeats."""
MOST_TOKENS = 2**31 - 1
"""What the column of lengths holds; a service that says more is not believed."""


@dataclass(frozen=True)
class Reply:
    """One answer, or why there is none."""

    text: str | None
    """Reasoning, where the service tells it, is `<think>...</think>` before the answer. Null with a fault."""
    finish_reason: str
    """As the service says it (stop, length, ...); `error` with a fault."""
    tokens: int | None
    """Tokens of reasoning and answer; null where the service does not say."""
    fault: str | None = None
    """Why there is no answer."""

    @classmethod
    def of_fault(cls, why: str) -> Reply:
        """No answer."""
        return cls(None, "error", None, why)


class BadAnswerError(Exception):
    """An answer that is no chat completion; the next one may be."""


class NoTextError(Exception):
    """A chat completion without a text: asked again, the service would say the same."""


def read_reply(body: str) -> Reply:
    """Raises BadAnswerError for what is no chat completion, NoTextError for one that says nothing.

    Lone surrogates, which JSON can escape and UTF-8 cannot write, become U+FFFD.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswerError(f"the answer is no JSON ({error}): {shorten(body)}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list) or not answer["choices"]:
        raise BadAnswerError(f"the answer has no choices: {shorten(body)}")
    choice = answer["choices"][0]
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise BadAnswerError(f"the answer has no message: {shorten(body)}")
    finish_reason = _text(choice.get("finish_reason"))
    finish_reason = "unknown" if finish_reason is None else finish_reason
    reasoning = _text(message.get("reasoning_content")) or _text(message.get("reasoning"))
    content = _text(message.get("content"))
    if content is None and reasoning is None:
        refusal = _text(message.get("refusal"))
        why = f"the service refuses: {shorten(refusal)}" if refusal else "the answer has no text"
        raise NoTextError(f"{why} (finish_reason {finish_reason})")
    return Reply(folded(reasoning, content or ""), finish_reason, _tokens(answer.get("usage")))


def folded(reasoning: str | None, answer: str) -> str:
    """Reasoning and answer as one text.

    >>> folded("2 + 2", "4")
    '<think>\\n2 + 2\\n</think>\\n\\n4'
    """
    if not reasoning or not reasoning.strip():
        return answer
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{answer.lstrip()}"


def shorten(text: str) -> str:
    """The beginning of a text on one line."""
    line = _repaired(" ".join(text.split()))
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def _text(value: Any) -> str | None:
    """A text, or the text parts of a list of parts."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        return _repaired("".join(texts)) if texts else None
    return _repaired(value) if isinstance(value, str) else None


def _repaired(text: str) -> str:
    return str(repair(text)[0])


def _tokens(usage: Any) -> int | None:
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens <= MOST_TOKENS else None
