"""When checkpoints are written, beside what, and what becomes of those that cannot be."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.config import GRPOConfig, SFTConfig, WarmStartConfig
from rolegraph.algorithms.grpo import GRPO
from rolegraph.algorithms.hooks import Hook, Step
from rolegraph.algorithms.sft import SFT
from rolegraph.batch import Batch
from rolegraph.checkpoints import folder
from rolegraph.checkpoints.config import CheckpointConfig
from rolegraph.checkpoints.hook import Checkpointer
from rolegraph.checkpoints.state import read_rows, write_rows
from rolegraph.errors import BadStepsError, RoleError, StoppedError
from rolegraph.interfaces import Metrics
from tests.disks import small_disk
from tests.rolegraph.algorithms.fakes import Train, World

Fails = Callable[[int], Exception | None]


def in_actor(message: str) -> RoleError:
    """An exception in an actor that goes on."""
    return RoleError(message, role="train", rank=0, endpoint="save", remote_traceback="Traceback ...")


class Saving(Train):
    """Writes a file beside the next steps, over `slow` questions whether it still does."""

    slow = 0
    sizes: Mapping[int, int] = MappingProxyType({})
    """Bytes by the number of the save, where they are more than some."""
    fails: Fails = staticmethod(lambda save: None)
    fails_late: Fails = staticmethod(lambda save: None)

    def __init__(self, calls: list[str]) -> None:
        super().__init__(calls)
        self.saves, self.asked = 0, 0
        self.path: Path | None = None

    async def save(self, path: str) -> list[None]:
        self.calls.append("save")
        assert self.path is None, "one at a time"
        self.saves, self.asked = self.saves + 1, 0
        if (fault := self.fails(self.saves)) is not None:
            raise fault
        self.path = Path(path)
        return [None]

    async def is_saving(self) -> list[bool]:
        self.asked += 1
        await asyncio.sleep(0)
        return [False, self.asked <= self.slow]

    async def finish_save(self) -> list[None]:
        path, self.path = self.path, None
        if path is not None:
            self.calls.append("written")
            if (fault := self.fails_late(self.saves)) is not None:
                raise fault
            try:
                (path / "weights").write_bytes(b"x" * self.sizes.get(self.saves, 10))
            except OSError as error:
                raise in_actor(f"rolegraph.errors.CheckpointError: {error}") from None
        return [None]

    async def export_hf(self, path: str, *, adapter: bool = False) -> list[None]:
        self.calls.append(f"export {Path(path).name}")
        _export(Path(path))
        return [None]


def _export(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def world_of(run_dir: Path, *, steps: int = 6, every: int = 2, warm: int = 0, **options: Any) -> World:
    warm_start = WarmStartConfig(max_steps=warm) if warm else None
    config = GRPOConfig(global_batch_size=4, num_generations=2, scale_rewards="none", warm_start=warm_start)
    world = World(GRPO, config, rewards=[[1.0, 0.0, 5.0, 3.0]], max_steps=steps)
    return with_checkpoints(world, run_dir, every=every, **options)


def with_checkpoints(world: World, run_dir: Path, **options: Any) -> World:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text("seed: 3\n")
    world.train = world.algorithm.train = world.movers["train"].train = Saving(world.calls)
    hook = Checkpointer(CheckpointConfig(**options), run_dir, {"models": {}, "data": {}}, use_ray=False)
    world.algorithm.job.hooks = (hook,)
    return world


async def run(world: World) -> World:
    """To the end, hooks told of it as by a run."""
    await world.run()
    for hook in world.algorithm.job.hooks:
        await hook.ended(world.algorithm)
    return world


def steps(run_dir: Path) -> list[int]:
    return [each.step for each in folder.listed(run_dir)]


async def test_a_checkpoint_every_so_many_steps_a_warm_starts_too_and_behind_the_last(tmp_path: Path) -> None:
    world = await run(world_of(tmp_path, steps=4, every=3, warm=3, keep_last=None))
    assert steps(tmp_path) == [3, 6, 7]
    first, _, last = folder.listed(tmp_path)
    assert first.driver["at"] == {"stage": "warm_start", "number": 3, "of": 3, "is_main": False}
    assert last.driver["at"] == {"stage": "grpo", "number": 4, "of": 4, "is_main": True}
    assert (first.driver["weight_version"], last.driver["weight_version"]) == (0, 4)
    assert last.config.read_text() == "seed: 3\n"
    assert last.verify() == []
    assert set(last.marker["files"]) == {"config.yaml", "driver.json", "train/weights"}
    assert last.metrics["loss"] == 0.5
    assert "checkpoint" in world.telemetry.phases, "its seconds are in the log"


async def test_training_goes_on_while_it_is_written_and_one_is_written_at_a_time(tmp_path: Path) -> None:
    world = world_of(tmp_path, steps=4, every=2)
    world.train.slow = 3  # type: ignore[attr-defined]
    await run(world)
    of_interest = [call for call in world.calls if call.startswith(("step", "save", "written"))]
    assert of_interest == ["step", "step", "save", "step", "step", "written", "save", "written"]


async def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    world = world_of(tmp_path, every=1, keep_last=1, keep_best=1, metric="score", best="min")
    hook = world.algorithm.job.hooks[0]
    values = iter([5.0, 1.0, float("nan"), 4.0, 3.0, 2.0])
    told = hook.logged

    async def logged(algorithm: Any, step: Any) -> None:
        hook.metrics["score"] = next(values)
        await told(algorithm, step)

    hook.logged = logged
    await run(world)
    assert steps(tmp_path) == [2, 6]


async def test_what_is_measured_now_and_then_is_known_by_its_step(tmp_path: Path) -> None:
    world = world_of(tmp_path, steps=5, every=1, keep_last=None)
    hook = world.algorithm.job.hooks[0]
    told = hook.logged

    async def logged(algorithm: Any, step: Any) -> None:
        number = algorithm.job.telemetry.last_step
        await told(algorithm, replace(step, metrics={**step.metrics, **({"eval/sums": 1.0} if number % 2 else {})}))

    hook.logged = logged
    await run(world)
    there = folder.listed(tmp_path)
    assert [each.measured("eval/sums") for each in there] == [1, 1, 3, 3, 5]
    assert [each.measured("loss") for each in there] == [1, 2, 3, 4, 5]
    later = Checkpointer(CheckpointConfig(every=1), tmp_path, {}, use_ray=False)
    later.restore(there[3].driver["hooks"]["Checkpointer"])
    assert later.measured["eval/sums"] == 3


async def test_an_export_is_made_in_the_same_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolegraph.checkpoints.hook.write_card", lambda path, *_, **__: path.touch())
    world = await run(world_of(tmp_path, steps=2, export_hf=True))
    assert world.calls[-4:] == ["save", "export hf", "sync log", "written"]
    assert (folder.listed(tmp_path)[0].hf / "config.json").exists()


async def test_an_export_that_fails_leaves_a_checkpoint_without_one(tmp_path: Path) -> None:
    world = world_of(tmp_path, steps=2, export_hf=True)

    async def export_hf(path: str, *, adapter: bool = False) -> list[None]:
        _export(Path(path))
        raise in_actor("KeyError: no name for this weight")

    world.train.export_hf = export_hf  # type: ignore[method-assign]
    await run(world)
    (left,) = folder.listed(tmp_path)
    assert (left.step, left.hf.exists(), left.verify()) == (2, False, [])
    assert world.telemetry.events == [
        "the Hugging Face folder of the checkpoint of step 2 was not written, and the checkpoint has none: "
        "KeyError: no name for this weight"
    ]


async def test_a_model_card_that_fails_leaves_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_card(*_: Any, **__: Any) -> None:
        raise KeyError("license")

    monkeypatch.setattr("rolegraph.checkpoints.hook.write_card", write_card)
    world = await run(world_of(tmp_path, steps=2, export_hf=True))
    (left,) = folder.listed(tmp_path)
    assert (left.hf / "config.json").exists()
    assert world.telemetry.events == ["the model card of the checkpoint of step 2 was not written: KeyError: 'license'"]


async def test_a_metric_that_no_step_has_is_told_once(tmp_path: Path) -> None:
    world = await run(world_of(tmp_path, keep_best=1, metric="los"))
    (said,) = world.telemetry.events
    assert said.startswith("checkpoint.metric=los: no step so far has it, and no checkpoint is kept for it")
    assert said.endswith("close to it are loss")


class Evaluating(Hook):
    """Measures one set every second step, and notes how many events each step has behind it."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.counts = events, list[int]()

    async def stepped(self, algorithm: Algorithm, step: Step) -> Metrics:
        return {"eval/sums/pass@1": 0.5} if step.is_main and step.number % 2 == 0 else {}

    async def logged(self, algorithm: Algorithm, step: Step) -> None:
        self.counts.append(len(self.events))


@pytest.mark.parametrize(
    ("metric", "counts", "near"),
    [("los", [0, 0, 1, 1, 1], "loss"), ("eval/sums/pass@8", [0, 0, 0, 1, 1], "eval/sums/pass@1")],
)
async def test_a_metric_that_no_step_has_is_told_with_the_first_that_could_have_it(
    tmp_path: Path, metric: str, counts: list[int], near: str
) -> None:
    """Behind the steps of a warm start, and for one of evaluation behind the first of those."""
    world = world_of(tmp_path, steps=3, warm=2, every=100, keep_best=1, metric=metric)
    evaluating = Evaluating(world.telemetry.events)
    world.algorithm.job.hooks = (*world.algorithm.job.hooks, evaluating)
    await run(world)
    assert evaluating.counts == counts
    assert f"close to it are {near}" in world.telemetry.events[0]


async def test_the_checkpoint_that_a_run_goes_on_from_is_not_written_again(tmp_path: Path) -> None:
    world = await run(world_of(tmp_path, steps=2))
    before = (folder.folder_of(tmp_path, 2) / folder.MARKER).stat()
    with_checkpoints(world, tmp_path, every=2)  # as behind the death of a trainer in the last step
    (hook,) = world.algorithm.job.hooks
    await hook.begun(world.algorithm, world.algorithm.at)
    await hook.ended(world.algorithm)
    assert "save" not in world.calls[world.calls.index("written") + 1 :]
    assert (folder.folder_of(tmp_path, 2) / folder.MARKER).stat() == before


async def test_what_is_being_written_when_an_error_ends_the_run_is_finished(tmp_path: Path) -> None:
    world = world_of(tmp_path, every=2)
    world.train.slow = 3  # type: ignore[attr-defined]
    step = world.train.step

    async def fails(*args: Any, **kwargs: Any) -> Any:
        if len(world.train.steps) == 2:
            raise BadStepsError("no finite loss")
        return await step(*args, **kwargs)

    world.train.step = fails  # type: ignore[method-assign]
    with pytest.raises(BadStepsError):
        await run(world)
    assert steps(tmp_path) == []
    for hook in world.algorithm.job.hooks:
        await hook.broken_off()
    assert steps(tmp_path) == [2]


async def test_a_write_that_does_not_end_keeps_no_failed_run_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolegraph.checkpoints.hook.FINISH_S", 0.05)
    world = world_of(tmp_path, every=2)
    world.train.slow = 10**9  # type: ignore[attr-defined]
    (hook,) = world.algorithm.job.hooks
    await hook.save(world.algorithm)  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        await hook.broken_off()
    assert steps(tmp_path) == []


async def test_steps_do_not_wait_for_the_writes_of_a_checkpoint_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_rows(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rolegraph.checkpoints.hook.write_rows", no_rows)
    monkeypatch.setattr("rolegraph.checkpoints.hook.POLL_S", 0.0)
    world = world_of(tmp_path, steps=4, every=4)
    world.train.slow = 5  # type: ignore[attr-defined]
    await run(world)
    assert world.train.asked > 5, "asked until nothing is written, before it is finished"  # type: ignore[attr-defined]
    (said,) = world.telemetry.events
    assert said == (
        "the checkpoint of step 4 was not written; there is no older one: OSError: [Errno 28] No space left on device"
    )


async def test_a_checkpoint_that_fails_at_the_end_says_nothing_of_going_on(tmp_path: Path) -> None:
    world = world_of(tmp_path, steps=3, every=2)
    world.train.fails = lambda save: in_actor("no space left") if save == 2 else None  # type: ignore[attr-defined]
    await run(world)
    assert world.telemetry.events == [
        "the checkpoint of step 3 was not written; the one of step 2 stays the newest: no space left"
    ]


async def test_the_log_is_on_the_disk_before_a_checkpoint_counts(tmp_path: Path) -> None:
    world = world_of(tmp_path, steps=2)

    def full() -> None:
        raise OSError(28, "No space left on device")

    world.telemetry.sync_log = full  # type: ignore[method-assign]
    await run(world)
    assert steps(tmp_path) == []


@pytest.mark.parametrize("when", ["fails", "fails_late"])
async def test_a_save_that_fails_is_told_and_the_run_goes_on(when: str, tmp_path: Path) -> None:
    world = world_of(tmp_path)
    setattr(world.train, when, lambda save: in_actor("CheckpointError: no space left") if save == 2 else None)
    await run(world)
    assert len(world.train.steps) == 6
    assert steps(tmp_path) == [2, 6]
    assert folder.partial(tmp_path) == []
    (said,) = world.telemetry.events
    assert said == (
        "the checkpoint of step 4 was not written, and the run goes on; the one of step 2 stays the newest: "
        "CheckpointError: no space left"
    )


async def test_a_trainer_that_has_died_ends_the_run(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    world.train.fails = lambda save: RoleError("the actor died", role="train", rank=0)  # type: ignore[attr-defined]
    with pytest.raises(RoleError, match="the actor died"):
        await run(world)


async def test_a_full_disk_fails_that_save_and_no_older_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", free=200_000):
        world = world_of(tmp_path / "run", every=1, steps=4, keep_last=None)
        world.train.sizes = {2: 300_000, 3: 300_000}  # type: ignore[attr-defined]
        await run(world)
        assert steps(tmp_path / "run") == [1, 4]
        assert all(each.verify() == [] for each in folder.listed(tmp_path / "run"))
        assert folder.partial(tmp_path / "run") == []
        told = world.telemetry.events
        assert [said.split(" was ")[0] for said in told] == ["the checkpoint of step 2", "the checkpoint of step 3"]
        assert all("the one of step 1 stays the newest: " in said for said in told)
        assert all("No space left on device" in said or "File too large" in said for said in told)


async def test_the_drivers_own_files_fail_as_well(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", free=200_000):
        world = World(SFT, SFTConfig(global_batch_size=4), max_steps=2)
        world = with_checkpoints(world, tmp_path / "run", every=1)
        state = world.algorithm.state()
        large = Batch.from_columns({"response_ids": [list(range(100_000))]})
        world.algorithm.state = lambda: type(state)({}, {} if len(world.train.steps) == 1 else {"rows": large})
        await run(world)
        assert steps(tmp_path / "run") == [1]
        assert world.telemetry.events[-1].startswith(
            "the checkpoint of step 2 was not written; the one of step 1 stays"
        )


async def test_what_an_earlier_process_left_half_written_goes(tmp_path: Path) -> None:
    (folder.begin(tmp_path, 3) / "train" / "weights").write_bytes(b"x")
    await run(world_of(tmp_path, steps=1, every=5))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_asks_for_a_checkpoint_behind_the_step_it_meets(number: int, tmp_path: Path) -> None:
    world = world_of(tmp_path, every=100)
    step, before = world.train.step, [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    async def signalled(*args: Any, **kwargs: Any) -> Any:
        if len(world.train.steps) == 2:
            signal.raise_signal(number)
            await asyncio.sleep(0.01)
            assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before, "for a second one"
        return await step(*args, **kwargs)

    world.train.step = signalled  # type: ignore[method-assign]
    with pytest.raises(StoppedError) as caught:
        await run(world)
    name = signal.Signals(number).name
    assert str(caught.value) == f"stopped by {name}: go on behind step 3 with resume=auto"
    assert caught.value.signal == number
    assert steps(tmp_path) == [3]
    (said,) = world.telemetry.events
    assert said == f"{name}: the run stops behind this step, with a checkpoint; once more stops it at once"


async def test_rows_come_back_exactly_as_they_were(tmp_path: Path) -> None:
    import numpy as np
    import pyarrow as pa

    rows = Batch.from_columns(
        {
            "uid": ["a", "b"],
            "response_ids": [np.array([1, 2], np.int32), np.array([], np.int32)],
            "response_mask": [np.array([1, 0], np.uint8), np.array([], np.uint8)],
            "rollout_logprobs": [np.array([-0.1, float("nan")], np.float32), np.array([], np.float32)],
            "teacher_ids": [np.array([[3, 4], [5, 6]], np.int32), np.zeros((0, 2), np.int32)],
            "reward": pa.array([None, float("nan")], pa.float64()),
            "nested": [{"tags": ["x"]}, {"tags": None}],
        }
    )
    await write_rows({"samples": rows, "none": rows.slice(0, 0)}, tmp_path / "rows", use_ray=False)
    found = await read_rows(tmp_path / "rows", use_ray=False)
    assert found["none"].schema == rows.schema
    assert len(found["none"]) == 0
    assert found["samples"].schema == rows.schema
    assert repr(found["samples"].table.to_pydict()) == repr(rows.table.to_pydict())
