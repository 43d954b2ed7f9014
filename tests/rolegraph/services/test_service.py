"""A service that misbehaves, and what becomes of the requests."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from typing import Any

import pytest

from rolegraph.errors import ConfigError, ServiceError
from rolegraph.services import service as service_module
from rolegraph.services.config import ClientConfig, ServiceConfig
from rolegraph.services.reply import Reply, folded
from rolegraph.services.service import Service, retry_after
from tests.stub_openai import Action, Request, StubOpenAI, cut, drip, hang_up, raw, say, stall, status

ASKED = [{"role": "user", "content": "2 + 2 = ?"}]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FIRST_WAIT_S", 0.01)


def ask(server: StubOpenAI, messages: Any = ASKED, request: dict[str, Any] | None = None, **settings: Any) -> Reply:
    """One request to a service with these settings."""
    with Service(ServiceConfig(base_url=server.url, model="stub", **{"api_key_env": None} | settings)) as service:
        return service.run([lambda: service.chat(messages, **request or {})])[0]


def ask_many(server: StubOpenAI, count: int, **settings: Any) -> list[Reply]:
    """The same request several times."""
    with Service(ServiceConfig(base_url=server.url, model="stub", **{"api_key_env": None} | settings)) as service:
        return service.run([lambda: service.chat(ASKED)] * count)


class Timer:
    """Whether some seconds are over since it was made."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until


def test_what_is_asked_and_what_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    with StubOpenAI([say("4", tokens=1)]) as server:
        request = {"temperature": 0.0, "top_p": 0.9, "max_tokens": 16, "seed": 7, "top_k": 5}
        reply = ask(server, request=request, api_key_env="SOME_KEY", extra_body={"top_p": 1.0, "top_k": None, "x": [1]})
    assert reply == Reply("4", "stop", 1)
    [seen] = server.requests
    wanted = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 16, "seed": 7, "x": [1]}
    assert seen.body == {"model": "stub", "messages": ASKED, **wanted}
    assert seen.headers["authorization"] == "Bearer secret"


def test_no_key_is_sent_that_was_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not for everybody")
    with StubOpenAI([say("4")]) as server:
        ask(server)
        with Service(ServiceConfig(base_url=server.url, model="stub")) as service:
            service.run([lambda: service.chat(ASKED)])
    assert len(server.requests) == 2
    assert "not for everybody" not in str([request.headers for request in server.requests])


@pytest.mark.parametrize(
    ("base_url", "named", "key"),
    [
        ("https://api.openai.com/v1", None, "openai's"),
        ("https://API.openai.com:443/v1", None, "openai's"),
        ("https://api.openai.com/v1", "OTHER_KEY", "another"),
        ("http://api.openai.com/v1", None, None),
        ("https://api.openai.com.example.org/v1", None, None),
        ("https://example.org/api.openai.com", None, None),
        ("http://localhost:8000/v1", None, None),
        ("http://localhost:8000/v1", "OTHER_KEY", "another"),
        ("http://localhost:8000/v1", "OPENAI_API_KEY", "openai's"),
        ("http://localhost:8000/v1", "NO_SUCH_KEY", None),
    ],
)
def test_whom_a_key_is_sent(monkeypatch: pytest.MonkeyPatch, base_url: str, named: str | None, key: str | None) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "openai's")
    monkeypatch.setenv("OTHER_KEY", "another")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert ServiceConfig(base_url=base_url, model="m", api_key_env=named).api_key() == key


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_before_the_answer(field: str) -> None:
    with StubOpenAI([say("4", reasoning="two and two\n", field=field)]) as server:
        assert ask(server).text == "<think>\ntwo and two\n</think>\n\n4"
    assert folded(None, "4") == folded(" ", "4") == "4"


def test_parts_of_a_text_are_joined_and_a_reply_without_usage_has_no_tokens() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "image"}, {"type": "text", "text": "2"}]
    with StubOpenAI([say(None, tokens=None, content_filter_results={}), say(parts, tokens=None)]) as server:  # type: ignore[arg-type]
        assert ask(server).fault == "the answer has no text (finish_reason stop)"
        assert ask(server) == Reply("42", "stop", None)


def test_what_utf8_cannot_write_is_replaced_wherever_a_service_says_it() -> None:
    lone = "a\ud83d"
    odd = say(lone, reasoning=lone, finish_reason=lone, tokens=10**20)
    parts: Any = [{"type": "text", "text": "\ud83d"}, {"type": "text", "text": "\ude00 \udc00"}]
    script = [odd, say(parts), say(None, finish_reason=lone), say(None, refusal=lone), status(400, message=lone)]
    with StubOpenAI([*script, raw('{"choices": "\\ud83d"}')]) as server:
        first, *others = (ask(server, max_retries=0) for _ in range(6))
    assert first == Reply("<think>\na\ufffd\n</think>\n\na\ufffd", "a\ufffd", None)
    assert others[0].text == "\U0001f600 \ufffd"
    for reply in others:
        assert f"{reply.text} {reply.finish_reason} {reply.fault}".encode()
    for reply in others[1:4]:
        assert "a\ufffd" in (reply.fault or "")


PASSING: dict[str, tuple[Action, str]] = {
    "429": (status(429), "HTTP 429: as scripted"),
    "500": (status(500), "HTTP 500: as scripted"),
    "503 in html": (raw("<html>busy", code=503), "HTTP 503"),
    "stalled": (stall(5), "no answer within timeout_s=0.8"),
    "dripping": (drip(5), "no answer within timeout_s=0.8"),
    "cut": (cut(), "the connection failed"),
    "hung up": (hang_up, "the connection failed"),
    "too deep": (raw("[" * 100_000), "the answer is no JSON (maximum recursion depth"),
    "no JSON": (raw('{"choices": [{"mess'), "the answer is no JSON"),
    "no choices": (raw('{"error": {"message": "overloaded"}}'), "no choices: {\"error\": {\"message\": "),
    "no list": (raw("[]"), "the answer has no choices"),
    "no message": (raw('{"choices": [{}]}'), "the answer has no message"),
}  # fmt: skip


def patience(name: str) -> dict[str, float]:
    """Short only where the server does not answer, for a busy machine is slow to."""
    return {"timeout_s": 0.8} if name in ("stalled", "dripping") else {}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_costs_nothing_but_time(name: str) -> None:
    action, _ = PASSING[name]
    with StubOpenAI([action, action, say("4")]) as server:
        assert ask(server, **patience(name)).text == "4"
    assert len(server.requests) >= 3


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_stays_is_the_rows(name: str) -> None:
    action, words = PASSING[name]
    with StubOpenAI([action]) as server:
        reply = ask(server, max_retries=1, **patience(name))
    assert (reply.text, reply.finish_reason, reply.tokens) == (None, "error", None)
    assert reply.fault is not None
    assert words in reply.fault
    assert "after 2 attempts" in reply.fault
    assert len(server.requests) == 2


@pytest.mark.parametrize("code", [400, 403, 413, 422])
def test_a_refused_request_is_the_rows_fault_at_once(code: int) -> None:
    with StubOpenAI([status(code, message="too long by half")]) as server:
        assert ask(server).fault == f"HTTP {code}: too long by half"
    assert len(server.requests) == 1


def test_a_refused_key_ends_the_run_and_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with StubOpenAI([status(401, message="Incorrect key: sk-123")]) as server:
        with pytest.raises(ConfigError, match=r"refuses the key \(HTTP 401\): .* variable SOME_KEY .* is not set") as e:
            ask(server, api_key_env="SOME_KEY")
        assert "sk-123" not in "".join(traceback.format_exception(e.value)), "a part of the key"
        monkeypatch.setenv("SOME_KEY", "wrong")
        with pytest.raises(ConfigError, match=r"SOME_KEY .* holds another one"):
            ask(server, api_key_env="SOME_KEY")
        with pytest.raises(ConfigError, match=r"none was sent.*api_key_env"):
            ask(server)
    assert len(server.requests) == 3


def test_a_model_that_is_not_there_ends_the_run() -> None:
    with (
        StubOpenAI([status(404, message="no model stub")]) as server,
        pytest.raises(ConfigError, match=r"model='stub' is not there .*no model stub.*base_url or model"),
    ):
        ask(server)


def test_a_service_that_goes_away_is_waited_for_and_then_ends_the_run() -> None:
    with StubOpenAI([say("4")]) as server:
        config = ServiceConfig(
            base_url=server.url, model="stub", api_key_env=None, max_retries=0, timeout_s=1.5, deadline_s=1.5
        )
    with Service(config) as service:
        with pytest.raises(ServiceError, match=r"no answer within deadline_s=1.5; .*ConnectError.* still running\?"):
            service.run([lambda: service.chat(ASKED)])
        port = int(server.url.split(":")[-1].split("/")[0])
        back = threading.Timer(0.5, lambda: again.__enter__())
        again = StubOpenAI([say("5")], port=port)
        back.start()
        assert service.run([lambda: service.chat(ASKED)])[0].text == "5"
        again.__exit__()


@pytest.mark.parametrize("code", [502, 503, 504])
def test_a_service_that_is_away_behind_a_gateway_is_waited_for_and_then_ends_the_run(code: int) -> None:
    here = Timer(0.6)
    with StubOpenAI(lambda _: say("4") if here.is_over else status(code)) as server:
        server.models = lambda handler: (status(200) if here.is_over else status(code))(handler)
        replies = ask_many(server, 3, max_retries=1)
        assert [reply.text for reply in replies] == ["4"] * 3
    with (
        StubOpenAI([status(code)], models=status(code)) as server,
        pytest.raises(ServiceError, match=rf"no answer within deadline_s=0.5; .*HTTP {code}.* still running\?"),
    ):
        ask(server, timeout_s=0.5, deadline_s=0.5, max_retries=0)


@pytest.mark.parametrize("models", [None, status(404), status(401), status(500)])
def test_a_request_that_a_gateway_fails_alone_is_the_rows_fault(models: Action | None) -> None:
    with StubOpenAI([status(502)], models=models) as server:
        assert ask(server, max_retries=1).fault == "HTTP 502: as scripted (after 2 attempts)"
        assert "deadline" in (ask(server, max_retries=10**6, timeout_s=0.3, deadline_s=0.3).fault or "")


def test_a_service_that_does_not_take_connections_is_away() -> None:
    """A full queue of connections is silent, as a machine that is down is."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        address = listening.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        config = ServiceConfig(
            base_url=f"http://127.0.0.1:{address[1]}/v1", model="stub", timeout_s=1, deadline_s=1.5, max_retries=0
        )
        with Service(config) as service, pytest.raises(ServiceError, match=r"ConnectTimeout.* still running\?"):
            service.run([lambda: service.chat(ASKED)])
        for one in waiting:
            one.close()


def test_a_check_before_the_first_request() -> None:
    def check(url: str, **settings: Any) -> None:
        with Service(ServiceConfig(base_url=url, model="stub", api_key_env=None, max_retries=1, **settings)) as service:
            service.check()

    with StubOpenAI([say("4")]) as server:
        check(server.url)
    with StubOpenAI([say("4")], models=status(404)) as server:
        check(server.url)
        assert server.requests == []
    for code in (401, 403):
        with StubOpenAI([say("4")], models=status(code)) as server, pytest.raises(ConfigError, match="refuses the key"):
            check(server.url)
    with pytest.raises(ConfigError, match=f"{server.url} does not work: the connection failed.*after 2 attempts"):
        check(server.url)  # it has ended


def test_a_service_is_left_alone_for_as_long_as_it_asks_by_all_requests() -> None:
    with StubOpenAI([status(429, retry_after=0.6), say("4")]) as server:
        config = ServiceConfig(base_url=server.url, model="stub", api_key_env=None, concurrency=1, max_retries=0)
        with Service(config) as service:
            replies = service.run([lambda: service.chat(ASKED)] * 3)
    assert [reply.text for reply in replies] == ["4"] * 3
    first, second, *_ = (request.at for request in server.requests)
    assert second - first >= 0.6


@pytest.mark.parametrize("told_s", [0, 0.001])
def test_a_service_that_always_says_come_back_at_once_is_asked_less_and_less(told_s: float) -> None:
    with StubOpenAI([status(429, retry_after=told_s)] * 7 + [say("4")]) as server:
        assert ask(server, max_retries=0).text == "4", "what it tells uses up no retry"
    times = [request.at for request in server.requests]
    for attempt, (before, after) in enumerate(pairwise(times)):
        assert after - before >= 0.01 * 2**attempt / 2


def test_a_wait_that_the_service_asks_for_ends_with_the_deadline() -> None:
    with StubOpenAI([status(429, retry_after=100)]) as server:
        started = time.monotonic()
        reply = ask(server, timeout_s=0.5, deadline_s=0.5)
    assert reply.fault == "no answer within deadline_s=0.5; at last HTTP 429: as scripted"
    assert time.monotonic() - started < 20


def test_retry_after_as_seconds_milliseconds_and_date() -> None:
    assert retry_after({"retry-after": "2"}) == 2.0
    assert retry_after({"retry-after-ms": "250", "retry-after": "2"}) == 0.25
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 25 < (retry_after({"retry-after": soon}) or 0) <= 30
    assert retry_after({"retry-after": format_datetime(datetime.now(UTC) - timedelta(seconds=30))}) == 0.0
    for text in ("", "soon", "nan", "inf", "-1"):
        assert retry_after({"retry-after": text}) is None, text


def test_waits_grow_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FIRST_WAIT_S", 1.0)
    with Service(ServiceConfig(base_url="http://127.0.0.1:9/v1", model="stub")) as service:
        waits = [[service._back_off(failed) for _ in range(50)] for failed in (1, 2, 3, 10)]
    for most, drawn in zip((1, 2, 4, service_module.LONGEST_WAIT_S), waits, strict=True):
        assert most / 2 <= min(drawn) < max(drawn) <= most
        assert len(set(drawn)) > 40


def test_no_more_requests_at_a_time_than_allowed() -> None:
    with StubOpenAI(lambda request: say(request.text, delay_s=0.05)) as server:
        config = ServiceConfig(base_url=server.url, model="stub", api_key_env=None, concurrency=3)
        with Service(config) as service:
            texts = [str(i) for i in range(12)]

            def one(text: str) -> Callable[[], Any]:
                return lambda: service.chat([{"role": "user", "content": text}])

            replies = service.run([one(text) for text in texts])
    assert [reply.text for reply in replies] == texts
    assert server.most_at_once == 3


def test_every_request_of_a_bad_day_is_accounted_for() -> None:
    """A third is refused, a third never answered well, a third answered at the second attempt."""
    seen: dict[str, int] = {}
    lasting = [action for name, (action, _) in PASSING.items() if not patience(name)]
    passing = [action for action, _ in PASSING.values()]

    def script(request: Request) -> Action:
        number = int(request.text)
        seen[request.text] = seen.get(request.text, 0) + 1
        if number % 3 == 0:
            return status(400)
        if number % 3 == 1:
            return lasting[number % len(lasting)]
        return passing[number % len(passing)] if seen[request.text] == 1 else say(request.text)

    with StubOpenAI(script) as server:
        config = ServiceConfig(
            base_url=server.url, model="stub", api_key_env=None, concurrency=16, timeout_s=4, max_retries=1
        )
        with Service(config) as service:

            def one(i: int) -> Callable[[], Any]:
                return lambda: service.chat([{"role": "user", "content": str(i)}])

            replies = service.run([one(i) for i in range(60)])
    for i, reply in enumerate(replies):
        assert (reply.text, reply.fault is None) == ((str(i), True) if i % 3 == 2 else (None, False)), reply


def test_what_cannot_be_sent_is_the_rows_fault() -> None:
    with StubOpenAI([say("4")]) as server:
        assert "cannot be written as JSON" in (ask(server, [{"role": "user", "content": "\ud800"}]).fault or "")
        assert "cannot be written as JSON" in (ask(server, [{"role": "user", "content": object()}]).fault or "")
    assert server.requests == []


def test_a_loop_of_its_own_serves_any_other() -> None:
    with StubOpenAI([say("4")]) as server:
        service = Service(ServiceConfig(base_url=server.url, model="stub", api_key_env=None))
        assert asyncio.run(service.chat(ASKED)).text == "4"  # type: ignore[arg-type]
        service.close()
        service.close()


def test_what_a_coroutine_raises_is_raised_and_the_others_end() -> None:
    async def fail() -> Reply:
        raise KeyError("mine")

    started = time.monotonic()
    with (
        StubOpenAI([stall(30)]) as server,
        Service(ServiceConfig(base_url=server.url, model="stub", api_key_env=None)) as service,
        pytest.raises(KeyError, match="mine"),
    ):
        service.run([lambda: service.chat(ASKED), fail])
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"base_url": "localhost:8000"}, "no address: write it as http://HOST:PORT/v1"),
        ({"base_url": "http://me:secret@host/v1"}, "holds a password"),
        ({"model": ""}, "model is empty"),
        ({"concurrency": 0}, "concurrency=0 must be at least 1"),
        ({"max_retries": -1}, "max_retries=-1 must be at least 0"),
        ({"timeout_s": 0}, "timeout_s=0 must be above 0"),
        ({"timeout_s": 20, "deadline_s": 10}, r"deadline_s=10 .* timeout_s=20"),
        ({"extra_body": {"stream": True}}, "extra_body.stream: answers are read in one piece"),
    ],
)
def test_each_rule_names_the_key(settings: dict[str, Any], words: str) -> None:
    good = {"base_url": "http://host/v1", "model": "stub"}
    ServiceConfig(**good)
    with pytest.raises(ValueError, match=words):
        ServiceConfig(**good | settings)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"no address.*; model is empty"):
        ServiceConfig(base_url="x", model="")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpus": 1}, "gpus=1: the model is the service's"),
    ],
)
def test_rules_of_a_role_that_asks_a_service(settings: dict[str, Any], words: str) -> None:
    service = ServiceConfig(base_url="http://host/v1", model="stub")
    assert ClientConfig(service=service, replicas=2, ranks=2, gpus=0).never_on_gpu
    with pytest.raises(ValueError, match=words):
        ClientConfig(service=service, **settings)


def test_settings_import_no_client() -> None:
    code = "import sys, rolegraph.services; print(sorted({'openai', 'httpx2', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
