"""Real engines that are stopped or killed in the middle of their work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rolegraph.batch import Batch
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.group import group_of
from rolegraph.host import RoleSpec
from rolegraph.interfaces import SamplingParams
from rolegraph.models import ModelConfig, ensure
from rolegraph.placement import Inventory, Node, PlacementConfig, plan, requests
from rolegraph.telemetry import read_metrics
from rolegraph.telemetry.timeline import spans
from roles.rollout.config import VLLMRolloutConfig
from roles.rollout.vllm import VLLMRollout
from tests.runs import DRIVER, MARK, SMALL, logs, marked, marked_pids, rolegraph

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


async def test_rows_of_a_killed_replica_are_generated_by_another(ray_cluster: None, tmp_path: Path) -> None:
    model = ensure(ModelConfig(maker="rolegraph.models.tiny.make"))
    spec = RoleSpec(VLLMRollout, VLLMRolloutConfig(replicas=2, cpus=1, model=model, max_model_len=512, seed=0))
    inventory = Inventory((Node("here", (), 4.0),))
    placed = plan(inventory, requests({"rollout": spec}), PlacementConfig(device="cpu"))
    prompts = Batch.from_columns(
        {"uid": [f"row-{n}" for n in range(48)], "prompt_ids": [[5 + n % 9, 6, 7] for n in range(48)]}
    )
    sampling = SamplingParams(n=2, max_tokens=300, ignore_eos=True, seed=1)
    async with RoleGraph(placed, {"rollout": spec}, GraphOptions(run_dir=str(tmp_path))) as graph:
        rollout = graph.handle("rollout", VLLMRollout)
        group = group_of(rollout)
        whole = asyncio.ensure_future(rollout.generate(prompts, sampling))
        victim = int((await group.metrics())[1]["pid"])
        # The actor has no event to wait for.
        while not any("generate" in metrics["busy"] for metrics in await group.metrics()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        assert not whole.done(), "the replica is to die in the middle"
        os.kill(victim, signal.SIGKILL)
        rows = await whole
        assert group.alive == (0,)
        again = await rollout.generate(prompts, sampling)
        tokens, expected = (await rows.fetch(["response_ids"])), (await again.fetch(["response_ids"]))
    assert rows["uid"].to_pylist() == [f"row-{n // 2}" for n in range(96)]
    assert rows.numpy("repeat").tolist() == [0, 1] * 48
    assert all(
        np.array_equal(a, b) for a, b in zip(tokens.lists("response_ids"), expected.lists("response_ids"), strict=True)
    ), "a row has the same draws whichever replica made it"


@contextlib.contextmanager
def running(*overrides: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A run in a process of its own, once it has logged two steps; and the mark of its processes."""
    mark, root = uuid.uuid4().hex, Path(__file__).parents[2]
    words = ["run", "model=tiny", "data.size=200", "max_steps=10000", *overrides, f"output_dir={folder}"]
    env = {**os.environ, "PYTHONPATH": str(root), MARK: mark}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *words], env=env, stdout=output, stderr=subprocess.STDOUT, cwd=root
        )
    try:
        wait_for_steps(process, folder, 2)
        yield process, mark
    finally:
        process.kill()


def wait_for_steps(process: subprocess.Popen[bytes], folder: Path, steps: int) -> None:
    """Return once a run has logged so many steps."""
    deadline = time.monotonic() + 240
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= steps):
        assert process.poll() is None, (folder / "output").read_text()[-3000:] + logs(folder)
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.2)


def wait_for_words(process: subprocess.Popen[bytes], folder: Path, words: str) -> None:
    """Return once a run has said so."""
    deadline = time.monotonic() + 240
    while words not in " ".join((folder / "output").read_text().split()):
        assert process.poll() is None, (folder / "output").read_text()[-3000:] + logs(folder)
        assert time.monotonic() < deadline, (folder / "output").read_text()[-3000:] + logs(folder)
        time.sleep(0.2)


def pid_of(mark: str, title: str) -> int:
    """A process of a command, by what it calls itself."""
    return next(pid for pid, found in marked_pids(mark).items() if title in found)


def assert_frees_everything(process: subprocess.Popen[bytes], mark: str, kind: signal.Signals, folder: Path) -> None:
    """Stop a GRPO run by a signal: no process is left within ten seconds, no traceback is shown, its timeline opens."""
    before = len((folder / "output").read_text())  # a sync that a replica did not live through has its traceback there
    process.send_signal(kind)
    sent = time.monotonic()
    while (left := marked(mark)) and time.monotonic() - sent < 10:
        time.sleep(0.1)
    assert left == [], f"after {time.monotonic() - sent:.0f} s"
    assert process.wait(1) == 130
    text = (folder / "output").read_text()[before:]
    assert "Traceback" not in text, text[-3000:]
    assert "rolegraph: stopped" in text
    assert "busy: train " in text
    assert {"generate", "step", "sync"} <= {
        event["name"] for event in json.loads((folder / "timeline.json").read_text())
    }


def test_a_replica_and_then_the_trainer_are_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    layout = ("placement=separate", "rollout.replicas=2", "rollout.dtype=float32", "checkpoint.every=2")
    with running("algorithm=grpo", *SMALL, *layout, folder=tmp_path) as run:
        process, mark = run
        os.kill(pid_of(mark, "VLLMRollout"), signal.SIGKILL)
        wait_for_words(process, tmp_path, "works again after")
        done = len(read_metrics(tmp_path / "metrics.jsonl"))
        wait_for_steps(process, tmp_path, done + 3)
        engines = {pid for pid, title in marked_pids(mark).items() if "VLLMRollout" in title}
        os.kill(pid_of(mark, "MegatronTrain"), signal.SIGKILL)
        wait_for_words(process, tmp_path, "going on behind step")
        resumed = len(read_metrics(tmp_path / "metrics.jsonl"))
        wait_for_steps(process, tmp_path, resumed + 3)
        assert {pid for pid, title in marked_pids(mark).items() if "VLLMRollout" in title} == engines, "they are kept"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert not [title for title in marked(mark) if "ray::" in title]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step once"
    assert {row["rows"] for row in rows} == {32.0}
    assert sum(row.get("restarts/rollout", 0.0) for row in rows) == 1
    assert sum(row.get("restarts/train", 0.0) for row in rows) == 1
    assert max(row["rollout_logprob_difference/max"] for row in rows) < 1e-4, "engines have the trainer's weights"
    calls = [span for span in spans(tmp_path / "timeline.json") if span["name"] == "generate" and "rank" in span]
    assert {span["rank"] for span in calls if span["step"] > done + 1} == {0, 1}, "the new one draws, too"


def test_losses_that_are_not_finite_end_a_run_with_their_rows_saved(tmp_path: Path) -> None:
    small = ("model=tiny", "data.size=64", "max_steps=50", "algorithm.global_batch_size=8", "use_ray=false")
    words = ("algorithm=sft", *small, "train.lr=1e36", "health.max_bad_steps=2")
    done = rolegraph("run", *words, f"output_dir={tmp_path}", cwd=Path(__file__).parents[2])
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout[-2000:]
    assert "the last 2 steps" in said
    assert "health.max_bad_steps=2" in said
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["bad_steps"] for row in rows[-2:]] == [1.0, 2.0]
    kept = sorted((tmp_path / "bad_steps").iterdir())
    assert [path.name for path in kept] == [f"step-{row['step']}.parquet" for row in rows[-2:]]
    table = pq.read_table(kept[0])
    assert {"uid", "prompt_ids", "response_ids"} <= set(table.column_names)
    assert len(table) == 8


def test_an_interrupted_run_that_overlaps_frees_everything_within_seconds(tmp_path: Path) -> None:
    layout = ("placement=separate", "algorithm.max_staleness=1")
    with running("algorithm=grpo", *SMALL, *layout, folder=tmp_path) as (process, mark):
        assert_frees_everything(process, mark, signal.SIGINT, tmp_path)
