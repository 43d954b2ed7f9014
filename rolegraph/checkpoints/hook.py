"""`Checkpointer`: the hook that saves a run while it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.hooks import Hook, Step
from rolegraph.batch import Batch
from rolegraph.checkpoints import folder
from rolegraph.checkpoints.card import write_card
from rolegraph.checkpoints.config import CheckpointConfig
from rolegraph.checkpoints.state import write_rows
from rolegraph.checkpoints.stopping import StopRequest
from rolegraph.errors import RoleError
from rolegraph.interfaces import TrainRole
from rolegraph.rebuild import end_stragglers
from rolegraph.results import replacing

POLL_S = 0.1
"""Between two questions whether the train role still writes."""
COLLECTIVE = ("save", "finish_save", "export_hf")
"""Calls in which ranks wait for each other."""
FINISH_S = 600.0
"""Longest wait for a checkpoint that is being written when the run ends by an error."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint is made of, beside what the train role writes."""

    step: int
    driver: Mapping[str, Any]
    rows: Mapping[str, Batch]
    metrics: Mapping[str, float]
    """Those that are finite."""
    measured: Mapping[str, int]
    """The step that each of them is of."""


class Checkpointer(Hook):
    """Saves every so many steps, and behind the last one.

    The train role says when training may go on; the rest is written beside the next steps, and then the marker. One
    checkpoint is written at a time. One that fails is removed and told, the run goes on, and the older ones are whole.

    Args:
        about: the fingerprints of models and data.
        use_ray: whether rows are written by workers.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        about: Mapping[str, Any],
        *,
        use_ray: bool,
        stop: StopRequest | None = None,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.about = about
        self.use_ray = use_ray
        self.stop = stop or StopRequest()
        self.metrics: dict[str, float] = {}
        """Every metric by name, of the newest step that had it."""
        self.measured: dict[str, int] = {}
        """Which step that was."""
        self.saved: int | None = None
        """The step of the newest checkpoint that was begun and did not fail."""
        self._writing: asyncio.Task[None] | None = None
        self._is_ending = False
        self._has_looked = False
        """Whether it was told of a `metric` that no step has had."""

    async def begun(self, algorithm: Algorithm, step: Step) -> None:
        """From here on a signal asks for a checkpoint instead of ending the run at once."""
        await self.settled()
        await asyncio.to_thread(folder.remove_partial, self.run_dir)
        there = await asyncio.to_thread(folder.listed, self.run_dir)
        if self.saved is None and algorithm.job.telemetry.last_step in [each.step for each in there]:
            self.saved = algorithm.job.telemetry.last_step  # the run goes on from it, and need not write it again
        self._learn(step, algorithm.job.telemetry.last_step)  # an evaluation that was left to the run that goes on
        self.stop.listen(algorithm.job.telemetry.event)

    async def logged(self, algorithm: Algorithm, step: Step) -> None:
        """Save where that is due, or where the run was asked to stop. Raises StoppedError then."""
        number = algorithm.job.telemetry.last_step
        self._learn(step, number)
        if step.is_main:
            self._look_for_metric(algorithm)
        asked = self.stop.asked
        if asked or number % cast(int, self.config.every) == 0:
            self._is_ending = asked
            await self.save(algorithm)
        if asked:
            await self.settled()
            raise self.stop.error(self.saved)

    def _learn(self, step: Step, number: int) -> None:
        self.metrics.update(step.metrics)
        self.measured.update(dict.fromkeys(step.metrics, number))

    async def ended(self, algorithm: Algorithm) -> None:
        """Save the last step, and wait until it is on the disk."""
        self._is_ending = True
        if self.saved != algorithm.job.telemetry.last_step:
            await self.save(algorithm)
        await self.settled()
        self.stop.restore()

    async def broken_off(self) -> None:
        """Wait for what is being written, a while: without a trainer it fails, and is removed."""
        self._is_ending = True
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=FINISH_S)
            self._writing.cancel()
            self._writing = None

    def state(self) -> Mapping[str, Any]:
        """The metrics, for `keep_best` looks at older ones too."""
        return {"metrics": self.metrics, "measured": self.measured}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Know the metrics of before."""
        self.metrics, self.measured = dict(state["metrics"]), dict(state.get("measured", {}))

    async def save(self, algorithm: Algorithm) -> None:
        """Begin a checkpoint of now, once the one before it is written; returns when training may go on."""
        await self.settled()
        content = self._content(algorithm)
        path = folder.folder_of(self.run_dir, content.step)
        try:
            await asyncio.to_thread(folder.begin, self.run_dir, content.step)
            async with algorithm.turn("checkpoint"):
                await _train(algorithm).save(str(path / "train"))
                if self.config.export_hf:
                    await self._export(algorithm, path / "hf", content)
        except (OSError, RoleError) as error:
            if isinstance(error, RoleError) and not error.remote_traceback:
                raise  # no fault of its code: a rank has died
            await self._failed(algorithm, path, content.step, error)
            return
        self.saved = content.step
        self._writing = asyncio.create_task(self._write(algorithm, path, content), name=f"checkpoint {content.step}")

    async def _export(self, algorithm: Algorithm, path: Path, content: Content) -> None:
        """Beside what resuming needs, which is whole without it. Raises RoleError where a rank has died."""
        of, tell = f"of the checkpoint of step {content.step}", algorithm.job.telemetry.event
        try:
            await _train(algorithm).export_hf(str(path))
        except RoleError as error:
            if not error.remote_traceback:
                raise
            await end_stragglers(_train(algorithm), COLLECTIVE, tell)
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            tell(f"the Hugging Face folder {of} was not written, and the checkpoint has none: {error.message}")
            return
        config, step, metrics = algorithm.job.config, content.step, content.metrics
        try:
            await asyncio.to_thread(write_card, path, config, step=step, metrics=metrics)
        except Exception as error:
            tell(f"the model card {of} was not written: {type(error).__name__}: {error}")

    def _look_for_metric(self, algorithm: Algorithm) -> None:
        """Say once, behind the first step that could have had `metric`, that none has."""
        name = self.config.metric
        if name is None or self._has_looked:
            return
        if name.startswith("eval/") and not any(each.startswith("eval/") for each in self.metrics):
            return  # nothing was evaluated yet
        self._has_looked = True
        if name in self.metrics:
            return
        near = difflib.get_close_matches(name, sorted(self.metrics), n=3, cutoff=0.5)
        there = f"; close to it are {', '.join(near)}" if near else f"; there are {', '.join(sorted(self.metrics))}"
        algorithm.job.telemetry.event(
            f"checkpoint.metric={name}: no step so far has it, and no checkpoint is kept for it until one does{there}"
        )

    async def settled(self) -> None:
        """Wait for the checkpoint that is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def _content(self, algorithm: Algorithm) -> Content:
        job, at = algorithm.job, algorithm.at
        state = algorithm.state()
        where = {"stage": at.stage, "number": at.number, "of": at.of, "is_main": at.is_main}
        driver = {
            "at": where,
            "weight_version": 0 if job.sync is None else job.sync.version,
            "algorithm": state.values,
            "telemetry": job.telemetry.state(),
            "hooks": {type(hook).__name__: hook.state() for hook in job.hooks},
            "about": self.about,
        }
        # Through text, so that nothing in it changes while it waits to be written.
        driver = json.loads(json.dumps(driver, default=_plain))
        metrics = {name: float(value) for name, value in self.metrics.items() if math.isfinite(value)}
        measured = {name: step for name, step in self.measured.items() if name in metrics}
        return Content(job.telemetry.last_step, driver, state.rows, metrics, measured)

    async def _write(self, algorithm: Algorithm, path: Path, content: Content) -> None:
        """Everything that is left to do, beside training; never raises."""
        train = _train(algorithm)
        try:
            await asyncio.to_thread(self._write_small, path, content.driver)
            await asyncio.to_thread(algorithm.job.telemetry.sync_log)  # else a power cut leaves it behind
            await write_rows(content.rows, path / "rows", use_ray=self.use_ray)
            await _written(train)
            await train.finish_save()
            done = {"metrics": content.metrics, "measured": content.measured}
            await asyncio.to_thread(folder.complete, path, content.step, **done)
        except Exception as error:
            await self._failed(algorithm, path, content.step, error)
            return
        await asyncio.to_thread(self._prune)

    def _write_small(self, path: Path, driver: Mapping[str, Any]) -> None:
        shutil.copyfile(self.run_dir / "config.yaml", path / "config.yaml")
        with replacing(path / "driver.json") as part:
            part.write_text(json.dumps(driver, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _prune(self) -> None:
        how = self.config
        folder.prune(self.run_dir, keep_last=how.keep_last, keep_best=how.keep_best, metric=how.metric, best=how.best)
        folder.remove_partial(self.run_dir)

    async def _failed(self, algorithm: Algorithm, path: Path, step: int, error: Exception) -> None:
        """Remove what there is of it, and say so."""
        train, tell = _train(algorithm), algorithm.job.telemetry.event
        with contextlib.suppress(RoleError):  # else the next save would find one that goes on
            await end_stragglers(train, COLLECTIVE, tell)
            await _written(train)  # for `finish_save` keeps steps waiting while there is something to write
            await train.finish_save()
        await asyncio.to_thread(folder.remove, path)
        self.saved = None if self.saved == step else self.saved
        cause = error.message if isinstance(error, RoleError) else f"{type(error).__name__}: {error}"
        left = next(reversed(folder.listed(self.run_dir)), None)
        kept = f"the one of step {left.step} stays the newest" if left is not None else "there is no older one"
        goes_on = "" if self._is_ending else ", and the run goes on"
        tell(f"the checkpoint of step {step} was not written{goes_on}; {kept}: {cause}")


def _train(algorithm: Algorithm) -> TrainRole:
    return cast(TrainRole, algorithm.train)  # type: ignore[attr-defined]


async def _written(train: TrainRole) -> None:
    """Ask until no rank writes any more, in the lane that answers while the others compute."""
    while True:
        if not any(await train.is_saving()):  # type: ignore[misc]
            return
        await asyncio.sleep(POLL_S)


def _plain(value: Any) -> Any:
    """Numbers of numpy, and dataclasses, as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.item() if hasattr(value, "item") else dict(value)
