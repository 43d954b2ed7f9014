"""Settings of an OpenAI-compatible endpoint. Light: composing and planning a config imports no client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Where the endpoint is, what it is asked for, and how long it is waited for."""

    base_url: str
    """The address that `/chat/completions` is appended to, as in http://localhost:8000/v1."""
    model: str
    """The model's name there."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key, never the key itself. Null: OPENAI_API_KEY for
    https://api.openai.com, and no key for any other address, whose owner it would be given to."""
    concurrency: int = 8
    """Requests in flight at a time, of each replica of the role."""
    timeout_s: float = 60.0
    """Seconds until an attempt without a complete answer counts as failed. Answers come in one piece, so this has to
    be enough for the longest one."""
    deadline_s: float = 600.0
    """Seconds for a request with all its attempts and the waits between them."""
    max_retries: int = 5
    """Further attempts after a fault that may pass: 5xx, 429, a broken connection, no answer in time, an answer that
    is no chat completion. Two use up none: a 429 that says how long to wait (Retry-After), and a service that is away,
    which is one that takes no connection, or for which a gateway answers 502, 503 or 504 to everything, its list of
    models too. The deadline ends both, and the run with the second."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, in place of those the role sets; null leaves a field out, as in
    `{max_tokens: null, max_completion_tokens: 4096}`."""

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))

    def _faults(self) -> Iterator[str]:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            yield f"base_url={self.base_url!r} is no address: write it as http://HOST:PORT/v1"
        elif parts.username or parts.password:
            yield "base_url holds a password, which logs would show: name the variable that has it by api_key_env"
        if not self.model:
            yield "model is empty: give the model's name at the endpoint"
        for name, least in (("concurrency", 1), ("max_retries", 0)):
            if getattr(self, name) < least:
                yield f"{name}={getattr(self, name)} must be at least {least}"
        for name in ("timeout_s", "deadline_s"):
            if not getattr(self, name) > 0:
                yield f"{name}={getattr(self, name)} must be above 0 seconds"
        if 0 < self.deadline_s < self.timeout_s:
            yield (
                f"deadline_s={self.deadline_s:g} ends a request before timeout_s={self.timeout_s:g} ends its first "
                "attempt: lower timeout_s, or raise deadline_s"
            )
        for name in sorted(self.extra_body.keys() & OWNED.keys()):
            yield f"extra_body.{name}: {OWNED[name]}"

    @property
    def key_env(self) -> str | None:
        """`api_key_env`, with null filled in; null where no key is sent."""
        parts = urlsplit(self.base_url)
        is_openai = (parts.scheme, parts.hostname) == ("https", "api.openai.com")
        return self.api_key_env or ("OPENAI_API_KEY" if is_openai else None)

    def api_key(self) -> str | None:
        """The key, from this process's environment; null where none is set."""
        return os.environ.get(self.key_env) or None if self.key_env else None


OWNED = {
    "model": "set `model` of the service",
    "messages": "the role writes them",
    "stream": "answers are read in one piece: remove it",
    "n": "each candidate is a request of its own: remove it",
}
"""Fields of a request that `extra_body` does not set, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """A role that asks a service: its replicas only send requests and wait."""

    never_on_gpu: ClassVar[bool] = True
    """Told to placement: the role takes no device, and cores for moments only."""

    replicas: int | None = None
    """Actors, each with `service.concurrency` requests in flight. Null: 1."""
    ranks: int | None = None
    """Another word for `replicas`; given both, they must agree."""
    gpus: int | None = None
    """The role uses no device: 0 or null."""
    cpus: float | None = None
    """Cores a replica; fractions allowed. Null: derived from the plan."""
    service: ServiceConfig
    """Whom it asks."""

    def __post_init__(self) -> None:
        if self.gpus:
            raise ValueError(f"gpus={self.gpus}: the model is the service's, and nothing here runs on a device; set 0")
