"""An OpenAI-compatible server in a thread of the test: it answers, or fails, as the test's script says.

    with StubOpenAI([status(429, retry_after=0.2), say("4")]) as server:
        config = ServiceConfig(base_url=server.url, model="stub")

A script is a list of actions, taken one a request in the order of arrival, the last of them for ever; or a function of
the request, so that what happens to a row does not depend on when it asks.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Request:
    """What was asked."""

    body: dict[str, Any]
    headers: dict[str, str]
    at: float
    """`time.monotonic` on arrival."""
    number: int
    """How many came before."""

    @property
    def text(self) -> str:
        """The last message's content."""
        return str(self.body["messages"][-1]["content"])

    @property
    def key(self) -> str:
        """The same for all attempts of one candidate."""
        return json.dumps([self.body["messages"], self.body.get("seed")])


Action = Callable[["Handler"], None]
Script = Sequence[Action] | Callable[[Request], Action]


def say(
    text: str | None,
    *,
    reasoning: str | None = None,
    field: str = "reasoning_content",
    finish_reason: str = "stop",
    tokens: int | None = 3,
    delay_s: float = 0.0,
    **message: Any,
) -> Action:
    """A chat completion; `field` is what the service calls the reasoning."""
    said = {"role": "assistant", "content": text} | ({} if reasoning is None else {field: reasoning}) | message
    body: dict[str, Any] = {
        "id": "stub",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": said, "finish_reason": finish_reason}],
    }
    if tokens is not None:
        body["usage"] = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}

    def act(handler: Handler) -> None:
        time.sleep(delay_s)
        handler.send(200, json.dumps(body).encode())

    return act


def status(code: int, *, message: str = "as scripted", retry_after: float | str | None = None) -> Action:
    """An error of that status."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    body = json.dumps({"error": {"message": message, "type": "stub", "code": code}}).encode()
    return lambda handler: handler.send(code, body, headers)


def raw(body: str | bytes, *, code: int = 200) -> Action:
    """Any body at all, said to be JSON."""
    return lambda handler: handler.send(code, body.encode() if isinstance(body, str) else body)


def stall(seconds: float) -> Action:
    """Nothing for so long (or until the server ends), then the connection is closed."""

    def act(handler: Handler) -> None:
        handler.stub.ended.wait(seconds)
        handler.close_connection = True

    return act


def drip(seconds: float, every_s: float = 0.05) -> Action:
    """A byte now and then, which is no silence, and no answer either."""

    def act(handler: Handler) -> None:
        handler.begin(200, 1_000_000)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not handler.stub.ended.wait(every_s):
            handler.wfile.write(b" ")
            handler.wfile.flush()
        handler.close_connection = True

    return act


def cut(text: str = "half of", share: float = 0.5) -> Action:
    """A good answer of which only a part arrives before the connection ends."""
    body = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()

    def act(handler: Handler) -> None:
        handler.begin(200, len(body))
        handler.wfile.write(body[: int(len(body) * share)])
        handler.close_connection = True

    return act


def hang_up(handler: Handler) -> None:
    """The connection is closed without a word."""
    handler.close_connection = True


@dataclass
class StubOpenAI:
    """The server, to be used as a context; `url` is the base URL."""

    script: Script
    models: Action | None = None
    """What `/models` answers; null: a list."""
    port: int = 0
    """0: any that is free."""
    requests: list[Request] = field(default_factory=list)
    """All chat requests, in the order of arrival."""
    most_at_once: int = 0
    """Chat requests that were being answered at the same time."""

    def __post_init__(self) -> None:
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._at_once = 0

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def attempts(self) -> dict[str, int]:
        """Requests for each `Request.key`."""
        found: dict[str, int] = {}
        for request in self.requests:
            found[request.key] = found.get(request.key, 0) + 1
        return found

    def answer(self, handler: Handler, body: bytes) -> None:
        """Do what the script says."""
        with self._lock:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            request = Request(json.loads(body), headers, time.monotonic(), len(self.requests))
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if callable(self.script):
                action = self.script(request)
            else:
                action = self.script[min(request.number, len(self.script) - 1)]
            action(handler)
        finally:
            with self._lock:
                self._at_once -= 1

    def __enter__(self) -> Self:
        self._server = Server(("127.0.0.1", self.port), type("Bound", (Handler,), {"stub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


class Server(ThreadingHTTPServer):
    """With room for many connections at once, or some are reset before the script sees them."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gives up is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    stub: StubOpenAI

    def begin(self, code: int, length: int, headers: dict[str, str] | None = None) -> None:
        """The head of an answer."""
        self.send_response(code)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(length),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """A whole answer."""
        self.begin(code, len(body), headers)
        self.wfile.write(body)

    def do_GET(self) -> None:
        """The list of models."""
        listed = raw(json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}))
        (self.stub.models or listed)(self)

    def do_POST(self) -> None:
        """A chat request."""
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:  # the client has given up
            self.close_connection = True
            return
        if self.path != "/v1/chat/completions":
            status(404, message=f"no {self.path} here")(self)
            return
        try:
            self.stub.answer(self, body)
        except (BrokenPipeError, ConnectionResetError):  # the client has given up
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the test's terminal."""
