"""The recipes of `conf/experiment`: each is planned for GPUs, and the layouts of distillation run on a CPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rolegraph.config import load
from rolegraph.explain import print_plan
from rolegraph.placement import Inventory, Node
from rolegraph.telemetry.timeline import spans
from tests.runs import Finished, run

RECIPES = Path(__file__).parents[1] / "conf" / "experiment"
EIGHT_GPUS = Inventory((Node("node0", tuple(range(8)), 64.0),))

IN_TURN = ("generate", "teacher", "train", "sync")
PLANNED: dict[str, dict[tuple[str, ...], tuple[str, ...]]] = {
    "gkd_rollout_colocate_teacher_colocate": {("train", "rollout", "teacher"): IN_TURN},
    "gkd_rollout_separate_teacher_colocate": {
        ("train", "teacher"): ("teacher", "train", "sync"),
        ("rollout",): ("generate", "sync"),
    },
    "gkd_rollout_colocate_teacher_standalone": {
        ("train", "rollout"): ("generate", "train", "sync"),
        ("teacher",): ("teacher",),
    },
    "opsd": {("train", "rollout"): ("generate", "teach", "train", "sync")},
    "opd_rl": {("train", "rollout", "teacher"): IN_TURN},
    "opsd_tiny": {("train", "rollout"): ("generate", "teach", "train", "sync")},
    "gkd_smollm2": {("train", "rollout", "teacher"): IN_TURN},
    "grpo_smollm2": {("train", "rollout"): ("generate", "train", "sync")},
}
"""Who shares a GPU with whom, and the phases in which memory is told for it."""


def test_each_has_a_test() -> None:
    assert sorted(path.stem for path in RECIPES.glob("*.yaml")) == sorted([*PLANNED, "quickstart", "sampling_smollm2"])


@pytest.mark.parametrize("name", PLANNED)
def test_each_is_planned_for_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load([f"experiment={name}"]).run
    placed, found = print_plan(config, EIGHT_GPUS, Console(width=200))
    wanted = PLANNED[name]
    on_gpus = {role: {gpu for slot in slots for gpu in slot.device_ids} for role, slots in placed.roles.items()}
    assert set(itertools.chain(*wanted)) == {role for role, gpus in on_gpus.items() if gpus}
    for group in wanted:
        assert all(on_gpus[role] == on_gpus[group[0]] for role in group)
    assert len(set().union(*on_gpus.values())) == sum(len(on_gpus[group[0]]) for group in wanted), "no other overlap"
    assert not found.unknown
    assert {need.roles: tuple(phase.name for phase in need.phases) for need in found.needs} == wanted
    assert all(phase.total > 0 for need in found.needs for phase in need.phases)
    shown = capsys.readouterr().out
    assert "take turns" in shown
    assert f"Memory of the GPU of {', '.join(next(iter(wanted)))}, estimated" in shown


# ----- on a CPU -----

SMALL = (
    "train.ranks=1",
    "rollout.replicas=1",
    "rollout.max_num_seqs=16",
    "model=tiny",
    "placement.device=cpu",
    "data.size=64",
    "algorithm.global_batch_size=16",
    "algorithm.max_completion_length=8",
    "train.lr=1e-2",
    "logger.samples_every=1",
)
ANOTHER_TEACHER = ("teacher.model.maker=rolegraph.models.tiny.make", "teacher.model.args={seed: 1}")


def recipe(name: str, *overrides: str, folder: Path) -> Finished:
    done = run(f"experiment={name}", *SMALL, *overrides, folder=folder)
    assert done.held_bytes == 0, "tokens, top-K and hidden states went by the driver"
    return done


def series(done: Finished, name: str) -> list[float]:
    return [row[name] for row in done.metrics]


def rows(done: Finished, step: int) -> list[dict[str, Any]]:
    return pq.read_table(done.folder / "samples" / f"step-{step}.parquet").to_pylist()


def overlaps(done: Finished, one: str, other: str) -> int:
    """Pairs of calls of two roles that ran at the same time; their starts, which come before any turn, left out."""
    calls = [span for span in spans(done.folder / "timeline.json") if span["name"] in ("generate", "score", "step")]
    ones, others = ([span for span in calls if span["role"] == role] for role in (one, other))
    assert ones
    assert others
    return sum(a["start"] < b["end"] and b["start"] < a["end"] for a in ones for b in others)


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_everything_in_turns_over_whole_vocabularies_and_the_same_twice(tmp_path: Path) -> None:
    """The teacher is the student at its start: nothing to learn from it, until a step on dataset responses."""
    words = ("seed=14", "deterministic=true", "algorithm.lmbda=0.5", "algorithm.sft_alpha=1.0", "max_steps=3")
    name = "gkd_rollout_colocate_teacher_colocate"
    done = recipe(name, *words, folder=tmp_path / "first")
    assert series(done, "on_policy") == [1.0, 0.0, 1.0]
    divergence = series(done, "divergence")
    assert abs(divergence[0]) < 1e-6 < 1e-3 < divergence[2]
    assert ["cross_entropy" in row for row in done.metrics] == [False, True, False]
    assert ["response_length/mean" in row for row in done.metrics] == [True, False, True]
    for one, other in itertools.combinations(("train", "rollout", "teacher"), 2):
        assert overlaps(done, one, other) == 0
    again = recipe(name, *words, folder=tmp_path / "second")
    assert again.figures == done.figures


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_samples_are_drawn_beside_a_teacher_that_shares_the_trainers_devices(tmp_path: Path) -> None:
    name = "gkd_rollout_separate_teacher_colocate"
    done = recipe(name, *ANOTHER_TEACHER, "algorithm.max_completion_length=48", "max_steps=3", folder=tmp_path)
    assert series(done, "staleness/max") == [0.0, 1.0, 1.0]
    assert overlaps(done, "train", "teacher") == 0
    assert overlaps(done, "rollout", "teacher") + overlaps(done, "rollout", "train") > 0
    assert min(series(done, "divergence")) > 0.01
    assert series(done, "divergence")[2] < series(done, "divergence")[0]


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_an_engine_teaches_by_its_likeliest_tokens(tmp_path: Path) -> None:
    done = recipe("gkd_rollout_colocate_teacher_standalone", "max_steps=2", "teacher.dtype=float32", folder=tmp_path)
    assert abs(series(done, "divergence")[0]) < 1e-6, "it is the student at its start"
    assert series(done, "teacher/top_agreement")[0] > 0.99
    assert all(0.0 < mass < 1.0 for mass in series(done, "teacher/mass_covered"))
    assert overlaps(done, "rollout", "train") == 0


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_policy_that_sees_the_answer_teaches_itself(tmp_path: Path) -> None:
    done = recipe("opsd", "max_steps=2", folder=tmp_path)
    assert series(done, "divergence")[0] > 1e-3, "equal weights, other prompts"
    assert series(done, "teacher/entropy")[0] > 0
    for row in rows(done, 1):
        assert row["teacher_prompt_length"] > row["prompt_length"]
        pairs = zip(row["prompt_ids"], row["teacher_prompt_ids"], strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert shared > row["prompt_length"] / 2, "the question, before what it is told beyond it"


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_teacher_beside_rewards(tmp_path: Path) -> None:
    done = recipe("opd_rl", *ANOTHER_TEACHER, "algorithm.num_generations=4", "max_steps=2", folder=tmp_path)
    assert min(series(done, "teacher/kl")) > 0.01
    assert all("reward/mean" in row and "rewards/reasoning_gym/mean" in row for row in done.metrics)
    for one, other in itertools.combinations(("train", "rollout", "teacher"), 2):
        assert overlaps(done, one, other) == 0
    assert min(series(done, "grad_norm")) > 0, "also where all rewards of a group are equal"
