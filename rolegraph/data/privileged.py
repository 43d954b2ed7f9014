"""Preprocessors that let a teacher see more than the student: on-policy self-distillation (OPSD)."""

from __future__ import annotations

import hashlib
from typing import Any

HINT = "\nThe answer is {answer}."


def reveal_answer(row: dict[str, Any]) -> dict[str, Any]:
    """Add a `teacher_prompt`: the row's prompt and after it its column `answer`; a row without one stays as it is.

    >>> reveal_answer({"prompt": "1 + 1 =", "answer": "2"})["teacher_prompt"]
    '1 + 1 =\\nThe answer is 2.'
    """
    if row.get("answer") is None or row.get("teacher_prompt") is not None:
        return row
    return {**row, "teacher_prompt": _with_hint(row)}


def reveal_half(row: dict[str, Any]) -> dict[str, Any]:
    """As `reveal_answer`; but in half of the rows, chosen by their content, the student sees the answer as well.

    For a model that has yet to learn what such a hint is worth: a warm start on those rows teaches it.
    """
    digest = hashlib.sha256(repr(sorted((key, repr(value)) for key, value in row.items())).encode()).digest()
    if row.get("answer") is None or digest[0] % 2:
        return reveal_answer(row)
    key = "messages" if row.get("messages") else "prompt"
    return {**row, key: _with_hint(row)}


def _with_hint(row: dict[str, Any]) -> Any:
    """The row's prompt, as messages or as text, with the hint at its end."""
    hint = HINT.format(answer=row["answer"])
    messages = row.get("messages")
    if not messages:
        return f"{row.get('prompt') or ''}{hint}"
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    last = {**asked[-1], "content": f"{asked[-1]['content']}{hint}"}
    return [*asked[:-1], last]
