"""Adapters train as PEFT trains them, however the model is spread: one spawn of processes, many cases."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph.models import ModelConfig
from rolegraph.models.architecture import architecture, read_config
from rolegraph.placement.memory import Trainer
from roles.train.config import MegatronTrainConfig
from tests.models import make_checkpoint
from tests.roles.train import lora_workers as workers
from tests.roles.train.megatron_workers import Case, free_port
from tests.roles.train.processes import run_together, seen_by_ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SOME = {"lora_targets": ["q_proj", "v_proj", "up_proj", "o_proj"]}
ROUNDS: list[list[tuple[Case, int]]] = [
    # (case, first of its process slots): the cases of a round run side by side.
    [(Case("tp2-sp", "qwen3", tp=2), 0), (Case("pp2-tied", "qwen3-tied", pp=2), 2)],
    [
        (Case("tp2-padded", "qwen2", tp=2, config={"sequence_parallel": False, "padding_free": False} | SOME), 0),
        (Case("dp2", "llama", dp=2), 2),
    ],
]
CASES = [case for cases in ROUNDS for case, _ in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    for case in CASES:
        kind, _, tied = case.kind.partition("-")
        if not (path / case.kind).exists():
            make_checkpoint(path / case.kind, kind, tied=bool(tied))
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every case saw."""
    ports = [[free_port() for _ in cases] for cases in ROUNDS]
    run_together([partial(workers.worker, slot, ROUNDS, ports, folder) for slot in range(4)])
    return {case.name: seen_by_ranks(folder, case) for case in CASES}


@pytest.fixture(scope="module")
def references(folder: Path) -> Any:
    @functools.lru_cache
    def run(kind: str, targets: tuple[str, ...]) -> dict[str, Any]:
        return workers.reference_run(folder, kind, **({"lora_targets": list(targets)} if targets else {}))

    return lambda case: run(case.kind, tuple(case.config.get("lora_targets", ())))


def _joined(ranks: list[dict[str, Any]], key: str, column: str = "logprobs") -> Any:
    """[tokens] over the data-parallel ranks; those of one must agree."""
    parts: dict[int, Any] = {}
    for seen in ranks:
        values = np.concatenate([np.asarray(row) for row in seen[key][column].to_pylist()])
        assert np.array_equal(parts.setdefault(seen["mesh"].dp_rank, values), values)
    return np.concatenate([parts[rank] for rank in sorted(parts)])


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_trains_as_peft_does(case: Case, runs: Any, references: Any) -> None:
    ranks, reference = runs[case.name], references(case)
    for rank, seen in enumerate(ranks):
        assert "error" not in seen, f"rank {rank}:\n{seen.get('error')}"
    first = ranks[0]
    assert np.abs(_joined(ranks, "first") - reference["first"].numpy()).max() < 1e-5
    losses = np.array([metrics["loss"] for metrics in first["metrics"]])
    norms = np.array([metrics["grad_norm"] for metrics in first["metrics"]])
    assert np.abs(losses - reference["losses"]).max() < 1e-5
    assert np.abs(norms - reference["norms"]).max() < 1e-5
    assert np.abs(_joined(ranks, "after") - reference["after"].numpy()).max() < 1e-4
    assert np.abs(_joined(ranks, "after") - _joined(ranks, "first")).max() > 0.1


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_reference_is_the_model_without_adapters(case: Case, runs: Any) -> None:
    ranks = runs[case.name]
    assert np.array_equal(_joined(ranks, "reference", "ref_logprobs"), _joined(ranks, "first"))
    assert np.array_equal(_joined(ranks, "again"), _joined(ranks, "after"))
    assert np.array_equal(_joined(ranks, "saved", "ref_logprobs"), _joined(ranks, "again"))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_memory_estimate_counts_what_ranks_hold(case: Case, runs: Any, folder: Path) -> None:
    sizes = architecture(read_config(ModelConfig(path=str(folder / case.kind))))
    adapter = MegatronTrainConfig(**workers.LORA | case.config).adapter
    assert adapter is not None
    estimated = Trainer(
        sizes,
        width=4,
        tokens=1,
        tensor=case.tp,
        pipeline=case.pp,
        data=case.dp,
        vocabulary_multiple=case.tp,
        reference=True,
        adapter_rank=adapter.rank,
        adapter_targets=adapter.targets,
    )
    seen = [rank["held"] for rank in runs[case.name]]
    counts = [estimated.state(rank["mesh"].pp_rank) for rank in runs[case.name]]
    for held, counted in zip(seen, counts, strict=True):
        assert held["weights"] == counted["weights"]
        assert held["reference"] == counted.get("reference", 0) == 0
        assert counted["gradients"] <= held["gradients"] <= counted["gradients"] * 1.02 + 4096
    assert sum(held["optimizer"] for held in seen) == sum(counted["optimizer"] for counted in counts)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_files_give_the_logprobs_of_the_trainer(case: Case, runs: Any, references: Any, folder: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    ranks = runs[case.name]
    out, wanted = folder / f"export-{case.name}", _joined(ranks, "after")
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder / case.kind, dtype=torch.float32)
    for model in (merged, peft.PeftModel.from_pretrained(base, out / "adapter")):
        with torch.no_grad():
            logprobs = workers._hf_logprobs(model, workers.batches()[0], 1.0)[0]
        assert np.abs(logprobs.numpy() - wanted).max() < 1e-4
    announced = {info.name: tuple(info.shape) for info in ranks[0]["manifest"]}
    assert announced == {name: tuple(tensor.shape) for name, tensor in ranks[0]["sent"].items()}
    assert announced == references(case)["sizes"]
