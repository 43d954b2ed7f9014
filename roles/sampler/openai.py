"""Candidates from an OpenAI-compatible endpoint."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.errors import BatchError
from rolegraph.interfaces import SamplerRole, SamplingParams
from rolegraph.json_rows import EXACT, decode
from rolegraph.role import RoleContext, endpoint
from rolegraph.services.reply import Reply
from roles.sampler.candidates import Candidates
from roles.sampler.config import OpenAISamplerConfig

SEED_BITS = 31
"""Of the seeds that are sent: services differ in what they take, and all take a 32-bit integer."""


class OpenAISampler(SamplerRole):
    """A replica: it sends a request a candidate. What a service cannot do, it says by a fault of each candidate.

    `temperature`, `top_p`, `max_tokens` and the seed are sent always, `top_k`, `min_p`, `stop_token_ids` and
    `ignore_eos` only where they ask for something: they are vLLM's, and other services refuse fields they do not know.
    """

    Config: ClassVar[type[OpenAISamplerConfig]] = OpenAISamplerConfig
    # What limits the requests in flight is `service.concurrency`, not how many calls of so many rows are worked on.
    queue_rows: ClassVar[int] = 16
    queue_rows_alone: ClassVar[int] = 1024

    config: OpenAISamplerConfig

    def __init__(self, config: OpenAISamplerConfig, context: RoleContext) -> None:
        super().__init__(config, context)

    def setup(self) -> None:
        """Ask the service whether it is there. Raises ConfigError where it is not, or refuses the key."""
        from rolegraph.services.service import Service

        self._service = Service(self.config.service)
        self._service.check()

    def teardown(self) -> None:
        """Give up what is in flight."""
        if hasattr(self, "_service"):
            self._service.close()

    @endpoint(dispatch="queue")
    def sample(self, batch: Batch, sampling: SamplingParams) -> Batch:
        """See `SamplerRole.sample`; safe to call from many threads at once.

        Raises ConfigError for a key that is refused, an address or a model that is not there, ServiceError for a
        service that goes away.
        """
        wanted = Candidates.of(batch, sampling)
        chats = [self.messages(batch, row) for row in range(len(batch))]
        asked: list[Callable[[], Awaitable[Reply]]] = [
            functools.partial(self._service.chat, chats[row], **request_of(sampling, seed))
            for row, seed in zip(wanted.source, wanted.seeds, strict=True)
        ]
        replies = self._service.run(asked)
        return wanted.drawn(
            [reply.text for reply in replies],
            [reply.finish_reason for reply in replies],
            [reply.fault for reply in replies],
            response_length=pa.array([reply.tokens for reply in replies], pa.int32()),
        )

    def messages(self, batch: Batch, row: int) -> list[dict[str, Any]]:
        """What the service is sent for a row: its `messages`, else its `prompt` as the user's; override to say more.

        Messages are as the data set had them where `exact_columns` tells; keys that are null are left out, for Arrow
        gives an object those of all others.
        """
        exact = batch[EXACT][row].as_py() if EXACT in batch else None
        messages = decode(exact.encode()).get("messages") if exact else None
        if messages is None and "messages" in batch:
            messages = batch["messages"][row].as_py()
        if messages:
            return [without_nulls(message) for message in messages]
        prompt = batch["prompt"][row].as_py() if "prompt" in batch else None
        if not isinstance(prompt, str):
            raise BatchError(f"row {batch['uid'][row].as_py()}: there are neither messages nor a prompt to send")
        return [{"role": "user", "content": prompt}]


def without_nulls(value: Any) -> Any:
    """The value without keys that are null, at any depth.

    >>> without_nulls({"calls": [{"id": "a", "more": None}], "name": None})
    {'calls': [{'id': 'a'}]}
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def request_of(sampling: SamplingParams, seed: int | None) -> dict[str, Any]:
    """The fields of a request, beside its messages."""
    beyond = {
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos or None,
    }
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": None if seed is None else seed & (2**SEED_BITS - 1),
        **{name: value for name, value in beyond.items() if value is not None},
    }
