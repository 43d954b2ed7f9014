"""Checkpoints of one layout of ranks, taken up by the same and by others: one pair of processes, many layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import make_checkpoint
from tests.roles.train import checkpoint_workers as workers
from tests.roles.train.checkpoint_workers import Layout
from tests.roles.train.megatron_workers import free_port
from tests.roles.train.processes import run_together, seen_by_ranks

pytestmark = pytest.mark.engine

EP2 = {"expert_model_parallel_size": 2}
REPLICATED = {"use_distributed_optimizer": False}
LORA = {"tuner_type": "lora", "lora_rank": 4}
BF16 = {"dtype": "bfloat16"}
LAYOUTS = [
    Layout("tp2", "qwen3-tied", tp=2, fails=True),
    Layout("tp2-again", "qwen3-tied", tp=2, loads="tp2"),
    Layout("tp2-as-tp1", "qwen3-tied", loads="tp2"),
    Layout("tp2-as-pp2", "qwen3-tied", pp=2, loads="tp2"),
    Layout("tp2-as-dp2", "qwen3-tied", dp=2, loads="tp2"),
    Layout("tp2-as-dp2-replicated", "qwen3-tied", dp=2, config=REPLICATED, loads="tp2"),
    Layout("dp2", "qwen3", dp=2),
    Layout("dp2-again", "qwen3", dp=2, loads="dp2"),
    Layout("dp2-as-pp2", "qwen3", pp=2, loads="dp2"),
    Layout("dp2-bf16", "qwen3", dp=2, config=BF16),
    Layout("dp2-bf16-again", "qwen3", dp=2, config=BF16, loads="dp2-bf16"),
    Layout("ep2", "qwen3_moe", dp=2, config=EP2),
    Layout("ep2-again", "qwen3_moe", dp=2, config=EP2, loads="ep2"),
    Layout("ep2-as-one", "qwen3_moe", loads="ep2"),
    Layout("lora-tp2", "qwen3", tp=2, config=LORA),
    Layout("lora-tp2-again", "qwen3", tp=2, config=LORA, loads="lora-tp2"),
    Layout("lora-tp2-as-pp2", "qwen3", pp=2, config=LORA, loads="lora-tp2"),
]
LOADED = [layout for layout in LAYOUTS if layout.loads is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    for kind in {layout.kind for layout in LAYOUTS}:
        make_checkpoint(path / kind, kind.removesuffix("-tied"), tied=kind.endswith("-tied"))
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every layout saw."""
    ports = [free_port() for _ in LAYOUTS]
    run_together([partial(workers.worker, rank, LAYOUTS, ports, folder) for rank in range(2)])
    seen = {layout.name: seen_by_ranks(folder, layout) for layout in LAYOUTS}
    for name, ranks in seen.items():
        for rank, each in enumerate(ranks):
            assert "error" not in each, f"{name}, rank {rank}:\n{each.get('error')}"
    return seen


@pytest.mark.parametrize("layout", LOADED, ids=[layout.name for layout in LOADED])
def test_goes_on_as_if_nothing_had_happened(layout: Layout, runs: Any) -> None:
    """Weights, reference and average, and the steps that follow: the same numbers, to rounding in another layout."""
    before, after = runs[str(layout.loads)], runs[layout.name]
    atol = 0.0 if layout.name.endswith("-again") else 1e-5
    for name in ("current", "reference", "average"):
        np.testing.assert_allclose(_scores(after, name), _scores(before, name), rtol=0, atol=atol, err_msg=name)
    found, expected = (np.array(runs_of[0]["steps"]) for runs_of in (after, before))
    assert np.abs(found[:, 0] - expected[:, 0]).max() <= atol, "loss"
    assert np.abs(found[:, 2] - expected[:, 2]).max() == 0, "learning rate"
    # Adam divides near-zero gradients by their own size: their rounding is in the next step's norm.
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=0 if atol == 0 else 1e-3, err_msg="gradient norm")


def test_a_rank_that_cannot_write_is_named_on_all(runs: Any, folder: Path) -> None:
    """And what is saved next is whole: all the other tests load it."""
    first, second = (each["fault"] for each in runs["tp2"])
    assert "rank 1: File too large" in first
    assert first == second
    assert not (folder / "tp2-failed" / ".metadata").exists()
    assert not (folder / "tp2-failed" / "metadata.json").exists()


def test_ranks_share_the_writing(runs: Any, folder: Path) -> None:
    sizes = [(folder / "dp2" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert min(sizes) > 0.3 * sum(sizes)


def _scores(ranks: list[dict[str, Any]], name: str) -> Any:
    speaking = [each for each in ranks if each["mesh"].tp_rank == each["mesh"].pp_rank == 0]
    return np.concatenate([values for each in speaking for values in each["scores"][name]])
