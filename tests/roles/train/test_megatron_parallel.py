"""Every kind of parallelism trains as plain transformers does: one spawn of processes, many cases."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rolegraph.models import ModelConfig
from rolegraph.models.architecture import architecture, read_config
from rolegraph.placement.memory import Trainer
from tests.models import make_checkpoint
from tests.roles.train import megatron_workers as workers
from tests.roles.train.megatron_workers import Case
from tests.roles.train.processes import run_together, seen_by_ranks

pytestmark = pytest.mark.engine

ROUNDS: list[list[tuple[Case, int]]] = [
    # (case, first of its process slots): the cases of a round run side by side.
    [
        (Case("tp2-sp-packed", "qwen3", tp=2), 0),
        (Case("pp2-tied-packed", "qwen3-tied", pp=2), 2),
    ],
    [
        (Case("tp2-padded", "llama-tied", tp=2, config={"sequence_parallel": False, "padding_free": False}), 0),
        (Case("dp2", "llama-tied", dp=2, config={"padding_free": False}), 2),
    ],
    [
        (Case("dp2-replicated-optimizer", "qwen2", dp=2, config={"use_distributed_optimizer": False}), 0),
        (Case("ep2", "qwen3_moe", dp=2, config={"expert_model_parallel_size": 2}), 2),
    ],
    [
        (Case("tp2-ep2", "qwen3_moe", tp=2, config={"expert_model_parallel_size": 2}), 0),
        (
            Case(
                "token-budget-dp2", "qwen3", dp=2, config={"micro_batch_size": None, "max_tokens_per_micro_batch": 24}
            ),
            2,
        ),
    ],
    [(Case("tp2-pp2-sp-tied-packed", "qwen3-tied", tp=2, pp=2), 0)],
    [(Case("dp2-pp2-padded", "qwen2", dp=2, pp=2, config={"padding_free": False}), 0)],
]
CASES = [case for cases in ROUNDS for case, _ in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron")
    for case in CASES:
        kind, _, tied = case.kind.partition("-")
        if not (path / case.kind).exists():
            make_checkpoint(path / case.kind, kind, tied=bool(tied))
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every case saw."""
    ports = [[workers.free_port() for _ in cases] for cases in ROUNDS]
    run_together([partial(workers.worker, slot, ROUNDS, ports, folder) for slot in range(4)])
    return {case.name: seen_by_ranks(folder, case) for case in CASES}


@pytest.fixture(scope="module")
def references(folder: Path) -> Any:
    import functools

    return functools.lru_cache(partial(workers.reference_run, folder))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_trains_as_transformers_does(case: Case, runs: Any, references: Any) -> None:
    ranks = runs[case.name]
    for rank, seen in enumerate(ranks):
        assert "error" not in seen, f"rank {rank}:\n{seen.get('error')}"
    reference = references(case.kind)
    first = ranks[0]

    assert np.abs(_joined(ranks, "first", "logprobs") - reference["first"][0].numpy()).max() < 1e-5
    assert np.abs(_joined(ranks, "first", "entropy") - reference["first"][1].numpy()).max() < 1e-5
    assert np.abs(_joined(ranks, "reference", "ref_logprobs") - reference["first"][0].numpy()).max() < 1e-5
    losses = np.array([metrics["loss"] for metrics in first["metrics"]])
    norms = np.array([metrics["grad_norm"] for metrics in first["metrics"]])
    assert np.abs(losses - reference["losses"]).max() < 1e-4
    assert np.abs(norms - reference["norms"]).max() < 1e-3
    # Adam's first steps divide by the gradient's own size: rounding of near-zero gradients shows in the weights.
    assert np.abs(_joined(ranks, "after", "logprobs") - reference["after"][0].numpy()).max() < 2e-3


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_teaches_what_transformers_says(case: Case, runs: Any, references: Any) -> None:
    """Top-K over vocabulary shards, and hidden states from the last stage with the head gathered over the shards."""
    ranks, table = runs[case.name], references(case.kind)["taught"]
    best = table.topk(workers.TOPK)
    ids, logprobs = (
        _flat(ranks, "taught", f"teacher_{name}").reshape(-1, workers.TOPK) for name in ("ids", "logprobs")
    )
    assert np.abs(logprobs - best.values.numpy()).max() < 1e-5
    assert (ids == best.indices.numpy()).mean() > 0.99, "ties may fall either way"
    hidden = torch.from_numpy(_flat(ranks, "taught", "teacher_hidden").reshape(len(table), -1).copy())
    head = ranks[0]["head"][: table.shape[1]]
    assert torch.allclose(torch.log_softmax(hidden @ head.T / 0.7, -1), table, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_distils_as_whole_logits_would(case: Case, runs: Any, references: Any) -> None:
    """Loss and gradient, over the whole vocabulary and over top-K, from a teacher of another width."""
    expected = np.array(references(case.kind)["distilled"])
    found = np.array([[metrics["loss"], metrics["grad_norm"]] for metrics in runs[case.name][0]["distilled"]])
    assert np.abs(found[:, 0] - expected[:, 0]).max() < 1e-5
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=1e-3)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_rewards_of_steps_count_over_groups_that_lie_on_several_ranks(case: Case, runs: Any, references: Any) -> None:
    metrics = runs[case.name][0]["stepped"]
    assert (metrics["loss"], metrics["grad_norm"]) == pytest.approx(references(case.kind)["stepped"], rel=1e-3)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_ranks_agree_and_count_globally(case: Case, runs: Any) -> None:
    ranks = runs[case.name]
    batches = workers.training_batches()
    for step, batch in enumerate(batches):
        seen = [{k: v for k, v in rank["metrics"][step].items() if k != "seconds"} for rank in ranks]
        assert all(metrics == seen[0] for metrics in seen)
        assert seen[0]["rows"] == len(batch)
        assert seen[0]["tokens"] == batch.ragged("response_mask").values.sum()
        assert 0.0 <= seen[0]["padding"] < 1.0
    assert ranks[0]["metrics"][3]["loss"] == 0.0
    assert ranks[0]["metrics"][3]["grad_norm"] == 0.0


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_memory_estimate_counts_what_ranks_hold(case: Case, runs: Any, folder: Path) -> None:
    sizes = architecture(read_config(ModelConfig(path=str(folder / case.kind))))
    estimated = Trainer(
        sizes,
        width=4,
        tokens=1,
        tensor=case.tp,
        pipeline=case.pp,
        data=case.dp,
        expert=case.config.get("expert_model_parallel_size", 1),
        vocabulary_multiple=case.tp,
        distributed_optimizer=case.config.get("use_distributed_optimizer", True),
        reference=True,
    )
    seen = [rank["held"] for rank in runs[case.name]]
    expected = [estimated.state(rank["mesh"].pp_rank) for rank in runs[case.name]]
    for held, counted in zip(seen, expected, strict=True):
        assert held["weights"] == counted["weights"]
        assert held["reference"] == counted["reference"]
        # Buffers are filled up so that they divide over the data-parallel ranks.
        assert counted["gradients"] <= held["gradients"] <= counted["gradients"] * 1.02 + 4096
    # Each rank's part may end a few parameters sooner or later; together they hold all of it once.
    assert sum(held["optimizer"] for held in seen) == sum(counted["optimizer"] for counted in expected)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_exports_every_weight_under_its_name(case: Case, runs: Any, references: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = references(case.kind)["weights"]
    first = runs[case.name][0]
    exported = AutoModelForCausalLM.from_pretrained(folder / f"export-{case.name}", dtype=torch.float32).state_dict()
    assert (folder / f"export-{case.name}" / "tokenizer_config.json").exists()
    assert exported.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(exported[name], tensor, atol=3e-3), name
    assert [info.name for info in first["manifest"]] == list(first["sent"])
    for info in first["manifest"]:
        assert info.shape == tuple(first["sent"][info.name].shape)
    assert ("lm_head.weight" in first["sent"]) == ("tied" not in case.kind)


def _joined(ranks: list[dict[str, Any]], table: str, column: str) -> Any:
    """A per-token column of all data-parallel ranks, as the group collects it: from tp = pp = 0."""
    return _values(ranks, table, column).to_numpy()


def _flat(ranks: list[dict[str, Any]], table: str, column: str) -> Any:
    """The same of a column with several entries a token."""
    return _values(ranks, table, column).flatten().to_numpy()


def _values(ranks: list[dict[str, Any]], table: str, column: str) -> Any:
    tables = [seen[table] for seen in sorted(ranks, key=lambda seen: seen["mesh"].dp_rank) if _speaks(seen["mesh"])]
    return pa.concat_tables(tables).column(column).combine_chunks().values


def _speaks(mesh: Any) -> bool:
    return mesh.tp_rank == 0 and mesh.pp_rank == 0
