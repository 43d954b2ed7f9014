from __future__ import annotations

import io
import json
import sqlite3
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rolegraph.batch import Batch
from rolegraph.errors import ConfigError
from rolegraph.telemetry import Telemetry, read_metrics
from rolegraph.telemetry.loggers import open_trackers
from rolegraph.telemetry.metrics import MetricsLog, is_timing
from rolegraph.telemetry.progress import Progress, duration
from rolegraph.telemetry.samples import SampleFiles
from rolegraph.telemetry.timeline import spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_seconds_of_a_step_add_up(tmp_path: Path) -> None:
    clock = Clock()
    telemetry = Telemetry(tmp_path, clock=clock)
    telemetry.stage("grpo", 2)
    with telemetry.phase("generate", "rollout"):
        clock.now += 3.0
    with telemetry.phase("train", "train"):
        clock.now += 2.0
    clock.now += 0.5
    telemetry.step(1, {"loss": 0.25, "tokens": 110.0})
    telemetry.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["seconds/generate"], row["seconds/train"], row["seconds/other"]) == (3.0, 2.0, 0.5)
    assert row["seconds/step"] == 5.5
    assert row["speed/tokens_per_second"] == 20.0
    assert row["loss"] == 0.25


def test_an_evaluation_says_nothing_of_the_speed_of_training(tmp_path: Path) -> None:
    clock = Clock()
    telemetry = Telemetry(tmp_path, clock=clock)
    telemetry.timeline.place({"rollout": 1, "train": 1})
    telemetry.stage("grpo", 2)

    def step(number: int, evaluates: bool) -> None:
        ended = telemetry.timeline.call("rollout", "generate", 0, 4)
        clock.now += 3.0
        ended()
        clock.now += 1.0
        if evaluates:
            with telemetry.evaluation(), telemetry.phase("eval", "rollout"):
                ended = telemetry.timeline.call("rollout", "generate", 0, 4)
                clock.now += 40.0
                ended()
                clock.now += 2.0
        telemetry.step(number, {"tokens": 80.0})

    step(1, True)
    step(2, False)
    telemetry.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    for row, seconds in zip(rows, (46.0, 4.0), strict=True):
        assert row["speed/tokens_per_second"] == 20.0
        assert (row["idle/rollout"], row["idle/train"], row["seconds/step"]) == (0.25, 1.0, seconds)
    assert rows[0]["seconds/eval"] == 42.0


@pytest.mark.parametrize("steps", [1, 3])
def test_an_evaluation_that_comes_late_joins_the_line_of_its_step(tmp_path: Path, steps: int) -> None:
    whole, parts = Telemetry(tmp_path / "whole"), Telemetry(tmp_path / "parts")
    for telemetry in (whole, parts):
        telemetry.stage("grpo", 4)
        telemetry.evaluated({"eval/a/pass@1": 0.25})
        for number in range(1, steps + 1):
            late = telemetry is parts and number == steps
            telemetry.step(number, {"loss": 0.5} if late else {"loss": 0.5, "eval/a/pass@1": 0.75})
    parts.close()
    resumed = Telemetry(tmp_path / "parts")
    resumed.go_back(steps)
    resumed.stage("grpo", 4, steps)
    resumed.evaluated_late({"eval/a/pass@1": 0.75})
    for telemetry in (whole, resumed):
        telemetry.step(steps + 1, {"loss": 0.125})
        telemetry.close()
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    one, other = ([{k: v for k, v in row.items() if not is_timing(k)} for row in each] for each in rows)
    assert one == other


def test_a_phase_that_fails_still_ends(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, roles=("rollout",))
    with pytest.raises(RuntimeError), telemetry.phase("generate", "rollout"):
        raise RuntimeError
    assert telemetry.progress._roles == {"rollout": "idle"}


def test_steps_count_on_over_stages(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path)
    telemetry.stage("sft", 2)
    telemetry.step(1, {})
    telemetry.step(2, {})
    telemetry.stage("grpo", 1)
    telemetry.step(1, {})
    telemetry.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["stage"]) for row in rows] == [(1, "sft"), (2, "sft"), (3, "grpo")]


def test_an_evaluation_before_the_first_step_has_a_line_and_seconds_of_its_own(tmp_path: Path) -> None:
    clock = Clock()
    telemetry = Telemetry(tmp_path, loggers=["tensorboard"], clock=clock)
    telemetry.stage("warm_start", 2)
    telemetry.step(2, {})
    telemetry.stage("grpo", 1)
    with telemetry.phase("eval"):
        clock.now += 3.0
    assert (telemetry.in_log(0), telemetry.in_log(1)) == (2, 3)
    telemetry.evaluated({"eval/sums/pass@1": 0.5, "eval/sums/reward/mean": float("nan")})
    clock.now += 1.0
    telemetry.step(1, {"eval/sums/pass@1": 0.75})
    _, evaluated, step = read_metrics(tmp_path / "metrics.jsonl")
    assert telemetry.last_step == 3
    found = telemetry.logged("eval/")
    assert {number: metrics["eval/sums/pass@1"] for number, metrics in found.items()} == {2: 0.5, 3: 0.75}
    telemetry.go_back(2)
    assert list(telemetry.logged("eval/")) == [2], "it is not taken again"
    telemetry.go_back(0)
    assert telemetry.logged("eval/") == {}
    telemetry.stage("grpo", 1)
    telemetry.evaluated({"eval/sums/pass@1": 0.5})
    telemetry.go_back(0)
    assert telemetry.logged("eval/") == {}, "a run that begins anew evaluates anew"
    telemetry.close()
    assert (evaluated["step"], evaluated["stage"], evaluated["seconds/eval"]) == (2, "eval", 3.0)
    assert (evaluated["eval/sums/pass@1"], evaluated["eval/sums/reward/mean"]) == (0.5, None)
    assert (step["step"], step["stage"], step["seconds/step"], step["eval/sums/pass@1"]) == (3, "grpo", 1.0, 0.75)
    assert "seconds/eval" not in step
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.read_bytes().count(b"eval/sums/pass@1") == 3


def test_a_run_that_goes_on_keeps_what_its_earlier_part_left(tmp_path: Path) -> None:
    for part in range(3):
        telemetry = Telemetry(tmp_path, samples_every=1)
        telemetry.stage("sampling", 5)
        telemetry.step(1, {"part": part})
        telemetry.samples(1, Batch.from_columns({"uid": [str(part)]}))
        telemetry.close()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9, "par')  # as a kill leaves it
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["part"]) for row in rows] == [(1, 0), (2, 1), (3, 2)]
    assert len(list((tmp_path / "samples").iterdir())) == 3
    steps = {
        name: [span["step"] for span in spans(tmp_path / name) if span["name"].startswith("step ")]
        for name in ("timeline-1.json", "timeline-2.json", "timeline.json")
    }
    assert steps == {"timeline-1.json": [1], "timeline-2.json": [2], "timeline.json": [3]}


def test_what_depends_on_the_clock_is_told_apart(tmp_path: Path) -> None:
    figures = []
    for name, pace in (("a", 1.0), ("b", 7.0)):
        clock = Clock()
        telemetry = Telemetry(tmp_path / name, clock=clock)
        telemetry.stage("grpo", 1)
        with telemetry.phase("train"):
            clock.now += pace
        telemetry.step(1, {"loss": 1.5, "tokens": 8.0})
        telemetry.close()
        (row,) = read_metrics(tmp_path / name / "metrics.jsonl")
        figures.append({key: value for key, value in row.items() if not is_timing(key)})
    assert figures[0] == figures[1]
    assert set(figures[0]) == {"step", "stage", "loss", "tokens"}


def test_metrics_stay_valid_json_and_lose_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"kl": float("nan"), "reward": 0.1, "count": 3})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "count": 3, "kl": None, "reward": 0.1}
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_samples_are_written_every_so_many_steps(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, samples_every=2)
    telemetry.stage("grpo", 4)
    batch = Batch.from_columns({"uid": ["a"], "response_ids": [[1, 2]]})
    for step in range(1, 5):
        telemetry.samples(step, batch)
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {"step-2.parquet", "step-4.parquet"}
    assert pq.read_table(tmp_path / "samples" / "step-2.parquet").to_pylist() == [{"uid": "a", "response_ids": [1, 2]}]


def test_samples_that_serve_several_steps_are_written_as_often(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, samples_every=10)
    telemetry.stage("grpo", 40)
    for step in range(1, 41, 4):  # 1, 5, 9, ...: none of them divides by 10
        telemetry.samples(step, Batch.from_columns({"uid": ["a"]}))
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        f"step-{step}.parquet" for step in (13, 21, 33)
    ]


@pytest.mark.parametrize("use_ray", [False, pytest.param(True, marks=pytest.mark.ray)])
def test_samples_that_cannot_be_written_are_told_and_stop_nothing(
    use_ray: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if use_ray:
        request.getfixturevalue("ray_cluster")
    (tmp_path / "samples").write_text("a file where the folder would be")
    files = SampleFiles(tmp_path / "samples", use_ray=use_ray)
    files.save(Batch.from_columns({"uid": ["a"], "response_ids": [[1, 2]]}), "step-1.parquet")
    (fault,) = files.faults(wait_s=60)
    assert "samples" in fault
    assert files.faults() == []


def test_the_gain_is_that_of_the_current_stage(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path)
    telemetry.stage("warm_start", 1)
    telemetry.step(1, {"reward/mean": 9.0})
    telemetry.stage("grpo", 10)
    assert telemetry.gain == ""
    for step in range(1, 11):
        telemetry.step(step, {"reward/mean": step / 10})
    assert telemetry.gain == "reward 0.15 in the first fifth of the steps, 0.95 in the last"


class Broken:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def log(self, step: int, metrics: object) -> None:
        self.calls.append("log")
        raise ConnectionError("no route")

    def close(self) -> None:
        self.calls.append("close")


class Working(Broken):
    def log(self, step: int, metrics: object) -> None:
        self.calls.append("log")


def test_a_tracker_that_fails_ends_neither_the_run_nor_the_other_trackers(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path)
    broken, working = Broken(), Working()
    telemetry._trackers = [broken, working]
    telemetry.stage("grpo", 2)
    telemetry.step(1, {"loss": 1.0})
    telemetry.step(2, {"loss": 1.0})
    telemetry.close()
    assert broken.calls == ["log"]
    assert working.calls == ["log", "log", "close"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    (tracker,) = open_trackers(["tensorboard"], tmp_path, "run", {})
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (scalar,) = events.Scalars("reward/mean")
    assert (scalar.step, scalar.value) == (1, 0.5)


def test_an_unknown_logger_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord'.*tensorboard, wandb, trackio"):
        open_trackers(["tensorbord"], tmp_path, "run", {})


def test_without_a_terminal_the_progress_is_lines() -> None:
    out = io.StringIO()
    progress = Progress(("train",), Console(file=out, width=200))
    progress.stage("grpo", 10)
    progress.step(1, {"reward/mean": 0.25, "seconds/step": 1.0})
    progress.step(2, {"reward/mean": 0.5})
    progress.step(10, {"reward/mean": 0.75})
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["starting train", "grpo: 10 steps"]
    assert lines[2].startswith("grpo 1/10  reward 0.25  s/step 1")
    assert lines[3].startswith("grpo 10/10  reward 0.75")
    assert len(lines) == 4


def test_on_a_terminal_the_panel_shows_what_each_role_does() -> None:
    out = io.StringIO()
    progress = Progress(("train", "rollout"), Console(file=out, width=120, force_terminal=True))
    progress.stage("grpo", 4)
    progress.doing("rollout", "generate")
    progress.step(3, {"reward/mean": 0.5})
    progress._live.refresh()
    progress.close()
    text = out.getvalue()
    assert "train: starting" in text, "before the first stage"
    assert "train: idle  rollout: generate" in text
    assert "grpo 3/4" in text


@pytest.mark.parametrize(("seconds", "text"), [(4.6, "4s"), (185, "3m05s"), (7800, "2h10m")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_wandb_gets_the_numbers_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tracker,) = open_trackers(["wandb"], tmp_path, "run", {"seed": 1})
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    deadline = time.monotonic() + 20
    while True:  # a process of wandb's writes the file, and may be a moment late
        records = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
        if any(b"reward/mean" in record for record in records):
            return
        assert time.monotonic() < deadline, records
        time.sleep(0.2)


def test_trackio_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tracker,) = open_trackers(["trackio"], tmp_path, "run", {"seed": 1})
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    with sqlite3.connect(tmp_path / "trackio" / "rolegraph.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    assert [(step, json.loads(metrics)["reward/mean"]) for step, metrics in rows] == [(1, 0.5)]


def test_a_run_goes_back_to_an_earlier_step_and_counts_on_from_there(tmp_path: Path) -> None:
    first = Telemetry(tmp_path, samples_every=4)
    first.stage("warm_start", 2)
    for step in (1, 2):
        first.step(step, {"loss": float(step)})
    first.stage("grpo", 8)
    first.samples(1, Batch.from_columns({"uid": ["a"]}))
    first.samples(5, Batch.from_columns({"uid": ["a"]}))
    for step in range(1, 7):
        first.step(step, {"reward/mean": float(step)})
    assert (first.last_step, first.state()) == (8, {"sampled": 5})
    first.close()

    second = Telemetry(tmp_path, samples_every=4)
    second.go_back(7, {"sampled": 5})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 8))
    second.stage("grpo", 8, 5)
    second.samples(6, Batch.from_columns({"uid": ["a"]}))
    for step in range(6, 9):
        second.step(step, {"reward/mean": float(step)})
    second.samples(9, Batch.from_columns({"uid": ["a"]}))
    second.finish_samples()
    assert second.gain == "reward 1 in the first fifth of the steps, 8 in the last", "over both parts"
    second.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row.get("reward/mean") for row in rows[2:]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {"step-7.parquet", "step-11.parquet"}
    names = [each["name"] for each in spans(tmp_path / "timeline.json")]
    assert names == ["step 8", "step 9", "step 10"]


def test_time_goes_on_over_the_parts_of_a_run_with_that_of_steps_taken_twice(tmp_path: Path) -> None:
    for from_step in (0, 2):
        clock = Clock()  # each process has one of its own
        telemetry = Telemetry(tmp_path, clock=clock)
        telemetry.go_back(from_step)
        telemetry.stage("grpo", 4, from_step)
        for step in range(from_step + 1, from_step + 4):
            clock.now += 10.0
            telemetry.step(step, {})
        telemetry.go_back(3)  # a trainer that died does not make the clock jump
        telemetry.close()
    assert [row["time"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [10.0, 20.0, 40.0]


def test_a_run_that_begins_anew_has_no_line_of_before(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    telemetry = Telemetry(tmp_path)
    telemetry.go_back(0)
    telemetry.stage("grpo", 1)
    telemetry.step(1, {"loss": 0.5})
    telemetry.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["step"], row["loss"]) == (1, 0.5)
