"""An OpenAI-compatible endpoint, asked for many answers at a time.

The `openai` package makes the requests; what is here decides how many are in flight and which faults are tried again,
when and for how long, and turns a fault that stays into a reason beside the row it is about.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from rolegraph.errors import ConfigError, ServiceError
from rolegraph.services.config import ServiceConfig
from rolegraph.services.reply import BadAnswerError, NoTextError, Reply, read_reply, shorten

if TYPE_CHECKING:
    from openai import APIStatusError

T = TypeVar("T")

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
"""Waits between attempts double from the first to the longest; each is cut by up to a half at random, so that requests
that failed together do not come back together."""
LONGEST_CONNECT_S = 10.0
"""Until a connection counts as one that nobody takes, if `timeout_s` is not less than twice that."""
GATEWAY = frozenset({502, 503, 504})
"""How a gateway says that the service behind it is away; and how a service says that it is busy."""


@dataclass
class _Seen:
    """What the attempts of a request have met."""

    fault: str = "it was not answered"
    """Of the newest attempt."""
    attempts: int = 0
    failed: int = 0
    """Attempts that used up a retry."""
    is_away: bool = False
    """Whether nobody took the newest."""
    may_be_away: bool = False
    """Whether a gateway took the newest, and perhaps nobody behind it."""
    was_gone: bool = False
    """Whether nobody was there when that was looked at last."""

    def note(self, fault: str, *, counts: bool = True, is_away: bool = False, may_be_away: bool = False) -> None:
        """One more attempt has failed."""
        self.fault, self.is_away, self.may_be_away = fault, is_away, may_be_away
        self.attempts += 1
        self.failed += counts


class Service:
    """A client with a loop in a thread of its own; its methods may be called from any thread.

    >>> with Service(ServiceConfig(base_url="http://localhost:8000/v1", model="m")) as service:  # doctest: +SKIP
    ...     replies = service.run([lambda: service.chat([{"role": "user", "content": "2 + 2 = ?"}], max_tokens=8)])
    """

    def __init__(self, config: ServiceConfig) -> None:
        from openai import AsyncOpenAI, Timeout

        self.config = config
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(config.concurrency)
        self._quiet_until = 0.0
        """When the service wants to hear of us again, on the clock of `time.monotonic`."""
        self._random = random.Random()
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            # Without a key the package would look for one by itself, and send it to whoever answers there.
            api_key=config.api_key() or "none",
            timeout=Timeout(config.timeout_s, connect=min(LONGEST_CONNECT_S, config.timeout_s / 2)),
            max_retries=0,
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="service", daemon=True)
        self._thread.start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        **extra: Any,
    ) -> Reply:
        """Ask for one answer; what is null is left out, further fields go along, the config's `extra_body` over all.

        A fault of this request alone is `Reply.fault`. Raises for what no other request would survive: ConfigError for
        a key that is refused (401) and an address or model that is not there (404), ServiceError where nobody takes
        connections until the deadline.
        """
        body: dict[str, Any] = {"model": self.config.model, "messages": list(messages)}
        body |= {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
        said = {name: value for name, value in {**body, **extra, **self.config.extra_body}.items() if value is not None}
        return await self._at_home(self._ask(lambda: self._post(said)))

    def check(self) -> None:
        """Raises ConfigError where nobody answers at the address, or the key is refused.

        Asks for the list of models, which not every service has.
        """

        async def models() -> Reply:
            await self._client.get("/models", cast_to=str)
            return Reply("", "stop", None)

        reply = self._wait(self._ask(models, is_check=True))
        if reply.fault is not None:
            raise ConfigError(f"the service at {self.config.base_url} does not work: {reply.fault}")

    def run(self, coroutines: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """Run all of them at a time and wait for their results, in this order; raises the first exception."""

        async def together() -> list[T]:
            tasks = [asyncio.ensure_future(one()) for one in coroutines]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        return self._wait(together())

    def close(self) -> None:
        """Give up what is in flight and end the thread."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._client.close()

        self._wait(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the service was closed while it was asked") from None
        except BaseException:
            future.cancel()
            raise

    async def _at_home(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await in the service's own loop, whichever runs here."""
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _post(self, body: dict[str, Any]) -> Reply:
        return read_reply(await self._client.post("/chat/completions", cast_to=str, body=body))

    async def _ask(self, attempt: Callable[[], Awaitable[Reply]], *, is_check: bool = False) -> Reply:
        """One request with all its attempts, within the limit on requests in flight and the deadline."""
        async with self._slots:
            seen = _Seen()
            try:
                async with asyncio.timeout(self.config.deadline_s):
                    return await self._attempts(attempt, seen, is_check=is_check)
            except TimeoutError:
                words = f"no answer within deadline_s={self.config.deadline_s:g}; at last {seen.fault}"
                if seen.is_away or await self._is_or_was_away(seen):
                    raise ServiceError(f"{self.config.base_url}: {words}: is the service still running?") from None
                return Reply.of_fault(words)

    async def _attempts(self, attempt: Callable[[], Awaitable[Reply]], seen: _Seen, *, is_check: bool) -> Reply:
        """Try until there is an answer, a fault that stays, or no retry left; `seen` is for whoever ends this."""
        while True:
            await self._wait_until_welcome()
            reply = await self._once(attempt, seen, is_check=is_check)
            if reply is not None:
                return reply
            if seen.failed > self.config.max_retries and not await self._is_or_was_away(seen):
                return Reply.of_fault(f"{seen.fault} (after {seen.failed} attempts)")
            if self._quiet_until - time.monotonic() < FIRST_WAIT_S:
                # Told to come back at once, again and again: what was told is not enough.
                await asyncio.sleep(self._back_off(seen.attempts))

    async def _once(self, attempt: Callable[[], Awaitable[Reply]], seen: _Seen, *, is_check: bool) -> Reply | None:
        """One attempt; null for a fault that may pass, which `seen` tells."""
        import openai

        try:
            # The client's own limit is for each read, and a server may drip.
            async with asyncio.timeout(self.config.timeout_s):
                return await attempt()
        except openai.APIStatusError as error:
            if not _may_pass(error.status_code):
                return self._settled(error, is_check=is_check)
            wait_s = retry_after(error.response.headers)
            if wait_s is not None:
                self._quiet_until = max(self._quiet_until, time.monotonic() + wait_s)
            is_told = wait_s is not None and error.status_code == 429
            may_be_away = error.status_code in GATEWAY and not is_check
            seen.note(f"HTTP {error.status_code}: {_words(error)}", counts=not is_told, may_be_away=may_be_away)
        except TimeoutError:
            seen.note(f"no answer within timeout_s={self.config.timeout_s:g}")
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            # By these names the client says that nobody takes the call: no fault of the request.
            is_away = type(cause).__name__ in ("ConnectError", "ConnectTimeout") and not is_check
            if isinstance(error, openai.APITimeoutError) and not is_away:
                seen.note(f"no answer within timeout_s={self.config.timeout_s:g}")
                return None
            words = shorten(f"{type(cause).__name__} {cause}")
            seen.note(f"the connection failed: {words}", counts=not is_away, is_away=is_away)
        except BadAnswerError as error:
            seen.note(str(error))
        except NoTextError as error:
            return Reply.of_fault(str(error))
        except (UnicodeError, TypeError, ValueError) as error:
            # Lone surrogates and the like: the request was never sent.
            return Reply.of_fault(f"the request cannot be written as JSON: {error}")
        return None

    async def _is_or_was_away(self, seen: _Seen) -> bool:
        """Whether the service is away, or was so far, and no request is at fault: it answers nothing else either."""
        import openai

        if not seen.may_be_away:
            return False
        was_gone, seen.was_gone = seen.was_gone, False
        try:
            async with asyncio.timeout(min(self.config.timeout_s, LONGEST_CONNECT_S)):
                await self._client.get("/models", cast_to=str)
        except openai.APIStatusError as error:
            seen.was_gone = error.status_code in GATEWAY
        except (TimeoutError, openai.APIConnectionError):
            seen.was_gone = True
        if not (seen.was_gone or was_gone):
            return False
        seen.failed = 0  # it has all its attempts when the service is back
        return True

    async def _wait_until_welcome(self) -> None:
        """Wait where the service asked for it, and a little more, so that not all come back at once."""
        while (wait_s := self._quiet_until - time.monotonic()) > 0:  # noqa: ASYNC110 - others may prolong it
            await asyncio.sleep(wait_s + self._random.uniform(0, min(0.1 * wait_s, 1.0)))

    def _back_off(self, failed: int) -> float:
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (failed - 1)) * self._random.uniform(0.5, 1.0)

    def _settled(self, error: APIStatusError, *, is_check: bool) -> Reply:
        """What to make of a status that another attempt would not change."""
        config, status = self.config, error.status_code
        if status == 401 or (status == 403 and is_check):
            # The service's own words may hold a part of the key.
            raise ConfigError(f"{config.base_url} refuses the key (HTTP {status}): {self._key_advice()}") from None
        if is_check:
            return Reply("", "stop", None)  # it is there; what it thinks of the list of models is no matter
        if status == 404:
            raise ConfigError(
                f"{config.base_url}/chat/completions with model={config.model!r} is not there (HTTP 404: "
                f"{_words(error)}): correct the service's base_url or model"
            ) from None
        return Reply.of_fault(f"HTTP {status}: {_words(error)}")

    def _key_advice(self) -> str:
        name = self.config.key_env
        if name is None:
            return "none was sent; name the environment variable that holds it by the service's api_key_env"
        state = "holds another one" if self.config.api_key() else "is not set"
        return f"the environment variable {name} (the service's api_key_env) {state} where the role runs"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a service asks to wait: `retry-after-ms`, or `Retry-After` in seconds or as a date (RFC 9110).

    >>> retry_after({"retry-after": "1.5"})
    1.5
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def _may_pass(status: int) -> bool:
    """Whether the same request may be answered later: time-outs, conflicts, limits, and faults of the server."""
    return status in (408, 409, 425, 429) or status >= 500


def _words(error: APIStatusError) -> str:
    """What the service says."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return shorten(message if isinstance(message, str) else error.message) or "no words"
