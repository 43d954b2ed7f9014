"""Whole runs with the real engines, as a user starts them."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.runs import SMALL, Finished, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EXACT = (
    "algorithm=grpo",
    "model=tiny",
    "deterministic=true",
    "max_steps=4",
    "algorithm.num_iterations=2",
    "algorithm.beta=0.5",
    "rollout.dtype=float32",  # as the trainer, also where the CPU multiplies bfloat16
    "train.lr=3e-3",
    "algorithm.warm_start={max_steps: 20, lr: 3e-3}",
    "logger.samples_every=1",
    *SMALL,
)
"""A run whose losses are not zero: the second pass over a generation is off-policy, and a reference pulls."""


AWAKE = ("placement.sleep_level=0", "placement.offload_model=false", "placement.offload_optimizer=false")
ASLEEP = ("placement.sleep_level=2", "placement.offload_model=true", "placement.offload_optimizer=true")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(*EXACT, *AWAKE, folder=tmp_path_factory.mktemp("one_rank"))


def test_two_runs_with_one_seed_agree_bit_for_bit_whoever_sleeps_meanwhile(one_rank: Finished, tmp_path: Path) -> None:
    again = run(*EXACT, *ASLEEP, folder=tmp_path)
    assert again.figures == one_rank.figures
    assert len(again.figures) == 24
    turns = [[row["step"] for row in done.metrics if "seconds/turns" in row] for done in (one_rank, again)]
    assert turns == [[], [1, 21, 23]], "in the first step of the warm start and of each generation"


def test_tensor_parallel_training_on_devices_of_its_own_gives_the_same_losses(
    one_rank: Finished, tmp_path: Path
) -> None:
    layout = ("placement=separate", "rollout.replicas=2", "train.ranks=2", "train.tensor_model_parallel_size=2")
    split = run(*EXACT, *layout, folder=tmp_path)
    for ours, theirs in zip(split.figures, one_rank.figures, strict=True):
        compared = {"loss", "entropy", "grad_norm", "kl"} & theirs.keys()
        assert {"loss", "grad_norm"} <= compared
        for key in compared:
            assert ours[key] == pytest.approx(theirs[key], abs=1e-4, rel=1e-3), (ours["step"], key)
    assert any(abs(row["loss"]) > 1e-3 for row in split.figures if row["stage"] == "grpo"), "losses worth comparing"


def test_engine_and_trainer_agree_on_every_sampled_token(one_rank: Finished) -> None:
    differences = [row["rollout_logprob_difference/max"] for row in one_rank.metrics if row["stage"] == "grpo"]
    fresh = [value for value in differences if value is not None]
    assert len(fresh) == 4
    assert max(fresh) < 1e-4


def test_the_driver_holds_no_token_and_no_tensor(one_rank: Finished) -> None:
    assert one_rank.held_bytes == 0
    assert one_rank.output.rstrip().endswith("False"), "torch was imported in the driver"


def test_a_run_leaves_what_it_did(one_rank: Finished) -> None:
    config = yaml.safe_load((one_rank.folder / "config.yaml").read_text())
    assert config["algorithm"]["num_iterations"] == 2
    assert config["train"]["weight_decay"] is not None, "defaults are filled in"
    assert (one_rank.folder / "report.html").exists()
    assert {path.name for path in one_rank.folder.glob("logs/*.log")} == {"train-0.log", "rollout-0.log", "orm-0.log"}
    assert "Where to look" in one_rank.output


def test_samples_are_saved_with_their_tokens_and_rewards(one_rank: Finished) -> None:
    # A generation feeds two steps; its samples are saved once, under the first.
    assert {path.name for path in one_rank.folder.glob("samples/*")} == {"step-21.parquet", "step-23.parquet"}
    rows = pq.read_table(one_rank.folder / "samples" / "step-21.parquet").to_pylist()
    assert len({(row["uid"], row["repeat"]) for row in rows}) == len(rows) == 32
    for row in rows:
        assert len(row["response_ids"]) == len(row["rollout_logprobs"]) == row["response_length"]
        assert row["rewards/reasoning_gym"] is not None
        assert isinstance(row["response_text"], str)


@pytest.mark.parametrize("algorithm", ["sft", "pt"])
def test_supervised_training_learns(algorithm: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "one and {n % 3} are {1 + n % 3}"}}\n' for n in range(60)))
    data = () if algorithm == "sft" else ("data=jsonl", f"data.path={texts}")
    small = ("model=tiny", "max_steps=12", "algorithm.global_batch_size=16", "train.lr=3e-3", "use_ray=false")
    done = run(f"algorithm={algorithm}", *small, *data, folder=tmp_path / "run")
    losses = [row["loss"] for row in done.metrics]
    assert len(losses) == 12
    assert losses[-1] < 0.7 * losses[0]


def test_a_run_joins_the_cluster_that_is_there_and_leaves_it_running(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    small = ("algorithm=sft", "model=tiny", "max_steps=1", "algorithm.global_batch_size=8", "placement.device=cpu")
    run(*small, "ray_exp_name=joined", folder=tmp_path)
    actors = [name for name in ray.util.list_named_actors(all_namespaces=True) if "joined" in name["name"]]
    assert actors == [], "its actors are gone"
    deadline = time.monotonic() + 10
    while ray.available_resources()["CPU"] < 4 and time.monotonic() < deadline:
        time.sleep(0.2)  # the cluster hears of it a moment later
    assert ray.cluster_resources()["CPU"] == ray.available_resources()["CPU"] == 4, "and so are its reservations"
