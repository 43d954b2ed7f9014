"""The ready layouts with reward models in `examples/layouts`: planned for GPUs, and run on a CPU with tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolegraph.config import load
from rolegraph.placement import plan, requests
from rolegraph.placement.clusters import cluster
from rolegraph.telemetry.timeline import spans
from tests.models import make_reward_model
from tests.runs import Finished, run

LAYOUTS = Path(__file__).parents[1] / "examples" / "layouts"
NAMES = ("grpo_reward_models", "sampling_colocate", "sampling_groups")

TINY = (
    *("model=tiny", "model.path=null", "data.size=40", "algorithm.max_completion_length=8"),
    *("prm.token='<|tool|>'", 'prm.step_separator="1"'),
)
SAMPLING = (
    *("algorithm.num_return_sequences=4", "algorithm.num_sampling_batch_size=8"),
    # As many rows in a pass, whoever else is there: the last bits of a score follow from it.
    *("prm.max_tokens_per_micro_batch=1", "orm.max_tokens_per_micro_batch=1"),
)


def gpus(name: str, nodes: str, *overrides: str) -> dict[str, list[tuple[int, ...]]]:
    """The devices of each role's ranks."""
    run = load([f"experiment={name}", *overrides], config_dir=str(LAYOUTS)).run
    placed = plan(cluster(nodes), requests(run.roles), run.placement)
    return {role: [slot.device_ids for slot in slots] for role, slots in placed.roles.items()}


def test_groups_of_devices_are_planned_as_they_are_written() -> None:
    rewards = [(2,), (3,)]
    assert gpus("sampling_groups", "1x4xH100-80G") == {"sampler": [(0,), (1,)], "prm": rewards, "orm": rewards}


def test_all_share_what_there_is() -> None:
    everything = [(gpu,) for gpu in range(4)]
    found = gpus("sampling_colocate", "1x4xH100-80G")
    assert found == {"sampler": everything, "prm": everything, "orm": everything}


def test_reward_models_have_devices_beside_those_of_training() -> None:
    found = gpus("grpo_reward_models", "1x8xH100-80G")
    assert found["train"] == found["rollout"] == [(gpu,) for gpu in range(6)]
    assert found["prm"] == found["orm_rm"] == [(6,), (7,)]
    assert found["orm"] == [()], "functions take none"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A reward model of each kind, by role."""
    heads: dict[str, tuple[str, dict[str, Any]]] = {
        "prm": ("TokenClassification", {}),
        "orm": ("SequenceClassification", {"num_labels": 1}),
    }
    return {
        role: make_reward_model(tmp_path_factory.mktemp(role), head, **more) for role, (head, more) in heads.items()
    }


def run_layout(name: str, models: dict[str, str], *overrides: str, folder: Path) -> Finished:
    rewards = ("prm", "orm_rm" if name.startswith("grpo") else "orm")
    given = [f"{role}.model={models[role.partition('_')[0]]}" for role in rewards]
    return run("--config-dir", str(LAYOUTS), f"experiment={name}", *TINY, *given, *overrides, folder=folder)


def kept(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.folder / "kept.jsonl").read_text().splitlines()]


def overlapping(done: Finished, one: str, other: str) -> bool:
    """Whether calls of two roles ran at the same time."""
    calls = spans(done.folder / "timeline.json")
    first, second = ([call for call in calls if call["role"] == role] for role in (one, other))
    return any(a["start"] < b["end"] and b["start"] < a["end"] for a in first for b in second)


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_sampling_keeps_the_same_wherever_its_roles_are(models: dict[str, str], tmp_path: Path) -> None:
    on_cpus = [f"placement.device_groups.{group}.device=CPU" for group in ("sample_group", "rm_group")]
    processes = ["placement.device_groups.sample_group.ranks=2", "placement.device_groups.rm_group.ranks=2"]
    apart = run_layout("sampling_groups", models, *SAMPLING, *on_cpus, *processes, folder=tmp_path / "apart")
    one_each = ["sampler.replicas=1", "prm.replicas=1", "orm.replicas=1"]
    together = run_layout("sampling_colocate", models, *SAMPLING, *one_each, folder=tmp_path / "together")
    assert kept(apart), "some candidates pass"
    assert kept(apart) == kept(together)
    assert overlapping(apart, "sampler", "prm"), "earlier candidates are scored while later ones are drawn"
    for pair in (("sampler", "prm"), ("sampler", "orm"), ("prm", "orm")):
        assert not overlapping(together, *pair), pair
    assert not overlapping(apart, "prm", "orm"), "they share their devices"


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_training_with_reward_models(models: dict[str, str], tmp_path: Path) -> None:
    small = ["algorithm.global_batch_size=32", "algorithm.num_generations=4", "max_steps=2"]
    one_each = ["train.ranks=1", "rollout.replicas=1", "prm.replicas=1", "orm_rm.replicas=1"]
    done = run_layout("grpo_reward_models", models, *small, *one_each, folder=tmp_path)
    assert [row["step"] for row in done.metrics] == [1, 2]
    for row in done.metrics:
        assert 0 < row["scores/prm/mean"] < 1, "a probability"
        assert row["scores/orm_rm/mean"] == pytest.approx(row["rewards/orm_rm/classifier/mean"])
        assert row["grad_norm"] > 0
    assert not overlapping(done, "prm", "orm_rm"), "they share their devices"
    assert done.held_bytes == 0
