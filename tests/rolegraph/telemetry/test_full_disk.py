"""A disk that is full for a while takes nothing from the log, and ends no run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolegraph.batch import Batch
from rolegraph.telemetry import MetricsLog, Telemetry, read_metrics
from rolegraph.telemetry.timeline import Timeline, read_timeline, spans


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, takes: int = 5) -> Iterator[None]:
    """While the block runs, a write puts so many bytes down at most, and the one behind it none."""
    real, written = os.write, []

    def write(file: int, data: Any) -> int:
        if len(written) % 2:
            written.append(0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(real(file, bytes(data)[:takes]))
        return written[-1]

    with monkeypatch.context() as patched:
        patched.setattr("rolegraph.telemetry.appending.os.write", write)
        yield


def test_lines_wait_and_are_written_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, told = tmp_path / "metrics.jsonl", []
    log = MetricsLog(path, told.append)
    log.write(1, {"stage": "grpo", "loss": 1.0})
    with full_disk(monkeypatch):
        for step in (2, 3):
            log.write(step, {"stage": "grpo", "loss": float(step)})
            assert [row["step"] for row in read_metrics(path)] == [1]
            assert path.read_bytes().endswith(b"\n"), "no torn line"
        assert log.last_step == 3
        assert log.values("loss", "grpo", 2) == [2.0, 3.0]
        with pytest.raises(OSError, match="No space left"):
            log.sync()
    log.write(4, {"stage": "grpo", "loss": 4.0})
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    assert told == ["metrics.jsonl cannot be written for now; its lines are kept until it can: No space left on device"]


def test_lines_that_are_lost_at_the_end_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    log = MetricsLog(tmp_path / "metrics.jsonl", told.append)
    with full_disk(monkeypatch):
        log.write(1, {})
        log.write(2, {})
        log.close()
    assert told[1:] == ["metrics.jsonl lacks its last 2 lines: No space left on device"]


def test_going_back_drops_waiting_lines_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with full_disk(monkeypatch):
        for step in (1, 2, 3):
            log.write(step, {})
        log.go_back(2)
    log.write(3, {"again": 1.0})
    log.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 1}, {"step": 2}, {"step": 3, "again": 1.0}]


def test_lines_that_a_power_cut_has_taken_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(2, {})
    log.close()
    telemetry, said = Telemetry(tmp_path), []
    monkeypatch.setattr(telemetry.progress, "say", said.append)
    telemetry.go_back(2)
    assert said == []
    telemetry.go_back(4)
    assert said == ["metrics.jsonl ends with step 2: the lines up to step 4 are lost"]


def test_spans_are_left_out_and_names_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    timeline = Timeline(tmp_path / "timeline.json", tell=told.append)
    with full_disk(monkeypatch):
        timeline.place({"train": 1})
        timeline.call("train", "step", 0, 8)()
        timeline.call("train", "save", 0, None)()
    timeline.call("train", "step", 0, 4)()
    timeline.close()
    assert [(span["role"], span["name"], span["rows"]) for span in spans(tmp_path / "timeline.json")] == [
        ("train", "step", 4)
    ]
    names = [event["name"] for event in read_timeline(tmp_path / "timeline.json")]
    assert names.count("process_name") == 2
    assert told == ["timeline.json cannot be written for now, and lacks what ends meanwhile: No space left on device"]


def test_samples_that_do_not_fit_leave_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(self: Batch, path: str) -> None:
        Path(path).write_bytes(b"PAR1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Batch, "write_parquet", torn)
    telemetry = Telemetry(tmp_path, samples_every=1)
    said: list[str] = []
    monkeypatch.setattr(telemetry.progress, "say", said.append)
    telemetry.stage("grpo", 1)
    telemetry.samples(1, Batch.from_columns({"uid": ["a"]}))
    assert said[1:] == ["samples were not saved: [Errno 28] No space left on device"]
    assert not list((tmp_path / "samples").iterdir())
