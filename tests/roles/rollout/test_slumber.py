"""The role's account of its engine's sleep, and what it tells an engine on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rolegraph.errors import TurnError
from rolegraph.role import RoleContext
from roles.rollout.config import VLLMRolloutConfig
from roles.rollout.slumber import Slumber
from roles.rollout.vllm import VLLMRollout


def test_asleep_it_refuses_and_awake_it_works() -> None:
    slumber = Slumber()
    slumber.refuse_samples()
    assert not slumber.begin(0)
    assert slumber.begin(1)
    assert not slumber.begin(1)
    for refuse in (slumber.refuse_samples, slumber.refuse_weights):
        with pytest.raises(TurnError, match="asleep"):
            refuse()
    assert slumber.to_wake(("weights",)) == ["weights"]
    slumber.woke(["weights"])
    slumber.refuse_weights()
    with pytest.raises(TurnError, match=r"asleep \(kv_cache\)"):
        slumber.refuse_samples()
    assert slumber.to_wake(("weights", "kv_cache")) == ["kv_cache"]
    slumber.woke(["kv_cache"])
    slumber.refuse_samples()


def test_waking_does_not_bring_dropped_weights_back() -> None:
    slumber = Slumber()
    slumber.begin(2)
    slumber.woke(slumber.to_wake(("weights", "kv_cache")))
    slumber.refuse_weights()
    with pytest.raises(TurnError, match=r"dropped by sleep\(level=2\)"):
        slumber.refuse_samples()
    slumber.begin(1)
    slumber.woke(slumber.to_wake(("weights", "kv_cache")))
    with pytest.raises(TurnError, match="dropped"):
        slumber.refuse_samples()
    slumber.filled()
    slumber.refuse_samples()


def test_words_it_does_not_know() -> None:
    slumber = Slumber()
    with pytest.raises(ValueError, match=r"sleep\(level=3\): use 0"):
        slumber.begin(3)
    with pytest.raises(TurnError, match="an engine's parts are weights, kv_cache"):
        slumber.to_wake(("cache",))
    slumber.begin(1)
    with pytest.raises(TurnError, match="the weights are asleep; wake them before"):
        slumber.to_wake(("kv_cache",))


class Thread:
    """Stands for `EngineThread`: an engine that writes down what it is told."""

    def __init__(self) -> None:
        self.running = 0
        self.told: list[object] = []
        self.engine = SimpleNamespace(
            sleep=lambda level: self.told.append(("sleep", level)),
            wake_up=lambda tags: self.told.append(("wake_up", tags)),
            reset_prefix_cache=lambda: self.told.append("reset_prefix_cache"),
        )

    def call(self, command: Callable[[Any], Any]) -> Any:
        return command(self.engine)


def role(device: Any, **settings: Any) -> tuple[VLLMRollout, list[object]]:
    made = VLLMRollout(VLLMRolloutConfig(**settings), RoleContext(role="rollout", device=device))
    thread = Thread()
    made._engine.thread = thread  # type: ignore[assignment]
    return made, thread.told


def test_an_engine_on_a_gpu_is_put_to_sleep_and_woken_part_by_part() -> None:
    rollout, told = role("cuda", enable_sleep_mode=True)
    rollout.sleep(2)
    rollout.sleep(2)
    rollout.wake_up(("weights",))
    rollout.wake_up(("weights", "kv_cache"))
    assert told == [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    bare, told = role("cuda")
    bare.sleep(0)
    with pytest.raises(TurnError, match=r"set rollout\.enable_sleep_mode=true, or null and placement\.sleep_level"):
        bare.sleep(1)
    assert told == []


def test_an_engine_on_a_cpu_only_forgets_its_prefixes() -> None:
    rollout, told = role("cpu")
    rollout.sleep(1)
    rollout.wake_up(("weights", "kv_cache"))
    assert told == ["reset_prefix_cache"]
