"""The policy as its own teacher: which weights teach, what becomes of its own, and the head its states go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph.errors import RoleGraphError
from rolegraph.interfaces import LossSpec
from tests.roles.train.megatron_workers import NLL, make_batch

pytestmark = pytest.mark.engine

Start = Callable[..., Any]
DISTILL = LossSpec("rolegraph.losses.distill.DistillLoss", {"beta": 0.0})


def weights_of(role: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().float().clone() for name, param in role._policy.model.named_parameters()}


def logprobs(batch: Any) -> Any:
    return batch.ragged("teacher_token_logprobs").values.copy()


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "float32"), ("qwen3_moe", "float32"), ("qwen3", "bfloat16")])
def test_the_average_follows_each_step_and_teaches(start: Start, kind: str, dtype: str) -> None:
    role, batch = start(kind, dtype=dtype), make_batch(6, 0)
    role.average_weights(0.75)
    expected = weights_of(role)
    for _ in range(3):
        role.step(batch, loss=NLL)
        role.average_weights(0.75)
        expected = {name: 0.75 * expected[name] + 0.25 * now for name, now in weights_of(role).items()}
    kept = role._policy.average
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    for name, tensor in expected.items():
        torch.testing.assert_close(kept[name], tensor, rtol=1e-5, atol=1e-6)

    memory = {name: param.data_ptr() for name, param in role._policy.model.named_parameters()}
    of_average = logprobs(role.teach(batch, weights="average"))
    of_now = logprobs(role.teach(batch, weights="current"))
    assert np.abs(of_average - of_now).max() > 1e-2
    assert {name: param.data_ptr() for name, param in role._policy.model.named_parameters()} == memory
    with torch.no_grad():
        for name, param in role._policy.model.named_parameters():
            param.copy_(kept[name])
    assert np.array_equal(logprobs(role.teach(batch, weights="current")), of_average)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["current", "initial", "average"])
def test_states_go_through_the_head_of_the_weights_they_are_of(start: Start, weights: Any, dtype: str) -> None:
    role, batch = start(dtype=dtype, reference="initial", micro_batch_size=2), make_batch(6, 1)
    role.use_teacher_head(weights)
    role.average_weights(0.9)
    for _ in range(2):
        role.step(batch, loss=NLL)
        role.average_weights(0.9)
    scored = batch.merge(role.teach(batch, weights=weights, hidden=True, topk=4, temperature=0.8))
    whole = role.step(scored, loss=DISTILL, temperature=0.8, lr=0.0)
    if weights == "current":
        assert abs(whole["loss"]) < 1e-5, "a teacher equal to the student"
    else:
        assert whole["loss"] > 1e-2
    kept = role._policy.head_of(weights)
    with role._policy.holding(weights):
        assert torch.equal(kept, role._policy.model.head())
    assert not kept.requires_grad
    # Entropy, divergence and all else of the whole vocabulary agree with what the top-K tell of the likeliest token.
    tail = LossSpec("rolegraph.losses.distill.DistillLoss", {"beta": 0.0, "topk_mode": "tail"})
    told = role.step(scored.drop(["teacher_hidden"]), loss=tail, temperature=0.8, lr=0.0)
    assert told["loss"] <= whole["loss"] + (1e-5 if dtype == "float32" else 2e-2), "bins tell no more than tokens do"
    assert (told["loss"] > 1e-2) == (weights != "current")


def test_weights_that_are_not_kept_are_named(start: Start) -> None:
    role, batch = start(), make_batch(4, 0)
    with pytest.raises(RoleGraphError, match=r"train\.reference=initial"):
        role.teach(batch, weights="initial")
    with pytest.raises(RoleGraphError, match=r"average_weights\(\) first"):
        role.teach(batch, weights="average")
    states = batch.merge(role.teach(batch, weights="current", hidden=True))
    with pytest.raises(RoleGraphError, match=r"use_teacher_head\(\)"):
        role.step(states, loss=DISTILL)
