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
import pytest

from rolegraph.batch import Batch
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.group import group_of
from rolegraph.host import RoleSpec
from rolegraph.interfaces import SamplingParams
from rolegraph.models import ModelConfig, ensure
from rolegraph.placement import Inventory, Node, PlacementConfig, plan, requests
from rolegraph.telemetry import read_metrics
from roles.rollout.config import VLLMRolloutConfig
from roles.rollout.vllm import VLLMRollout
from tests.runs import DRIVER, MARK, SMALL, logs, marked, marked_pids

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


def test_a_run_goes_on_without_the_replica_that_was_killed_and_can_be_stopped(tmp_path: Path) -> None:
    layout = ("placement=separate", "rollout.replicas=2", "rollout.dtype=float32")
    with running("algorithm=grpo", *SMALL, *layout, folder=tmp_path) as run:
        process, mark = run
        os.kill(next(pid for pid, title in marked_pids(mark).items() if "VLLMRollout" in title), signal.SIGKILL)
        wait_for_steps(process, tmp_path, 6)
        assert_frees_everything(process, mark, signal.SIGTERM, tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")[:6]
    assert [row["rows"] for row in rows] == [32.0] * 6
    assert max(row["rollout_logprob_difference/max"] for row in rows) < 1e-4, "the other one still gets new weights"


def test_an_interrupted_run_that_overlaps_frees_everything_within_seconds(tmp_path: Path) -> None:
    layout = ("placement=separate", "algorithm.max_staleness=1")
    with running("algorithm=grpo", *SMALL, *layout, folder=tmp_path) as (process, mark):
        assert_frees_everything(process, mark, signal.SIGINT, tmp_path)
