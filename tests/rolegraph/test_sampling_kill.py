"""`rolegraph run` of a sampling graph that is killed again and again: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolegraph.json_rows import decode
from tests.runs import MARK, marked_pids

ROOT = Path(__file__).parents[2]
ROWS, SAME, REPEATS = 100, 3, 3
KILLS = 10
WORDS = (
    *("--config-dir", str(Path(__file__).parent / "slow"), "algorithm=sampling", "sampler=slow", "orm=slow"),
    *("data=jsonl", "use_ray=false", "algorithm.num_sampling_batch_size=2"),
    *(f"algorithm.num_return_sequences={REPEATS}", "algorithm.n_best_to_keep=2"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows as they come: nested, some twice, some broken."""
    lines: list[bytes] = []
    for number in range(ROWS):
        row: dict[str, Any] = {
            "prompt": f"question {number}\u2028",
            "nested": [number] if number % 2 else {"a": [number]},
        }
        lines.append(json.dumps(row).encode())
        if number < SAME:
            lines += [b'{"prompt": "the same"}', b'{"prompt": "bro']
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture(scope="module")
def words(data: Path) -> tuple[str, ...]:
    return (*WORDS, f"data.path={data}")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run in a process of its own; what it says goes to a file beside the folder."""
    command = [sys.executable, "-m", "rolegraph.cli", "run", *words, f"output_dir={folder}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), MARK: folder.name}
    with said_by(folder).open("a") as output:
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)


def said_by(folder: Path) -> Path:
    return folder.with_suffix(".out")


def finish(folder: Path, *words: str) -> tuple[int, str]:
    """The exit code of a run that is left alone, and what it said."""
    before = said_by(folder).stat().st_size if said_by(folder).exists() else 0
    code = start(folder, *words).wait(timeout=240)
    return code, said_by(folder).read_bytes()[before:].decode()


def keys(path: Path) -> list[tuple[str, int]]:
    """Of the whole lines."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [(row["uid"], row["repeat"]) for row in map(decode, whole)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, words: tuple[str, ...]) -> Path:
    """The folder of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    code, output = finish(folder, *words)
    assert code == 0, output
    return folder


def kill_at_random(process: subprocess.Popen[str], candidates: Path, draw: random.Random) -> None:
    """Kill -9 while it starts, or once some more candidates are there, or a moment later; long before its end."""
    done, starting = len(keys(candidates)), draw.random() < 0.2
    wanted = done + (1 if starting else draw.randrange(1, 8))
    until = time.monotonic() + (draw.uniform(0.1, 2.0) if starting else 120.0)
    while len(keys(candidates)) < wanted and time.monotonic() < until and process.poll() is None:
        time.sleep(0.005)
    time.sleep(0.0 if starting else draw.uniform(0, 0.05))
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_run_that_is_killed_ten_times_has_what_an_uninterrupted_one_has(
    whole: Path, words: tuple[str, ...], tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    print(f"moments of {seed}")
    draw, folder, kills = random.Random(seed), tmp_path / "killed", 0
    written: dict[str, list[tuple[str, int]]] = {"samples.jsonl": [], "candidates.jsonl": []}
    while kills < KILLS:
        process = start(folder, *words, "resume=true")
        kill_at_random(process, folder / "candidates.jsonl", draw)
        assert process.returncode == -signal.SIGKILL, said_by(folder).read_text()[-3000:]
        kills += 1
        for name, before in written.items():
            now = keys(folder / name)
            assert now[: len(before)] == before, f"{name} lost a line to kill {kills}"
            assert len(set(now)) == len(now)
            written[name] = now
    assert not (folder / "finished.json").exists()
    code, output = finish(folder, *words, "resume=true")
    assert code == 0, output
    assert f"going on: {len(written['candidates.jsonl'])} candidates are done" in output
    for name in written:
        assert sorted(keys(folder / name)) == sorted(keys(whole / name))
    assert len(keys(whole / "samples.jsonl")) == (ROWS + SAME) * REPEATS
    assert (folder / "kept.jsonl").read_bytes() == (whole / "kept.jsonl").read_bytes()
    assert pq.read_table(folder / "kept.parquet").equals(pq.read_table(whole / "kept.parquet"))
    metrics = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics == list(range(1, len(metrics) + 1)), "those of the earlier parts are there, and go on"
    summaries = [json.loads((path / "summary.json").read_text()) for path in (folder, whole)]
    for summary in summaries:
        del summary["this_part"]
    assert summaries[0] == summaries[1]
    assert summaries[0]["source"]["left_out"] == {"broken JSON": SAME}


def test_kept_rows_have_the_columns_of_the_data_and_every_row_is_there(whole: Path, data: Path) -> None:
    given = {row["prompt"]: row for line in data.read_bytes().splitlines() if (row := parsed(line))}
    kept = [json.loads(line) for line in (whole / "kept.jsonl").read_bytes().splitlines()]
    assert {row["prompt"] for row in kept} <= set(given)
    for row in kept:
        assert row["nested"] == given[row["prompt"]].get("nested")
        assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"]


def parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row


def test_a_finished_run_does_nothing(whole: Path, words: tuple[str, ...]) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.json*")}
    code, output = finish(whole, *words, "resume=true", "use_ray=true")
    assert code == 0, output
    assert f"finished already: {ROWS + SAME} rows" in output
    assert "starting" not in output, "neither Ray nor a role"
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*.json*")} == before


def test_output_that_is_there_is_neither_overwritten_nor_mixed_with_another(
    whole: Path, words: tuple[str, ...]
) -> None:
    before = {path: path.read_bytes() for path in whole.glob("*.json*")}
    code, output = finish(whole, *words)
    assert code == 2
    assert re.search(r"whole holds a finished run: go on with resume=true, begin anew with \S+overwrite=true", output)
    code, output = finish(whole, *words, "resume=true", "algorithm.temperature=0.7", "seed=4")
    assert code == 2
    assert "algorithm.temperature: 1.0 then, 0.7 now" in output
    assert "seed: 0 then, 4 now" in output
    assert {path: path.read_bytes() for path in whole.glob("*.json*")} == before


VLLM = (
    *("algorithm=sampling", "sampler=vllm", "orm=functions", "reward=exact_match", "model=tiny", "data.size=40"),
    *("algorithm.num_sampling_batch_size=4", "algorithm.num_return_sequences=2", "algorithm.max_completion_length=8"),
    *("sampler.max_num_seqs=8", "algorithm.easy_query_threshold=1.0"),
)
"""Sums that a model without training answers at random."""


@pytest.fixture
def no_process_left(tmp_path: Path) -> Iterator[None]:
    """What a killed driver started ends by itself."""
    yield
    deadline = time.monotonic() + 60
    while (left := [*marked_pids("killed").values(), *marked_pids("other").values()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.mark.engine
def test_a_run_with_vllm_that_is_killed_goes_on_to_the_same_candidates(tmp_path: Path, no_process_left: None) -> None:
    folder, other = tmp_path / "killed", tmp_path / "other"
    process = start(folder, *VLLM)
    while len(keys(folder / "samples.jsonl")) < 16:
        assert process.poll() is None, said_by(folder).read_text()[-3000:]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = keys(folder / "samples.jsonl")
    assert len(before) < 80
    code, output = finish(folder, *VLLM, "resume=true")
    assert code == 0, output[-3000:]
    assert keys(folder / "samples.jsonl")[: len(before)] == before
    code, output = finish(other, *VLLM)
    assert code == 0, output[-3000:]
    for name in ("samples.jsonl", "candidates.jsonl"):
        assert len(keys(folder / name)) == 80
        assert sorted(keys(folder / name)) == sorted(keys(other / name))
    assert (folder / "kept.jsonl").read_bytes() == (other / "kept.jsonl").read_bytes()
