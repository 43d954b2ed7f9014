"""Two ranks that share a model of transformers train as one does, and what they save is any number's to go on from."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rolegraph.models import ModelConfig
from rolegraph.models.architecture import architecture, read_config
from rolegraph.placement.memory import Sharded
from tests.models import make_checkpoint
from tests.roles.train import huggingface_workers, megatron_workers
from tests.roles.train.processes import run_together

pytestmark = pytest.mark.engine

KINDS: dict[str, dict[str, Any]] = {
    # An odd vocabulary does not divide over the ranks.
    "qwen3": {},
    "qwen3_moe": {"reduce_each_micro_batch": True, "padding_free": True},
}
ADAPTED = "qwen3_lora"
CASES = {**KINDS, ADAPTED: {"tuner_type": "lora", "lora_rank": 3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("huggingface")
    for kind in CASES:
        make_checkpoint(path / kind, kind.removesuffix("_lora"), tied=kind != "qwen3_moe")
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What both ranks of each case saw."""
    ports = [megatron_workers.free_port() for _ in CASES]
    run_together([partial(huggingface_workers.worker, folder, CASES, rank, 2, ports) for rank in range(2)])
    found = {kind: [pickle.loads((folder / f"{kind}-{rank}.pkl").read_bytes()) for rank in range(2)] for kind in CASES}
    for ranks in found.values():
        for rank, seen in enumerate(ranks):
            assert "error" not in seen, f"rank {rank}:\n{seen['error']}"
    return found


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Any]:
    return {kind: megatron_workers.reference_run(folder, kind) for kind in KINDS}


def joined(ranks: list[dict[str, Any]], table: str, column: str) -> Any:
    return pa.concat_tables([seen[table] for seen in ranks]).column(column).combine_chunks().values


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_does(kind: str, runs: Any, references: Any) -> None:
    ranks, expected = runs[kind], references[kind]
    scores = expected["first"][0].numpy()
    assert np.abs(joined(ranks, "first", "logprobs").to_numpy() - scores).max() < 1e-5
    assert np.abs(joined(ranks, "first", "entropy").to_numpy() - expected["first"][1].numpy()).max() < 1e-5
    assert np.abs(joined(ranks, "reference", "ref_logprobs").to_numpy() - scores).max() < 1e-5
    for name, limit in (("loss", 1e-4), ("grad_norm", 1e-3)):
        seen = [[metrics[name] for metrics in rank["metrics"]] for rank in ranks]
        assert seen[0] == seen[1]
        assert np.abs(np.array(seen[0]) - expected["losses" if name == "loss" else "norms"]).max() < limit
    assert np.abs(joined(ranks, "after", "logprobs").to_numpy() - expected["after"][0].numpy()).max() < 2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_teach_and_distil(kind: str, runs: Any, references: Any) -> None:
    ranks, expected = runs[kind], references[kind]
    best = expected["taught"].topk(megatron_workers.TOPK)
    logprobs = joined(ranks, "taught", "teacher_logprobs").flatten().to_numpy().reshape(-1, megatron_workers.TOPK)
    assert np.abs(logprobs - best.values.numpy()).max() < 1e-5
    found = np.array([[metrics["loss"], metrics["grad_norm"]] for metrics in ranks[0]["distilled"]])
    np.testing.assert_allclose(found, np.array(expected["distilled"]), rtol=1e-3)
    stepped = ranks[0]["stepped"]
    assert (stepped["loss"], stepped["grad_norm"]) == pytest.approx(expected["stepped"], rel=1e-3)
    # The policy of the start is the teacher: what is left is the cross-entropy's share.
    assert all(rank["own"][0]["divergence"] < 1e-6 for rank in ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_export_every_weight_under_its_name(kind: str, runs: Any, references: Any, folder: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(folder / f"export-{kind}", dtype=torch.float32).state_dict()
    for name, tensor in references[kind]["weights"].items():
        assert torch.allclose(exported[name], tensor, atol=3e-3), name
    names = [load_file(path / "model.safetensors").keys() for path in (folder / f"export-{kind}", folder / kind)]
    assert names[0] == names[1]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_goes_on_from_what_two_have_saved(kind: str, runs: Any, folder: Path) -> None:
    role = huggingface_workers.make_role(folder, kind, 0, 1, megatron_workers.free_port(), **KINDS[kind])
    role.setup()
    try:
        role.load(str(folder / f"saved-{kind}"))
        metrics = role.step(megatron_workers.training_batches()[-1], loss=megatron_workers.NLL)
    finally:
        role.teardown()
    last = runs[kind][0]["metrics"][-1]
    assert abs(metrics["loss"] - last["loss"]) < 1e-5
    assert abs(metrics["grad_norm"] - last["grad_norm"]) < 1e-4
    assert metrics["lr"] == last["lr"]


def test_two_ranks_train_adapters_as_one_does(runs: Any, folder: Path) -> None:
    """Beside frozen weights, of which no gradient is reduced."""
    port = megatron_workers.free_port()
    alone = huggingface_workers.run(folder, ADAPTED, 0, 1, port, CASES[ADAPTED])
    for name in ("loss", "grad_norm"):
        seen = [[metrics[name] for metrics in rank["metrics"]] for rank in (*runs[ADAPTED], alone)]
        assert seen[0] == seen[1]
        assert np.abs(np.array(seen[0]) - seen[2]).max() < 1e-3
    for table, column in (("first", "logprobs"), ("after", "logprobs"), ("reference", "ref_logprobs")):
        values = [joined(ranks, table, column).to_numpy() for ranks in (runs[ADAPTED], [alone])]
        assert np.abs(values[0] - values[1]).max() < 2e-3, table


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_estimate_counts_what_ranks_hold(kind: str, runs: Any, folder: Path) -> None:
    sizes = architecture(read_config(ModelConfig(path=str(folder / kind))))
    counted = Sharded(sizes, width=4, tokens=1, data=2, reference=True).state(0)
    for name in ("weights", "optimizer", "reference"):
        assert sum(rank["held"][name] for rank in runs[kind]) == 2 * counted[name]
