"""The formulas of the memory estimate, against counting by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolegraph.models.architecture import Architecture
from rolegraph.placement.memory import HEAD_BUDGET, Copy, Engine, Sharded, Trainer

GIB = 2**30
SMALL = Architecture("qwen3", 100, 8, 12, 4, 4, 2, 2, tie_word_embeddings=True, qk_norm=True)
"""Hidden 8, MLP 12, 4 layers, 4 heads (2 for keys) of 2."""
BIG = Architecture("llama", 128_256, 8192, 28_672, 80, 64, 8, 128, tie_word_embeddings=False)
"""Llama 3 70B."""
EXPERTS = replace(SMALL, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2)
# A layer by hand: q and o of 8 x 8, k and v of 8 x 4, gate, up and down of 8 x 12; norms of 8, 8, 2 and 2.
MATRICES = 64 + 64 + 32 + 32 + 3 * 96
NORMS = 8 + 8 + 2 + 2


def test_parameters_by_hand() -> None:
    assert SMALL.parameters == 100 * 8 + 8 + 4 * (MATRICES + NORMS)
    assert BIG.parameters == 70_553_706_496, "as counted of the checkpoint"
    assert Trainer(SMALL, 4, 1).parameters(0) == (SMALL.parameters, 0)


def test_parameters_of_tensor_and_pipeline_ranks() -> None:
    trainer = Trainer(SMALL, 4, 1, tensor=2, pipeline=2, vocabulary_multiple=256)
    layers = 2 * (MATRICES // 2 + NORMS)
    assert trainer.padded_vocabulary == 256
    assert trainer.parameters(0) == (layers + 128 * 8, 0)
    # The head is tied, and its stage holds a copy.
    assert trainer.parameters(1) == (layers + 8 + 128 * 8, 0)
    untied = replace(trainer, model=replace(SMALL, tie_word_embeddings=False), pipeline=1)
    assert untied.parameters(0) == (2 * layers + 8 + 2 * 128 * 8, 0)


def test_experts_are_spread_and_their_optimizer_too() -> None:
    trainer = Trainer(EXPERTS, 2, 1, expert=2, data=4)
    dense, experts = trainer.parameters(0)
    assert experts == 4 * 2 * 3 * 96
    assert dense == 100 * 8 + 8 + 4 * (64 + 64 + 32 + 32 + NORMS + 4 * 8)
    assert trainer.state(0)["optimizer"] == 12 * dense // 4 + 12 * experts // 2


@pytest.mark.parametrize(
    ("changes", "optimizer"),
    [
        ({"width": 4}, 8),
        ({"width": 2}, 12),
        ({"width": 2, "data": 4}, 3),
        ({"width": 2, "data": 2, "context": 2}, 3),
        ({"width": 2, "data": 4, "distributed_optimizer": False}, 12),
    ],
)
def test_state_of_a_trainer(changes: dict[str, int], optimizer: int) -> None:
    trainer = replace(Trainer(SMALL, 4, 1, reference=True), **changes)
    each, width = SMALL.parameters, trainer.width
    assert trainer.state(0) == {
        "weights": width * each,
        "gradients": 4 * each,
        "optimizer": optimizer * each,
        "reference": width * each,
    }
    assert "reference" not in replace(trainer, reference=False).state(0)


def test_adapters_are_all_that_is_trained() -> None:
    # Rank 3: q is 8 x 8, v 8 x 4, down 12 x 8; two ranks share the side that is not the hidden size.
    trainer = Trainer(
        SMALL,
        2,
        1,
        tensor=2,
        data=4,
        reference=True,
        average=True,
        adapter_rank=3,
        adapter_targets=("q_proj", "v_proj", "down_proj"),
    )
    adapters = 4 * 3 * ((8 + 4) + (8 + 2) + (8 + 6))
    assert trainer.adapter_parameters() == adapters
    assert trainer.state(0) == {
        "weights": 2 * (sum(trainer.parameters(0)) + adapters),
        "gradients": 4 * adapters,
        "optimizer": 12 * adapters // 4,
        "average": 4 * adapters,
    }


def test_ranks_that_share_all_hold_frozen_weights_as_they_compute_with_them() -> None:
    trainer = Sharded(SMALL, 2, 1, data=2, adapter_rank=3, adapter_targets=("all-linear",))
    adapters = trainer.adapter_parameters()
    assert trainer.state(0)["weights"] == (2 * SMALL.parameters + 4 * adapters) // 2
    assert replace(trainer, adapter_rank=0).state(0)["weights"] == 4 * SMALL.parameters // 2
    # Experts have no adapters, nor what is beside them: 3 (in + out) of q, k, v and o in each of the layers.
    experts = replace(trainer, model=EXPERTS)
    assert experts.adapter_parameters() == EXPERTS.num_hidden_layers * 3 * (4 * 8 + 8 + 4 + 4 + 8)


def test_activations_by_hand() -> None:
    trainer = Trainer(SMALL, 4, tokens=10)
    layer = 4 * 8 + (8 + 4 + 4) + 8 + (8 + 4) + 3 * 12
    assert trainer.layer() == layer
    logits = 4 * 10 * 100
    assert trainer.activations(0) == 4 * 10 * (4 * layer + 2 * layer + 2 * 8) + logits
    assert trainer.activations(0, backward=False) == 4 * 10 * (2 * layer + 2 * 8) + logits
    assert replace(trainer, recompute=True).activations(0) == 4 * 10 * (4 * 8 + 2 * layer + 2 * 8) + logits


def test_what_divides_activations() -> None:
    trainer = Trainer(BIG, 2, tokens=8192, tensor=8, sequence_parallel=True)
    whole = Trainer(BIG, 2, tokens=8192)
    assert trainer.layer() == whole.layer() / 8
    # Without sequence parallelism norms and their results are on every rank.
    assert replace(trainer, sequence_parallel=False).layer() == trainer.layer() + 4 * 8192 * 7 / 8
    assert whole.activations(0) - HEAD_BUDGET == 2 * (replace(whole, context=2).activations(0) - HEAD_BUDGET)
    first = replace(trainer, pipeline=4, micro_batches=16)
    # In 1F1B the first stage has four micro-batches in flight, the last one.
    kept = [first.activations(stage) for stage in range(4)]
    assert kept[0] > kept[1] > kept[2] > kept[3] - HEAD_BUDGET
    assert first.activations(0) == pytest.approx(trainer.activations(0) - HEAD_BUDGET, rel=1e-3)
    assert replace(first, micro_batches=1).activations(0) < kept[0] / 3
    assert first.largest_stage() == 0


def test_experts_keep_what_they_get() -> None:
    dense = 4 * 8 + (8 + 4 + 4) + 8 + (8 + 4)
    assert Trainer(EXPERTS, 4, 1).layer() == dense + 2 * (8 + 3 * 12)


def test_an_engine_fills_its_share() -> None:
    engine = Engine(BIG, 2, max_len=8192, max_seqs=64, batch_tokens=8192, tensor=8, share_bytes=72 * GIB)
    assert engine.weights() == pytest.approx(2 * BIG.parameters / 8, rel=1e-3)
    # 2 x 2 bytes x 80 layers x 1 head of 128: 40 KiB a token.
    assert engine.sequence() == 40 * 1024 * 8192
    parts = engine.parts()
    assert sum(parts.values()) == 72 * GIB
    assert replace(engine, share_bytes=None).parts()["kv_cache"] == 64 * engine.sequence()
    assert replace(engine, cache_bytes=5 * GIB).parts()["kv_cache"] == 5 * GIB
    assert replace(engine, share_bytes=10 * GIB).parts()["kv_cache"] == 0
    # With more ranks than key heads each rank has a copy of one.
    assert replace(engine, tensor=16).sequence() == engine.sequence()


def test_a_copy_is_cut_by_layers_only() -> None:
    parts = Copy(SMALL, 2, tokens=10, pipeline=2).parts()
    assert parts["weights"] == SMALL.parameters
    assert parts["activations"] == Trainer(SMALL, 2, 10).activations(0, backward=False)
