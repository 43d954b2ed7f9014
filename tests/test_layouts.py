"""The ready layouts of GRPO in `examples/layouts`: planned for GPUs, and run on a CPU with the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rolegraph.config import load
from rolegraph.explain import print_plan
from rolegraph.placement import Inventory, Node, plan, requests
from rolegraph.telemetry.timeline import spans
from tests.runs import Finished, run
from tests.test_reward_layouts import NAMES as WITH_REWARD_MODELS

LAYOUTS = Path(__file__).parents[1] / "examples" / "layouts"
NAMES = ("grpo_async", "grpo_colocate", "grpo_separate")
EIGHT_GPUS = Inventory((Node("node0", tuple(range(8)), 64.0),))
ON_A_CPU = ("train.ranks=1", "rollout.replicas=1", "model=tiny", "data.size=200", "placement.device=cpu")
IN_FULL = "rollout.dtype=float32"
"""As the trainer computes on a CPU; by itself an engine draws in bfloat16 where the CPU multiplies that."""

SLOW_TO_GENERATE = (
    "algorithm.global_batch_size=32",
    "algorithm.num_generations=4",
    "algorithm.max_completion_length=64",
    "rollout.max_num_seqs=8",
    "rollout.engine_kwargs.max_num_batched_tokens=512",
    "logger.samples_every=1",
)
"""A generation takes several waves of samples, longer than a step of training on them."""


def test_each_has_a_test() -> None:
    named = {path.stem for path in LAYOUTS.glob("experiment/*.yaml")}
    assert named == {*NAMES, *WITH_REWARD_MODELS}


@pytest.mark.parametrize("name", NAMES)
def test_each_is_planned_for_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load([f"experiment={name}"], config_dir=str(LAYOUTS)).run
    print_plan(config, EIGHT_GPUS, Console(width=200))
    placed = plan(EIGHT_GPUS, requests(config.roles), config.placement)
    devices = {role: [slot.device_ids for slot in slots] for role, slots in placed.roles.items()}
    everything = [(gpu,) for gpu in range(8)]
    shown = capsys.readouterr().out
    if name == "grpo_colocate":
        assert devices["train"] == devices["rollout"] == everything
    else:
        assert devices["train"] + devices["rollout"] == everything
    assert ("take turns" in shown) == (name == "grpo_colocate")
    assert ("from weights at most 1 weight version behind" in shown) == (name == "grpo_async")


def run_layout(name: str, *overrides: str, folder: Path) -> Finished:
    words = ("--config-dir", str(LAYOUTS), f"experiment={name}", *ON_A_CPU, IN_FULL, *SLOW_TO_GENERATE)
    return run(*words, *overrides, folder=folder)


def overlaps(done: Finished) -> int:
    """Pairs of a generation and a training step that ran at the same time."""
    calls = [s for s in spans(done.folder / "timeline.json") if s["role"] != "driver"]
    generations, steps = ([s for s in calls if s["name"] == name] for name in ("generate", "step"))
    return sum(a["start"] < b["end"] and b["start"] < a["end"] for a in generations for b in steps)


def batches(done: Finished) -> list[list[dict[str, Any]]]:
    """The rows of each step."""
    count = len(done.metrics)
    return [pq.read_table(done.folder / "samples" / f"step-{n}.parquet").to_pylist() for n in range(1, count + 1)]


@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["grpo_colocate", "grpo_separate"])
def test_in_turn_nothing_overlaps_and_no_sample_is_stale(name: str, tmp_path: Path) -> None:
    done = run_layout(name, "max_steps=2", folder=tmp_path)
    assert overlaps(done) == 0
    assert [row["staleness/max"] for row in done.metrics] == [0.0, 0.0]
    assert [{row["weight_version"] for row in rows} for rows in batches(done)] == [{1}, {2}]
    assert all(row["weight_version"] == row["weight_version_last"] for rows in batches(done) for row in rows)
    assert "busy: train " in done.output
    assert "timeline.json" in done.output


@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.parametrize("on_sync", ["keep", "drain"])
def test_side_by_side_generation_overlaps_training(on_sync: str, tmp_path: Path) -> None:
    done = run_layout("grpo_async", f"algorithm.on_sync={on_sync}", "max_steps=5", folder=tmp_path)
    assert overlaps(done) >= 4
    stale = [row["staleness/max"] for row in done.metrics]
    assert stale == [0.0, 1.0, 1.0, 1.0, 1.0], "as stale as it may be, and no more"
    rows = [row for rows in batches(done) for row in rows]
    assert len(rows) == 5 * 32
    crossed = [row for row in rows if row["weight_version_last"] > row["weight_version"]]
    if on_sync == "drain":
        assert crossed == [], "every sample has one set of weights"
    else:
        assert crossed, "samples went on with new weights"
        assert all(row["weight_version_last"] == row["weight_version"] + 1 for row in crossed)
        versions = [{row["weight_version"] for row in rows} for rows in batches(done)]
        assert max(map(len, versions)) >= 2, "rows of two weight versions in a batch"
    # The logprobs that correct the loss are those of the tokens as they were drawn, across a change of weights too.
    differences = [row["rollout_logprob_difference/max"] for row in done.metrics]
    assert differences[0] < 1e-4 < max(differences[1:])
    assert all(row["importance_weight/mean"] == pytest.approx(1.0, abs=0.05) for row in done.metrics)
    assert all(0 <= row[f"idle/{role}"] <= 1 for row in done.metrics for role in ("train", "rollout", "orm"))
