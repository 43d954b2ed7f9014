from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rolegraph.telemetry import Telemetry, read_metrics
from rolegraph.telemetry.timeline import Timeline, read_timeline, spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(tmp_path: Path, clock: Clock) -> Timeline:
    found = Timeline(tmp_path / "timeline.json", clock)
    found.place({"train": 1, "rollout": 2})
    return found


def complete(path: Path) -> list[dict[str, Any]]:
    """The events of a file that is whole JSON."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def test_a_call_is_a_span_with_all_there_is_to_know(timeline: Timeline, clock: Clock, tmp_path: Path) -> None:
    timeline.begin_step(5)
    clock.now += 1.0
    ended = timeline.call("rollout", "generate", 1, 8)
    clock.now += 0.25
    ended()
    timeline.close()
    events = complete(tmp_path / "timeline.json")
    (span,) = [event for event in events if event["ph"] == "X"]
    assert (span["name"], span["ts"], span["dur"]) == ("generate", 1e6, 0.25e6)
    assert span["args"] == {"role": "rollout", "rank": 1, "endpoint": "generate", "step": 5, "rows": 8}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["driver", "train", "rollout"]
    assert names[span["pid"]] == "rollout"
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {span["tid"]: "rank 1"}


def test_phases_and_steps_are_those_of_the_driver(timeline: Timeline, clock: Clock, tmp_path: Path) -> None:
    timeline.begin_step(1)
    with timeline.phase("sync"):
        clock.now += 1.0
    clock.now += 0.5
    timeline.end_step()
    with timeline.phase("train"):
        clock.now += 2.0
    timeline.end_step()
    timeline.close()
    found = [(s["role"], s["name"], s["start"], s["end"], s["step"]) for s in spans(tmp_path / "timeline.json")]
    assert found == [
        ("driver", "sync", 0.0, 1.0, 1),
        ("driver", "step 1", 0.0, 1.5, 1),
        ("driver", "train", 1.5, 3.5, 2),
        ("driver", "step 2", 1.5, 3.5, 2),
    ]


def test_calls_at_the_same_time_do_not_overlap_on_a_thread(timeline: Timeline, clock: Clock, tmp_path: Path) -> None:
    """A reader of complete events takes a thread's spans for a stack: one that straddles another is drawn wrong."""
    ends = []
    for _ in range(3):
        ends.append(timeline.call("rollout", "generate", 0, 1))
        clock.now += 1.0
    ends[1]()
    ends[1] = timeline.call("rollout", "generate", 0, 1)  # takes the thread that is free again
    other = timeline.call("rollout", "generate", 1, 1)
    clock.now += 1.0
    for end in (*ends, other):
        end()
    timeline.close()
    events = [event for event in complete(tmp_path / "timeline.json") if event["ph"] == "X"]
    assert len({event["tid"] for event in events}) == 4
    for tid in {event["tid"] for event in events}:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))
    threads = [e["args"]["name"] for e in complete(tmp_path / "timeline.json") if e["name"] == "thread_name"]
    assert sorted(threads) == ["rank 0", "rank 0 +1", "rank 0 +2", "rank 1"]


def test_a_rank_is_busy_once_however_many_calls_it_has(timeline: Timeline, clock: Clock) -> None:
    one = timeline.call("rollout", "generate", 0, 1)
    clock.now += 1.0
    two = timeline.call("rollout", "generate", 0, 1)
    clock.now += 1.0
    one()
    clock.now += 1.0
    two()
    clock.now += 4.0
    assert timeline.busy() == {"train": 0.0, "rollout": 1.5}, "the mean over both ranks, one of which had nothing to do"
    timeline.call("train", "step", 0, 4)
    clock.now += 2.0
    assert timeline.busy() == {"train": 2.0, "rollout": 1.5}, "a call in progress counts as far as it has come"


def test_memory_holds_open_calls_alone(timeline: Timeline) -> None:
    for _ in range(100):
        timeline.call("rollout", "generate", 0, 1)()
    assert [len(track.open) for track in timeline._tracks.values()] == [0]


def test_calls_end_in_any_thread(timeline: Timeline, tmp_path: Path) -> None:
    def many(rank: int) -> None:
        for _ in range(200):
            timeline.call("rollout", "generate", rank, 1)()

    threads = [threading.Thread(target=many, args=(rank,)) for rank in (0, 0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    assert len(spans(tmp_path / "timeline.json")) == 800


def test_what_has_not_ended_is_there_and_marked(timeline: Timeline, clock: Clock, tmp_path: Path) -> None:
    late = timeline.call("train", "step", 0, 4)
    clock.now += 3.0
    timeline.close()
    late()  # its actor was stopped after the file was closed
    timeline.close()
    (span,) = spans(tmp_path / "timeline.json")
    assert (span["name"], span["end"], span["unfinished"]) == ("step", 3.0, True)
    complete(tmp_path / "timeline.json")


def test_a_killed_run_leaves_what_it_had(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from rolegraph.telemetry.timeline import Timeline
timeline = Timeline(Path(sys.argv[1]))
timeline.call("train", "step", 0, 4)()
timeline.call("train", "step", 0, 4)
os.kill(os.getpid(), 9)
"""
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "timeline.json")], env=env)
    assert done.returncode == -9
    text = (tmp_path / "timeline.json").read_text()
    assert json.loads(text + "]"), "the format lets the end be missing, and nothing else"
    (span,) = spans(tmp_path / "timeline.json")
    assert span["name"] == "step"
    (tmp_path / "timeline.json").write_text(text[:-20])
    assert len(read_timeline(tmp_path / "timeline.json")) < len(json.loads(text + "]")), "a torn line is left out"


def test_telemetry_logs_idle_shares_and_says_them_at_the_end(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry = Telemetry(tmp_path, clock=clock)
    telemetry.timeline.place({"train": 1, "rollout": 2, "orm": 1})
    starting = telemetry.timeline.call("train", "step", 0, 4)
    clock.now += 50.0
    starting()
    telemetry.stage("grpo", 2)
    generating = telemetry.timeline.call("rollout", "generate", 0, 4)
    clock.now += 4.0
    telemetry.step(1, {})
    clock.now += 1.0
    generating()
    training = telemetry.timeline.call("train", "step", 0, 4)
    clock.now += 5.0
    training()
    telemetry.step(2, {})
    clock.now += 100.0  # the roles are torn down
    telemetry.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    idle = ("idle/train", "idle/rollout", "idle/orm")
    assert [first[key] for key in idle] == [1.0, 0.5, 1.0]
    assert [second[key] for key in idle] == pytest.approx([1 / 6, 1 - 1 / 12, 1.0])
    assert "busy: train 50%, rollout 25%, orm 0%" in capsys.readouterr().err


def test_seconds_of_overlapping_phases_are_covered_once(tmp_path: Path, clock: Clock) -> None:
    telemetry = Telemetry(tmp_path, roles=("train", "rollout"), clock=clock)
    telemetry.stage("grpo", 2)
    clock.now += 1.0
    with telemetry.phase("generate", "rollout"):
        clock.now += 2.0
        with telemetry.phase("sync", "train", "rollout"):
            assert telemetry.progress._roles == {"train": "sync", "rollout": "sync"}
            clock.now += 3.0
        assert telemetry.progress._roles == {"train": "idle", "rollout": "generate"}
        telemetry.step(1, {})
        clock.now += 4.0
    clock.now += 0.5
    telemetry.step(2, {})
    telemetry.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["seconds/sync"], first["seconds/other"], first["seconds/step"]) == (3.0, 1.0, 6.0)
    assert "seconds/generate" not in first, "a phase counts where it ends"
    assert (second["seconds/generate"], second["seconds/other"], second["seconds/step"]) == (9.0, 0.5, 4.5)
