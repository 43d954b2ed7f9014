"""What roles that score responses read of a batch: the texts, and what was asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolegraph.batch import Batch
from rolegraph.errors import ConfigError
from rolegraph.rewards.steps import Decode

Message = dict[str, str]


def decoder(model: str, *, skip_special_tokens: bool) -> Decode:
    """From token ids to text by the tokenizer of a Hugging Face folder or name."""
    file = Path(model).expanduser() / "tokenizer.json"
    if file.is_file():
        # Read by itself this takes a moment; through transformers it would import torch.
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return lambda ids: tokenizer.decode_batch(list(ids), skip_special_tokens=skip_special_tokens)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model)
    return lambda ids: slow.batch_decode([list(row) for row in ids], skip_special_tokens=skip_special_tokens)


def policy_decoder(role: str, policy: str | None) -> Decode:
    """From response ids to text, without special tokens. Raises ConfigError where no tokenizer is given."""
    if policy is None:
        raise ConfigError(f"{role}.policy is not set: give the folder of the policy's tokenizer")
    return decoder(policy, skip_special_tokens=True)


def texts_of(batch: Batch, decode: Decode) -> list[str | None]:
    """The responses: the column `response_text`, where a null was never drawn, else what `response_ids` decode to."""
    if "response_text" not in batch:
        return decoded(batch, decode)
    texts: list[str | None] = batch["response_text"].to_pylist()
    return texts


def decoded(batch: Batch, decode: Decode) -> list[str | None]:
    """What `response_ids` decode to; null where they are."""
    ids: list[list[int] | None] = batch["response_ids"].to_pylist()
    texts = iter(decode([row for row in ids if row is not None]))
    return [None if row is None else next(texts) for row in ids]


def uids_of(batch: Batch) -> list[str]:
    """The rows' uids, else their numbers."""
    return [str(uid) for uid in batch["uid"].to_pylist()] if "uid" in batch else list(map(str, range(len(batch))))


def prompts_of(batch: Batch, decode: Decode) -> list[Any]:
    """What the policy was asked: chat messages, else text."""
    if "messages" in batch:
        return list(batch["messages"].to_pylist())
    if "prompt" in batch:
        return list(batch["prompt"].to_pylist())
    return list(decode(batch["prompt_ids"].to_pylist()))


def as_messages(prompt: Any) -> list[Message]:
    """A prompt as chat messages whose content is text."""
    if prompt is None or isinstance(prompt, str):
        return [{"role": "user", "content": prompt or ""}]
    return [{"role": str(message["role"]), "content": text_in(message.get("content"))} for message in prompt]


def text_in(content: Any) -> str:
    """The text of a message: its content, or that of its text parts joined."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)


def as_text(prompt: Any) -> str:
    """A prompt as one text: the messages' contents, one after another."""
    return "\n\n".join(message["content"] for message in as_messages(prompt))
