"""What a role of one rank does with adapters: the rest stays, and everything it is asked for works beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rolegraph.errors import ConfigError
from roles.train.adapter import first_a
from tests.roles.train.megatron_workers import NLL, grouped, make_batch

Start = Callable[..., Any]
LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8.0}
BATCHES = [grouped(make_batch(8, seed)) for seed in range(3)]


def logprobs(role: Any, **kwargs: Any) -> Any:
    column = "ref_logprobs" if kwargs.get("reference") else "logprobs"
    return role.logprobs(BATCHES[0], **kwargs).table.column(column).combine_chunks().values.to_numpy()


def taught(role: Any, weights: str) -> Any:
    scored = role.teach(BATCHES[0], weights=weights).table.column("teacher_token_logprobs")
    return scored.combine_chunks().values.to_numpy()


def test_first_values_depend_on_seed_and_module_alone() -> None:
    a = first_a(3, "model.layers.0.self_attn.q_proj", 4, 16)
    assert torch.equal(a, first_a(3, "model.layers.0.self_attn.q_proj", 4, 16))
    assert not torch.equal(a, first_a(4, "model.layers.0.self_attn.q_proj", 4, 16))
    assert not torch.equal(a, first_a(3, "model.layers.1.self_attn.q_proj", 4, 16))
    assert 0.2 < float(a.abs().max()) <= 0.25, "1 / sqrt(16) bounds it"


@pytest.mark.engine
def test_weights_stay_and_checkpoints_go_on_bit_for_bit(start: Start, tmp_path: Path) -> None:
    role = start(**LORA, weight_decay=0.1)
    names = {name for name, _ in role._policy.model.named_parameters()} - role._policy.trained.keys()
    before = {name: role._policy.model.get_parameter(name).clone() for name in names}
    role.step(BATCHES[0], loss=NLL)
    role.average_weights(0.5)
    role.step(BATCHES[1], loss=NLL)
    role.average_weights(0.5)
    assert all(torch.equal(role._policy.model.get_parameter(name), value) for name, value in before.items())
    now, average = logprobs(role), taught(role, "average")
    assert np.abs(now - average).max() > 1e-3
    assert np.array_equal(taught(role, "initial"), logprobs(role, reference=True))
    role.save(str(tmp_path))
    followed = [role.step(batch, loss=NLL)["loss"] for batch in BATCHES]
    role.finish_save()
    keys = [key for key in FileSystemReader(tmp_path).read_metadata().state_dict_metadata if not key.startswith("rng")]
    assert keys
    assert all(".lora_" in key for key in keys), "the weights beside them are in the model's folder"

    role = start(**LORA, weight_decay=0.1, seed=99)
    role.load(str(tmp_path))
    assert np.array_equal(logprobs(role), now)
    assert np.array_equal(taught(role, "average"), average)
    assert [role.step(batch, loss=NLL)["loss"] for batch in BATCHES] == followed


@pytest.mark.engine
def test_recomputed_layers_have_the_same_gradients(start: Start) -> None:
    """Without a gradient of the frozen embedding, recomputation would leave adapters out."""
    seen = []
    for megatron in (
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ):
        role = start(**LORA, megatron=megatron)
        seen.append([role.step(batch, loss=NLL) for batch in BATCHES])
    for plain, recomputed in zip(*seen, strict=True):
        assert abs(plain["loss"] - recomputed["loss"]) < 1e-6
        assert abs(plain["grad_norm"] - recomputed["grad_norm"]) < 1e-5


@pytest.mark.engine
def test_bfloat16_trains_and_merges_in_its_type(start: Start) -> None:
    role = start(**LORA, dtype="bfloat16")
    losses = [role.step(BATCHES[0], loss=NLL)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.1
    weights = dict(role._export.tensors())
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}
    assert [info.name for info in role.weight_manifest()] == list(weights)


@pytest.mark.engine
def test_refusals(start: Start) -> None:
    with pytest.raises(ConfigError, match="qwen3_moe has experts, which have no adapters here"):
        start("qwen3_moe", **LORA)
    role = start()
    assert role.adapter_info() is None
    with pytest.raises(ConfigError, match=r"there is no adapter alone: set train.tuner_type=lora"):
        role.weight_manifest(adapter=True)
