"""The Megatron train role on one rank: attention, config, micro-batches, losses, reference weights, weight sync."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph.errors import ConfigError, RoleGraphError
from rolegraph.interfaces import LossSpec, TransferGroup
from rolegraph.losses import projection
from tests.roles.train.megatron_workers import NLL, grouped, make_batch

pytestmark = pytest.mark.engine

Start = Callable[..., Any]


def flat(batch: Any, name: str) -> Any:
    return batch.ragged(name).values


def moments(role: Any) -> list[torch.Tensor]:
    """Adam's first moments of all weights."""
    parts = role._policy.optimizer.chained_optimizers
    return [state["exp_avg"] for part in parts for state in part.optimizer.state.values()]


# ----- attention -----


def naive_attention(query: Any, key: Any, value: Any) -> Any:
    """[s, heads, d] of one sequence, written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    future = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value).flatten(1)


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [3, 3, 7, 1, 2, 2]])
def test_packed_attention_stays_within_each_sequence(lengths: list[int]) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from roles.train.attention import SDPAttention

    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16)
    attention = SDPAttention(config, 1, AttnMaskType.causal, "self").eval()
    total = sum(lengths)
    query = torch.randn(total, 1, 4, 16, requires_grad=True)
    key, value = (torch.randn(total, 1, 2, 16, requires_grad=True) for _ in range(2))
    bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    out = attention(query, key, value, packed_seq_params=packed)[:, 0]
    parts = [t[:, 0].split(lengths) for t in (query, key, value)]
    expected = torch.cat([naive_attention(*part) for part in zip(*parts, strict=True)])
    assert torch.allclose(out, expected, atol=1e-5)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("branches", [[(4, 3, 3)], [(5,), (3, 2, 4, 1), (3, 2, 4, 1), (2,), (2,), (1, 6, 6, 6)]])
def test_responses_see_their_prompt_and_themselves(branches: list[tuple[int, ...]]) -> None:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from roles.train.attention import BranchedSeqParams, SDPAttention

    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16)
    attention = SDPAttention(config, 1, AttnMaskType.causal, "self").eval()
    total = sum(map(sum, branches))
    query = torch.randn(total, 1, 4, 16, requires_grad=True)
    key, value = (torch.randn(total, 1, 2, 16, requires_grad=True) for _ in range(2))
    bounds = torch.tensor([0, *np.cumsum([sum(sequence) for sequence in branches]).tolist()], dtype=torch.int32)
    packed = BranchedSeqParams(qkv_format="sbhd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, branches=tuple(branches))
    out = attention(query, key, value, packed_seq_params=packed)[:, 0]
    expected, at = [], 0
    for prompt, *responses in branches:
        head = range(at, at + prompt)
        at += prompt
        expected.append(naive_attention(*(t[head, 0] for t in (query, key, value))))
        for length in responses:
            rows = [*head, *range(at, at + length)]
            expected.append(naive_attention(*(t[rows, 0] for t in (query, key, value)))[prompt:])
            at += length
    wanted_out = torch.cat(expected)
    assert torch.allclose(out, wanted_out, atol=1e-5)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((wanted_out * weights).sum(), (query, key, value))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, wanted, strict=True))


def test_context_parallel_chunks_come_back_in_order() -> None:
    from roles.train import context

    tokens = torch.arange(24).view(2, 12)
    parts = [context.split(tokens, rank, 3) for rank in range(3)]
    assert parts[0][0].tolist() == [0, 1, 10, 11]
    assert torch.equal(context.merge([part.t() for part in parts]), tokens.t())


# ----- the same numbers, however rows are laid out -----


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_layout_and_micro_batches_change_nothing(start: Start, kind: str) -> None:
    seen = []
    layouts: list[dict[str, Any]] = [
        {"padding_free": True, "micro_batch_size": 8},
        {"padding_free": False, "micro_batch_size": 3},
        {"padding_free": True, "micro_batch_size": 1},
        {"padding_free": False, "max_tokens_per_micro_batch": 40},
    ]
    for layout in layouts:
        role = start(kind, **layout)
        scored = role.logprobs(make_batch(9, 0), temperature=0.8, entropy=True)
        steps = [role.step(make_batch(9, seed), loss=NLL) for seed in range(3)]
        seen.append((scored, steps))
    scored, steps = seen[0]
    assert seen[0][1][0]["micro_batches"] == 2
    assert seen[2][1][0]["micro_batches"] == 9
    assert seen[0][1][0]["padding"] == 0.0 < seen[1][1][0]["padding"]
    for other, other_steps in seen[1:]:
        assert np.abs(flat(other, "logprobs") - flat(scored, "logprobs")).max() < 1e-5
        assert np.abs(flat(other, "entropy") - flat(scored, "entropy")).max() < 1e-5
        for one, two in zip(steps, other_steps, strict=True):
            assert abs(one["loss"] - two["loss"]) < 1e-5
            assert abs(one["nll"] - two["nll"]) < 1e-5
            assert abs(one["grad_norm"] - two["grad_norm"]) < 1e-4
            assert one["longest"] == two["longest"]


def gradients(role: Any, batch: Any) -> tuple[Any, dict[str, float], dict[str, torch.Tensor]]:
    """Scores, metrics and the whole gradient of one step, from the weights at the start."""
    scored = role.logprobs(batch, temperature=0.8, entropy=True)
    metrics = role.step(batch, loss=NLL, lr=0.0)
    return scored, metrics, {name: p.main_grad.clone() for name, p in role._policy.model.named_parameters()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_shared_prompts_change_nothing(start: Start, kind: str) -> None:
    batch = grouped(make_batch(11, 5))
    layouts: list[dict[str, Any]] = [
        {"share_prompts": False, "micro_batch_size": 11},
        {"padding_free": False, "micro_batch_size": 4},
        {"micro_batch_size": 11},
        {"micro_batch_size": 2},
        {"max_tokens_per_micro_batch": 40},
    ]
    seen = []
    for layout in layouts:
        seen.append(gradients(start(kind, clip_grad=0.0, **layout), batch))
    scored, metrics, grads = seen[0]
    for other, other_metrics, other_grads in seen[1:]:
        assert np.abs(flat(other, "logprobs") - flat(scored, "logprobs")).max() < 1e-5
        assert np.abs(flat(other, "entropy") - flat(scored, "entropy")).max() < 1e-5
        assert abs(other_metrics["loss"] - metrics["loss"]) < 1e-5
        assert abs(other_metrics["grad_norm"] - metrics["grad_norm"]) < 1e-5
        for name, grad in grads.items():
            assert (other_grads[name] - grad).abs().max() < 1e-5, name
    assert seen[2][1]["padding"] == seen[3][1]["padding"] == 0.0


def test_equal_runs_are_equal_bit_for_bit(start: Start) -> None:
    runs = []
    for _ in range(2):
        role = start(deterministic=True)
        steps = [role.step(make_batch(8, seed), loss=NLL) for seed in range(3)]
        runs.append([{k: v for k, v in step.items() if k != "seconds"} for step in steps])
    assert runs[0] == runs[1]


def test_trains_in_bfloat16_with_float32_gradients(start: Start) -> None:
    exact = flat(start().logprobs(make_batch(8, 0)), "logprobs")
    role = start(dtype="bfloat16")
    assert {param.dtype for param in role._policy.model.parameters()} == {torch.bfloat16}
    assert {param.main_grad.dtype for param in role._policy.model.parameters()} == {torch.float32}
    assert 0 < np.abs(flat(role.logprobs(make_batch(8, 0)), "logprobs") - exact).max() < 0.5
    losses = [role.step(make_batch(8, 0), loss=NLL)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 1
    assert all(info.dtype == "bfloat16" for info in role.weight_manifest())


# ----- losses -----


def test_prepare_sees_the_whole_batch_and_its_columns_reach_the_loss(start: Start) -> None:
    role = start(micro_batch_size=2)
    batch = make_batch(8, 0)
    batch = batch.merge(role.logprobs(batch))
    metrics = role.step(batch, loss=LossSpec("tests.losses_for_tests.Prepared"))
    # A statistic's weight is 1 / rows, once a micro-batch of two rows: the sums over the batch are 1.
    assert metrics["weights"] == pytest.approx(1.0 / 2, abs=1e-5)
    assert metrics["shares"] == pytest.approx(1.0 / 2, abs=1e-5)


@pytest.mark.parametrize("loss", ["broken", "boundless"])
def test_a_loss_or_gradient_that_is_no_number_changes_no_weight(start: Start, loss: str) -> None:
    role = start(warmup_steps=3)
    before = {name: param.detach().clone() for name, param in role._policy.model.named_parameters()}
    metrics = role.step(make_batch(4, 0), loss=LossSpec(f"tests.losses_for_tests.{loss}"))
    assert metrics["skipped"] == 1.0
    assert role._trainer.steps == 0
    assert all(torch.equal(param, before[name]) for name, param in role._policy.model.named_parameters())
    assert role.step(make_batch(4, 0), loss=NLL)["skipped"] == 0.0
    assert not all(torch.equal(param, before[name]) for name, param in role._policy.model.named_parameters())


def test_a_loss_without_a_gradient_and_an_empty_batch_are_zero_steps(start: Start) -> None:
    role = start()
    assert role.step(make_batch(4, 0), loss=LossSpec("tests.losses_for_tests.constant"))["grad_norm"] == 0.0
    metrics = role.step(make_batch(4, 0).slice(0, 0), loss=NLL)
    assert (metrics["loss"], metrics["grad_norm"], metrics["rows"], metrics["tokens"]) == (0.0, 0.0, 0.0, 0.0)
    assert len(role.logprobs(make_batch(4, 0).slice(0, 0))) == 0


# ----- optimizer -----


def test_schedule_override_and_reset(start: Start) -> None:
    role = start(lr=0.1, lr_schedule="linear", warmup_steps=1, decay_steps=5, min_lr=0.01)
    batch = make_batch(4, 0)
    rates = [role.step(batch, loss=NLL, lr=lr)["lr"] for lr in (None, None, 0.5, None)]
    assert rates == pytest.approx([0.05, 0.1, 0.5, 0.055])
    assert any(moment.abs().sum() > 0 for moment in moments(role))
    role.reset_optimizer()
    assert all(moment.abs().sum() == 0 for moment in moments(role))
    assert role.step(batch, loss=NLL)["lr"] == pytest.approx(0.05)


def test_clipping_limits_the_step_to_the_norm(start: Start) -> None:
    norms = {}
    for clip in (0.0, 0.25):
        role = start(clip_grad=clip)
        reported = role.step(make_batch(8, 0), loss=NLL)["grad_norm"]
        # Adam's first moment after one step is 0.1 of the clipped gradient.
        norms[clip] = float(torch.stack([moment.norm() for moment in moments(role)]).norm()) * 10
        assert reported > 1.0
    assert norms[0.0] == pytest.approx(reported, rel=1e-4)
    assert norms[0.25] == pytest.approx(0.25, rel=1e-4)


# ----- reference weights -----


def test_reference_weights_stay_while_the_policy_moves(start: Start) -> None:
    role = start()
    batch = make_batch(8, 0)
    with pytest.raises(RoleGraphError, match=r"train\.reference=initial"):
        role.logprobs(batch, reference=True)
    role.step(batch, loss=NLL)
    role.save_reference()
    kept = flat(role.logprobs(batch), "logprobs").copy()
    role.step(batch, loss=NLL)
    now = role.logprobs(batch)
    scored = role.logprobs(batch.merge(now), reference=True)
    assert np.array_equal(flat(scored, "ref_logprobs"), kept)
    assert np.abs(flat(now, "logprobs") - kept).max() > 1e-2
    gaps = (flat(now, "logprobs").astype(np.float64) - kept) * flat(batch, "response_mask")
    bounds = batch.ragged("response_ids").offsets
    expected = [gaps[a:b].sum() for a, b in itertools.pairwise(bounds)]
    assert np.allclose(scored.numpy("ref_kl"), expected, atol=1e-6)
    assert scored.numpy("ref_kl").dtype == np.float64
    # The policy's own weights are back.
    assert np.array_equal(flat(role.logprobs(batch), "logprobs"), flat(now, "logprobs"))


# ----- weights on their way out -----


def test_sends_what_the_manifest_says(start: Start) -> None:
    from rolegraph.wire import WeightReceiver

    role = start()
    role.step(make_batch(8, 0), loss=NLL)
    host, port = role.rendezvous()
    group = TransferGroup("gloo", host, port, 2, {0: 1}, 30.0)
    received: dict[str, torch.Tensor] = {}

    def receive() -> None:
        receiver = WeightReceiver(group, 1)
        for name, tensor in receiver.receive(role.weight_manifest()):
            received[name] = tensor.clone()
        receiver.close()

    thread = threading.Thread(target=receive)
    thread.start()
    role.connect_weights(group)
    assert role.send_weights(10_000) > 0
    thread.join(timeout=30)
    role.disconnect_weights()
    assert list(received) == [info.name for info in role.weight_manifest()]
    assert "lm_head.weight" not in received
    for name, tensor in role._export.tensors():
        assert torch.equal(received[name], tensor)


def test_sending_without_a_connection_says_so_and_a_role_that_has_ended_keeps_no_buffer(start: Start) -> None:
    role = start()
    with pytest.raises(RoleGraphError, match="connect_weights"):
        role.send_weights(1000)
    role.step(make_batch(4, 0), loss=NLL)
    assert projection._spares
    role.teardown()
    assert not projection._spares


# ----- what is refused -----


def test_refuses_to_share_prompts_with_transformer_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from roles.train import bridge

    monkeypatch.setattr(bridge, "HAVE_TE", True)
    with pytest.raises(ConfigError, match="share_prompts=true is for installations without Transformer Engine"):
        start(share_prompts=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"megatron": {"attention_dropot": 0.1}}, "train.megatron.attention_dropot .* nearest is attention_dropout"),
        ({"megatron": {"adam_beta_1": 0.1}}, "nearest is adam_beta1"),
        ({"megatron": {"tensor_model_parallel_size": 2}}, "use train.tensor_model_parallel_size"),
        ({"megatron": {"lr": 2}}, "use train.lr"),
        ({"megatron": {"exp_avg_dtype": "float33"}}, "no torch dtype"),
        ({"context_parallel_size": 2}, "needs Transformer Engine"),
        ({"expert_model_parallel_size": 2}, "has no experts"),
        (
            {"tensor_model_parallel_size": 3},
            "num_attention_heads=4 does not divide by train.tensor",
        ),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": False, "padding_free": True}, "asks for sequence_para"),
        ({"share_prompts": True, "padding_free": False}, "train.share_prompts=true needs packed rows"),
        ({"micro_batch_size": 0}, "train.micro_batch_size=0 must be 1 or more"),
    ],
)
def test_refuses(start: Start, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**settings)


def test_refuses_an_architecture_it_does_not_have(start: Start, folder: Path) -> None:
    (folder / "gpt2").mkdir(exist_ok=True)
    (folder / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="'gpt2'; it has llama, qwen2, qwen3, qwen3_moe"):
        start("gpt2")


def test_megatron_fields_reach_model_and_optimizer(start: Start) -> None:
    role = start(megatron={"layernorm_epsilon": 0.5, "log_num_zeros_in_grad": True})
    assert role._policy.model.decoder.final_layernorm.eps == 0.5
    assert role._policy.optimizer.config.log_num_zeros_in_grad is True


def test_a_precision_aware_optimizer_keeps_gradients_apart_and_weights_among_its_moments(start: Start) -> None:
    """As Transformer Engine's does: clipping reaches its gradients, and a reset leaves its float32 weights."""
    role = start()
    role.step(make_batch(6, 0), loss=NLL)
    learner = role._trainer.passes
    for part in learner._parts():
        for param in part.get_parameters():
            param.grad, param.decoupled_grad = None, torch.ones_like(param)
        for main, state in part.optimizer.state.items():
            state["master_param"] = main.detach().clone() + 1
    learner.scale_gradients(0.25)
    learner.reset()
    for part in learner._parts():
        assert all((param.decoupled_grad == 0.25).all() for param in part.get_parameters())
        for main, state in part.optimizer.state.items():
            assert torch.equal(state["master_param"], main + 1)
            assert not state["exp_avg"].any()
        for param in part.get_parameters():
            param.decoupled_grad = None
    learner.scale_gradients(0.25)  # a stage without gradients of its own


def test_the_shim_leaves_torch_alone() -> None:
    from megatron.core import parallel_state

    assert parallel_state.torch is not torch
    assert parallel_state.torch.cuda.current_device() == torch.device("cpu")
    assert not isinstance(torch.cuda.current_device, type(parallel_state.torch.cuda.current_device))
    assert torch.compile.__module__ == "torch"


def test_the_shim_is_off_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from roles.train import shim

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not shim.needed()
    with shim.quick_import():
        assert torch.compile.__module__ == "torch"
