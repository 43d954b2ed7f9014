"""A vLLM engine in this process, driven by one thread that alone touches it.

Any number of threads submit samples and wait for them; between two engine steps the engine's thread takes what was
submitted, and runs control commands (abort, weight sync). When it fails, everybody who waits gets the cause.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One sample to draw."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Sample:
    """One response: its tokens, their logprobs (nats), why it ended, and the weights that produced both its ends."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    version_first: int
    version_last: int


class EngineStoppedError(RuntimeError):
    """The engine's thread is no longer there to answer."""


class _Call:
    """The samples one `submit` waits for."""

    def __init__(self, size: int) -> None:
        self.future: Future[list[Sample]] = Future()
        self.samples: list[Sample | None] = [None] * size
        self.missing = size

    def put(self, index: int, sample: Sample) -> None:
        self.samples[index] = sample
        self.missing -= 1
        if not self.missing:
            self.future.set_result([sample for sample in self.samples if sample is not None])


@dataclass
class _Running:
    """A sample the engine works on."""

    call: _Call
    index: int
    internal_id: str
    version_first: int


class EngineThread:
    """Runs the engine that `build` makes, in a thread of its own.

    >>> engine = EngineThread(lambda: LLMEngine.from_engine_args(args))   # doctest: +SKIP
    >>> samples = engine.submit(requests).result()                        # doctest: +SKIP
    """

    def __init__(self, build: Callable[[], LLMEngine]) -> None:
        """Return once the engine is ready; raises what `build` raises."""
        self.version = 0
        """Of the weights in the engine; written by the engine's thread alone."""
        self._commands: queue.SimpleQueue[tuple[Callable[[LLMEngine], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._count = 0
        self._fault: BaseException | None = None
        self._lock = threading.Lock()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, ready), name="vllm-engine", daemon=True)
        self._thread.start()
        ready.result()

    def submit(self, requests: Sequence[Request]) -> Future[list[Sample]]:
        """Draw the samples; all of them are in the engine before its next step."""
        call = _Call(len(requests))
        if not requests:
            call.future.set_result([])
            return call.future

        def add(engine: LLMEngine) -> None:
            try:
                for index, request in enumerate(requests):
                    self._add(engine, call, index, request)
            except Exception as error:
                mine = [key for key, running in self._running.items() if running.call is call]
                engine.abort_request([self._running.pop(key).internal_id for key in mine], internal=True)
                call.future.set_exception(error)

        self._send(add, call.future)
        return call.future

    def call(self, command: Callable[[LLMEngine], T]) -> T:
        """Run `command` between two steps; returns its result or raises what it raises."""
        future: Future[T] = Future()

        def run(engine: LLMEngine) -> None:
            try:
                result = command(engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._send(run, future)
        return future.result()

    def abort(self) -> int:
        """End all running samples with what they have; returns how many."""
        return self.call(self._abort)

    def take_version(self, version: int) -> None:
        """Count the weights as `version` from here on; for commands that run in the engine's thread."""
        self.version = version

    def close(self) -> None:
        """Stop the engine; waiting callers get EngineStoppedError."""
        self._commands.put(None)
        self._thread.join(timeout=60)

    def _send(self, command: Callable[[LLMEngine], Any], future: Future[Any]) -> None:
        with self._lock:
            if self._fault is None:
                self._commands.put((command, future))
                return
        future.set_exception(self._stopped())

    def _stopped(self) -> EngineStoppedError:
        error = EngineStoppedError(f"the rollout engine has stopped: {type(self._fault).__name__}: {self._fault}")
        error.__cause__ = self._fault
        return error

    # ----- from here on in the engine's thread -----

    def _run(self, build: Callable[[], LLMEngine], ready: Future[None]) -> None:
        try:
            engine = build()
        except BaseException as error:
            self._fault = error
            ready.set_exception(error)
            return
        ready.set_result(None)
        fault: BaseException = EngineStoppedError("it was closed")
        try:
            while self._take_commands(engine):
                if self._running:
                    self._step(engine)
        except BaseException as error:
            fault = error
        self._fail_everybody(fault)
        shutdown = getattr(engine.engine_core, "shutdown", None)
        if shutdown is not None:
            shutdown()

    def _take_commands(self, engine: LLMEngine) -> bool:
        """Run what is waiting, and wait for a command while there is no sample to draw; False: stop."""
        while True:
            try:
                item = self._commands.get(block=not self._running)
            except queue.Empty:
                return True
            if item is None:
                return False
            item[0](engine)

    def _add(self, engine: LLMEngine, call: _Call, index: int, request: Request) -> None:
        self._count += 1
        key = str(self._count)
        internal = engine.add_request(key, {"type": "token", "prompt_token_ids": request.prompt}, request.params)
        self._running[key] = _Running(call, index, internal, self.version)

    def _step(self, engine: LLMEngine) -> None:
        for output in engine.step():
            running = self._running.pop(output.request_id, None)
            if running is None:
                continue
            done: Any = output.outputs[0]
            running.call.put(
                running.index,
                self._sample(running, done.token_ids, done.logprobs, done.finish_reason),
            )

    def _sample(self, running: _Running, token_ids: Sequence[int], logprobs: Any, finish_reason: str) -> Sample:
        values: Sequence[float] = logprobs.logprobs if logprobs is not None else []
        if len(values) != len(token_ids):
            raise RuntimeError(f"the engine gave {len(values)} logprobs for {len(token_ids)} tokens")
        return Sample(token_ids, values, finish_reason, running.version_first, self.version)

    def _abort(self, engine: LLMEngine) -> int:
        states = engine.output_processor.request_states
        aborted = list(self._running.values())
        self._running.clear()
        samples = []
        for running in aborted:
            state: Any = states[running.internal_id]
            tokens = list(state.detokenizer.output_token_ids)
            samples.append(self._sample(running, tokens, state.logprobs_processor.logprobs, "abort"))
        engine.abort_request([running.internal_id for running in aborted], internal=True)
        for running, sample in zip(aborted, samples, strict=True):
            running.call.put(running.index, sample)
        return len(aborted)

    def date_unstarted(self, engine: LLMEngine) -> None:
        """After a change of weights: samples without a token yet begin with the weights of now."""
        for running in self._running.values():
            state: Any = engine.output_processor.request_states[running.internal_id]
            if not state.detokenizer.num_output_tokens():
                running.version_first = self.version

    def _fail_everybody(self, fault: BaseException) -> None:
        with self._lock:
            self._fault = fault
        waiting = {id(running.call): running.call.future for running in self._running.values()}
        self._running.clear()
        while True:
            try:
                item = self._commands.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                waiting[id(item[1])] = item[1]
        for future in waiting.values():
            if not future.done():
                future.set_exception(self._stopped())
