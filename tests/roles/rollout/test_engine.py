"""The engine's thread, with a stand-in for the engine."""

from __future__ import annotations

import copy
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roles.rollout.engine import EngineStoppedError, EngineThread, Request


class FakeEngine:
    """Finishes every request after `steps` steps, a token a step; has those parts of vLLM that the thread uses."""

    def __init__(self, steps: int = 3) -> None:
        self.steps = steps
        self.running: dict[str, list[int]] = {}
        self.seeds: list[int | None] = []
        self.checked: list[list[int]] = []
        self.batches: list[int] = []
        self.fault: Exception | None = None
        self.one_step_a_gate = False
        self.gate = threading.Event()
        self.gate.set()
        self.engine_core = self.input_processor = self

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def process_inputs(
        self, key: str, prompt: dict[str, Any], params: Any, *, lora_request: Any, supported_tasks: Any
    ) -> Any:
        assert lora_request is None
        assert supported_tasks == ("generate",)
        if params == "bad":
            raise ValueError("a bad request")
        self.checked.append(prompt["prompt_token_ids"])
        return SimpleNamespace(request_id=key, sampling_params=copy.copy(params))

    def add_request(self, request: Any) -> None:
        self.running[request.request_id] = []
        self.seeds.append(request.sampling_params and request.sampling_params.seed)

    def get_output(self) -> Any:
        self.gate.wait(10)
        if self.one_step_a_gate:
            self.gate.clear()
        if self.fault is not None:
            raise self.fault
        self.batches.append(len(self.running))
        outputs = [self._output(key, tokens) for key, tokens in self.running.items()]
        self.running = {key: tokens for key, tokens in self.running.items() if len(tokens) < self.steps}
        return SimpleNamespace(outputs=outputs)

    def _output(self, key: str, tokens: list[int]) -> Any:
        tokens.append(7)
        return SimpleNamespace(
            request_id=key,
            new_token_ids=[7],
            # The sampled token's logprob, then those of likelier ones.
            new_prompt_logprobs_tensors=None,
            new_logprobs=SimpleNamespace(logprobs=np.array([[-0.5, -0.25]], dtype=np.float32)),
            finish_reason="length" if len(tokens) == self.steps else None,
        )

    def abort_requests(self, keys: list[str]) -> None:
        for key in keys:
            self.running.pop(key, None)

    def shutdown(self) -> None:
        pass


def requests(n: int, params: Any = None) -> list[Request]:
    return [Request([1, 2], params) for _ in range(n)]


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


def start(fake: FakeEngine) -> EngineThread:
    return EngineThread(lambda: fake)  # type: ignore[arg-type, return-value]


def test_a_call_is_wholly_in_the_engine_before_its_first_step(fake: FakeEngine) -> None:
    engine = start(fake)
    samples = engine.submit(requests(5)).result(10)
    assert [sample.finish_reason for sample in samples] == ["length"] * 5
    assert fake.batches == [5, 5, 5]
    assert [list(sample.token_ids) for sample in samples] == [[7, 7, 7]] * 5
    assert [list(sample.logprobs) for sample in samples] == [[-0.5, -0.5, -0.5]] * 5
    assert engine.submit([]).result(1) == []
    engine.close()


def test_the_samples_of_a_prompt_are_checked_once_and_keep_their_seeds(fake: FakeEngine) -> None:
    engine = start(fake)
    one, other, params = [1, 2], [3], SimpleNamespace(seed=0)
    drawn = [Request(one, params, 5), Request(one, params, 6), Request(other, params, 7)]  # type: ignore[arg-type]
    assert len(engine.submit(drawn).result(10)) == 3
    assert fake.checked == [one, other]
    assert fake.seeds == [5, 6, 7]
    assert params.seed == 0
    engine.close()


def test_held_samples_wait_begun_or_not_until_it_goes_on(fake: FakeEngine) -> None:
    engine = start(fake)
    fake.one_step_a_gate = True
    fake.gate.clear()
    begun = engine.submit(requests(2))
    held = threading.Thread(target=engine.call, args=(lambda _: engine.hold(ValueError("torn"), 60),))
    held.start()
    fake.gate.set()
    held.join(10)
    fake.one_step_a_gate = False
    fake.gate.set()
    new = engine.submit(requests(1))
    steps = engine.call(lambda _: len(fake.batches))
    time.sleep(0.2)
    assert engine.call(lambda _: len(fake.batches)) == steps, "commands are run, and nothing is drawn"
    assert steps < 3
    assert not begun.done()
    engine.call(lambda _: engine.go_on())
    assert [len(sample.token_ids) for sample in [*begun.result(10), *new.result(10)]] == [3, 3, 3]
    engine.close()


def test_samples_that_are_held_too_long_end_with_the_reason(fake: FakeEngine) -> None:
    engine = start(fake)
    engine.call(lambda _: engine.hold(ValueError("torn"), 0.2))
    for count in (2, 1):  # the second waits no more
        with pytest.raises(ValueError, match="torn"):
            engine.submit(requests(count)).result(10)
    assert fake.running == {}
    assert engine.call(lambda _: engine.running) == 0
    engine.call(lambda _: engine.go_on())
    assert len(engine.submit(requests(2)).result(10)) == 2
    engine.close()


def test_held_samples_can_be_aborted(fake: FakeEngine) -> None:
    engine = start(fake)
    engine.call(lambda _: engine.hold(ValueError("torn"), 60))
    waiting = engine.submit(requests(2))
    assert engine.abort() == 2
    assert [sample.finish_reason for sample in waiting.result(10)] == ["abort"] * 2
    engine.close()


def test_a_failing_step_fails_everybody_who_waits_and_whoever_comes_later(fake: FakeEngine) -> None:
    engine = start(fake)
    fake.gate.clear()
    waiting = [engine.submit(requests(2)), engine.submit(requests(1))]
    fake.fault = ValueError("out of blocks")
    fake.gate.set()
    for future in [*waiting, engine.submit(requests(1))]:
        with pytest.raises(EngineStoppedError, match="ValueError: out of blocks") as caught:
            future.result(10)
        assert caught.value.__cause__ is fake.fault
    with pytest.raises(EngineStoppedError, match="out of blocks"):
        engine.call(lambda _: None)


def test_a_failing_start_raises_its_cause() -> None:
    def build() -> Any:
        raise MemoryError("no room for the KV cache")

    with pytest.raises(MemoryError, match="no room"):
        EngineThread(build)


def test_a_refused_request_fails_its_own_call_alone(fake: FakeEngine) -> None:
    engine = start(fake)
    fake.gate.clear()
    good = engine.submit(requests(2))
    bad = engine.submit([*requests(2), *requests(1, "bad")])
    fake.gate.set()
    with pytest.raises(ValueError, match="a bad request"):
        bad.result(10)
    assert len(good.result(10)) == 2
    assert max(fake.batches) == 2
    engine.close()


def test_a_failing_command_fails_its_caller_alone(fake: FakeEngine) -> None:
    engine = start(fake)

    def command(_: Any) -> None:
        raise KeyError("unknown command")

    with pytest.raises(KeyError):
        engine.call(command)
    assert len(engine.submit(requests(1)).result(10)) == 1
    engine.close()


def test_abort_ends_what_runs_with_what_it_has(fake: FakeEngine) -> None:
    fake.steps = 10**9
    engine = start(fake)
    future = engine.submit(requests(3))
    while not fake.batches:
        pass
    assert engine.abort() == 3
    for sample in future.result(10):
        assert sample.finish_reason == "abort"
        assert len(sample.token_ids) == len(sample.logprobs) >= 1
    assert engine.abort() == 0
    engine.close()


def test_closing_tells_those_who_wait(fake: FakeEngine) -> None:
    fake.steps = 10**9
    engine = start(fake)
    future = engine.submit(requests(1))
    engine.close()
    with pytest.raises(EngineStoppedError, match="it was closed"):
        future.result(1)


def test_versions_of_a_sample_are_those_of_its_first_and_last_token(fake: FakeEngine) -> None:
    engine = start(fake)

    def update(_: Any) -> None:
        engine.take_version(4)
        engine.date_unstarted()

    fake.gate.clear()
    fake.one_step_a_gate = True
    started = engine.submit(requests(1))
    fake.gate.set()
    while not fake.batches:
        pass
    fake.one_step_a_gate = False
    update_done = threading.Thread(target=engine.call, args=(update,))
    update_done.start()
    fresh = engine.submit(requests(1))
    fake.gate.set()
    update_done.join(10)
    [old], [new] = started.result(10), fresh.result(10)
    assert (old.version_last, new.version_first, new.version_last) == (4, 4, 4)
    assert old.version_first == 0
    engine.close()
