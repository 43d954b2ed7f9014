"""A vLLM engine in this process, driven by one thread that alone touches it.

Any number of threads submit samples and wait for them; between two engine steps the engine's thread takes what was
submitted, and runs control commands (abort, weight sync). When it fails, everybody who waits gets the cause.

Requests go to vLLM's engine core and tokens come from it: the output processor between them and a caller, which
detokenises, streams and counts, costs a small model as much in a step as its attention.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.outputs import LogprobsTensors

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One sample to draw. Samples that follow each other with the same prompt and params are checked once."""

    prompt: list[int]
    params: SamplingParams
    seed: int | None = None
    """Instead of the one in `params`, which must have one too."""


@dataclass(frozen=True)
class PromptLogprobs:
    """What the engine says of the tokens it was given: some tokens at each position, with the logprobs (nats) they have
    there. The entries of position p are those from `offsets[p]` to `offsets[p + 1]`; the first has none.
    """

    offsets: np.ndarray[Any, Any]
    """[positions + 1]"""
    token_ids: np.ndarray[Any, Any]
    """[entries]"""
    logprobs: np.ndarray[Any, Any]
    """[entries]"""

    @classmethod
    def of(cls, parts: Sequence[LogprobsTensors]) -> PromptLogprobs:
        """From vLLM's tensors, which begin with the second token and have the same number of entries for each."""
        ids = np.concatenate([np.asarray(part.logprob_token_ids, np.int32) for part in parts])
        logprobs = np.concatenate([np.asarray(part.logprobs, np.float32) for part in parts])
        offsets = np.concatenate([[0], np.arange(len(ids) + 1) * ids.shape[1]])
        return cls(offsets, ids.reshape(-1), logprobs.reshape(-1))


@dataclass(frozen=True)
class Sample:
    """One response: its tokens, their logprobs (nats), why it ended, and the weights that produced both its ends."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    version_first: int
    version_last: int
    prompt: PromptLogprobs | None = None
    """Where the request's `prompt_logprobs` asks for it."""


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
    version_first: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt: list[LogprobsTensors] = field(default_factory=list)


class EngineThread:
    """Runs the engine that `build` makes, in a thread of its own.

    >>> engine = EngineThread(lambda: LLMEngine.from_engine_args(args))   # doctest: +SKIP
    >>> samples = engine.submit(requests).result()                        # doctest: +SKIP
    """

    def __init__(self, build: Callable[[], LLMEngine]) -> None:
        """Return once the engine is ready; raises what `build` raises."""
        self.version = 0
        """Of the weights in the engine; written by the engine's thread alone."""
        self.adapter: LoRARequest | None = None
        """What all samples from here on are drawn with, beside the weights."""
        self._commands: queue.SimpleQueue[tuple[Callable[[LLMEngine], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._count = 0
        self._fault: BaseException | None = None
        self._held: tuple[Exception, float] | None = None
        """While nothing is drawn: what ends the samples that wait, and when; as `time.monotonic` counts."""
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
                self._add(engine, call, requests)
            except Exception as error:
                mine = [key for key, running in self._running.items() if running.call is call]
                for key in mine:
                    del self._running[key]
                engine.engine_core.abort_requests(mine)
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

    @property
    def running(self) -> int:
        """Samples the engine works on; for commands that run in the engine's thread."""
        return len(self._running)

    def take_version(self, version: int) -> None:
        """Count the weights as `version` from here on; for commands that run in the engine's thread."""
        self.version = version

    def hold(self, fault: Exception, seconds: float) -> None:
        """Draw nothing until `go_on`, and end samples with `fault` that wait longer; in the engine's thread."""
        self._held = fault, time.monotonic() + seconds

    def go_on(self) -> None:
        """Draw again; in the engine's thread."""
        self._held = None

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
        error = EngineStoppedError(f"the engine has stopped: {type(self._fault).__name__}: {self._fault}")
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
                self._step(engine)
        except BaseException as error:
            fault = error
        self._fail_everybody(fault)
        shutdown = getattr(engine.engine_core, "shutdown", None)
        if shutdown is not None:
            shutdown()

    def _take_commands(self, engine: LLMEngine) -> bool:
        """Run what is waiting, and wait for a command while there is no sample to draw; False: stop, else draw."""
        while True:
            if self._held is not None and self._running and time.monotonic() >= self._held[1]:
                self._end_running(engine, self._held[0])
            try:
                item = self._next_command()
            except queue.Empty:
                if self._held is None:
                    return True
                continue
            if item is None:
                return False
            item[0](engine)

    def _next_command(self) -> tuple[Callable[[LLMEngine], Any], Future[Any]] | None:
        """Raises queue.Empty where there is none, and something else to do."""
        if self._running and self._held is not None:
            return self._commands.get(timeout=max(0.0, self._held[1] - time.monotonic()))
        return self._commands.get(block=not self._running)

    def _add(self, engine: LLMEngine, call: _Call, requests: Sequence[Request]) -> None:
        checked: tuple[Request, EngineCoreRequest] | None = None
        for index, request in enumerate(requests):
            self._count += 1
            key = str(self._count)
            if checked is None or checked[0].prompt is not request.prompt or checked[0].params is not request.params:
                checked = (
                    request,
                    engine.input_processor.process_inputs(
                        key,
                        {"type": "token", "prompt_token_ids": request.prompt},
                        request.params,
                        lora_request=self.adapter,
                        supported_tasks=engine.get_supported_tasks(),
                    ),
                )
            one = copy.copy(checked[1])
            one.request_id = key
            if request.seed is not None:
                one.sampling_params = copy.copy(one.sampling_params)
                one.sampling_params.seed = request.seed
            engine.engine_core.add_request(one)
            self._running[key] = _Running(call, index, self.version)

    def _step(self, engine: LLMEngine) -> None:
        for output in engine.engine_core.get_output().outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            running.token_ids += output.new_token_ids
            if output.new_logprobs is not None:
                # The sampled token's comes first.
                running.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.new_prompt_logprobs_tensors is not None:
                running.prompt.append(output.new_prompt_logprobs_tensors)
            if output.finish_reason is not None:
                del self._running[output.request_id]
                running.call.put(running.index, self._sample(running, str(output.finish_reason)))

    def _sample(self, running: _Running, finish_reason: str) -> Sample:
        tokens, logprobs = running.token_ids, running.logprobs
        if len(logprobs) != len(tokens):
            raise RuntimeError(f"the engine gave {len(logprobs)} logprobs for {len(tokens)} tokens")
        prompt = PromptLogprobs.of(running.prompt) if running.prompt else None
        return Sample(tokens, logprobs, finish_reason, running.version_first, self.version, prompt)

    def _abort(self, engine: LLMEngine) -> int:
        aborted, self._running = self._running, {}
        engine.engine_core.abort_requests(list(aborted))
        for running in aborted.values():
            running.call.put(running.index, self._sample(running, "abort"))
        return len(aborted)

    def _end_running(self, engine: LLMEngine, fault: Exception) -> None:
        ended, self._running = self._running, {}
        engine.engine_core.abort_requests(list(ended))
        for call in {id(running.call): running.call for running in ended.values()}.values():
            call.future.set_exception(fault)

    def date_unstarted(self) -> None:
        """After a change of weights: samples without a token yet begin with the weights of now."""
        for running in self._running.values():
            if not running.token_ids:
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
