"""Megatron's schedule over micro-batches: what each stage and shard gets, and the step of its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from rolegraph.interfaces import PolicyWeights
from rolegraph.losses.heads import Head
from roles.train import bridge as bridges
from roles.train import context
from roles.train.attention import BranchedSeqParams
from roles.train.config import MegatronModelConfig
from roles.train.microbatch import activation_bytes
from roles.train.model import Model, Policy
from roles.train.packing import MicroBatch
from roles.train.passes import Finish, Layout, Learner, Passes

MASTER = "master_param"
"""Where a precision-aware optimizer keeps the float32 weights, among its moments."""


class MegatronPasses(Passes):
    """A `Model` on a mesh of ranks."""

    def __init__(self, config: MegatronModelConfig, model: Model) -> None:
        self._model = model
        self.device, self.dtype, self.vocab_size = model.device, model.dtype, model.bridge.vocab_size
        self.data_group = parallel_state.get_data_parallel_group()
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.vocab_group = self._tensor_group if self._tensor_group.size() > 1 else None
        self._context_group = parallel_state.get_context_parallel_group()
        # Context-parallel ranks each compute the whole loss.
        self.loss_copies = self._context_group.size()
        self._stage_group = parallel_state.get_pipeline_model_parallel_group()
        self.last_stage = parallel_state.is_pipeline_last_stage()
        self._sequence_parallel = config.uses_sequence_parallel
        multiple_of = config.tensor_model_parallel_size if self._sequence_parallel else 1
        if self._context_group.size() > 1:
            multiple_of *= 2 * self._context_group.size()
        self.layout = Layout(
            padding_free=config.uses_padding_free,
            share_prompts=config.wants_shared_prompts and not bridges.HAVE_TE,
            multiple_of=multiple_of,
            token_bytes=activation_bytes(model.bridge.config, model.dtype.itemsize),
        )

    def run(self, micro_batches: Iterator[MicroBatch], count: int, finish: Finish, *, train: bool) -> list[Any]:
        """See `Passes.run`."""
        self._model.runs.train(train)
        if train:
            self._zero_gradients()

        def forward(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            micro = next(iterator)
            return self._hidden(model, micro), partial(end, micro)

        def end(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, result = finish(micro, hidden)
            # Megatron divides by a token count only if told to; the loss has its denominators already.
            return loss, torch.zeros((), dtype=torch.int, device=hidden.device), result

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=micro_batches,
            model=self._model.runs,
            num_microbatches=count,
            # Stages tell each other the shapes; these two only have to be there.
            seq_length=self.layout.multiple_of,
            micro_batch_size=1,
            forward_only=not train,
        )
        return results

    def predicting(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """See `Passes.predicting`; `hidden` is [seq, batch, h] of all positions."""
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        hidden = context.join(hidden, self._context_group)
        batch, seq = micro.input_ids.shape
        # `predict` counts along rows of [batch, seq]; the hidden states are [seq, batch].
        index = micro.predict if batch == 1 else micro.predict % seq * batch + micro.predict // seq
        selected = hidden.reshape(seq * batch, -1).index_select(0, index)
        if self._tensor_group.size() > 1 and not self._sequence_parallel:
            # Each rank's share of the vocabulary gives a part of the gradient: the backward adds them up.
            selected = copy_to_tensor_model_parallel_region(selected)
        return selected

    def head(self) -> Head:
        """See `Passes.head`."""
        return Head(self._model.model.head())

    def on_every_stage(self, make: Callable[[], Any]) -> Any:
        """See `Passes.on_every_stage`."""
        value = make() if self.last_stage else None
        if self._stage_group.size() == 1:
            return value
        box = [value]
        last = dist.get_global_rank(self._stage_group, self._stage_group.size() - 1)
        dist.broadcast_object_list(box, src=last, group=self._stage_group)
        return box[0]

    def _zero_gradients(self) -> None:
        """A model that is only read has none."""

    def _hidden(self, model: torch.nn.Module, micro: MicroBatch) -> Tensor:
        """[seq, batch, hidden] of this stage."""
        kwargs: dict[str, Any] = {"packed_seq_params": _packed(micro)}
        if self.dtype != torch.float32:
            kwargs["fp32_output"] = False
        rank, ranks = self._context_group.rank(), self._context_group.size()
        output: Tensor = model(
            input_ids=context.split(micro.input_ids, rank, ranks),
            position_ids=context.split(micro.position_ids, rank, ranks),
            attention_mask=None,
            **kwargs,
        )
        return output


class MegatronLearner(MegatronPasses, Learner):
    """A `Policy` on a mesh of ranks."""

    def __init__(self, config: MegatronModelConfig, policy: Policy) -> None:
        super().__init__(config, policy)
        self._policy = policy

    def head_of(self, weights: PolicyWeights) -> Head:
        """See `Learner.head_of`."""
        return Head(self._policy.head_of(weights))

    def gradient_norm(self) -> float:
        """See `Learner.gradient_norm`."""
        self._policy.optimizer.prepare_grads()
        return float(self._policy.optimizer.get_grad_norm() or 0.0)

    def scale_gradients(self, factor: float) -> None:
        """See `Learner.scale_gradients`."""
        found = [_gradient(param) for part in self._parts() for param in part.get_parameters()]
        if grads := [grad for grad in found if grad is not None]:
            torch._foreach_mul_(grads, factor)

    def apply(self, rate: float) -> None:
        """See `Learner.apply`."""
        for group in self._policy.optimizer.param_groups:
            group["lr"] = rate
        self._policy.optimizer.step_with_ready_grads()

    def reset(self) -> None:
        """See `Learner.reset`."""
        for part in self._parts():
            if part.optimizer is None:
                continue
            for state in part.optimizer.state.values():
                for name, value in state.items():
                    if torch.is_tensor(value) and name != MASTER:
                        value.zero_()
            for group in part.optimizer.param_groups:
                # Transformer Engine's AdamW counts its steps here.
                group.pop("step", None)

    def _zero_gradients(self) -> None:
        self._policy.runs.zero_grad_buffer()
        self._policy.optimizer.zero_grad()

    def _parts(self) -> list[Any]:
        optimizer = self._policy.optimizer
        return cast(list[Any], getattr(optimizer, "chained_optimizers", [optimizer]))


def _gradient(param: Any) -> Tensor | None:
    """What the optimizer steps by: a precision-aware one has gradients of another type than the weights, apart."""
    decoupled: Tensor | None = getattr(param, "decoupled_grad", None)
    return param.grad if decoupled is None else decoupled


def _packed(micro: MicroBatch) -> PackedSeqParams | None:
    if micro.cu_seqlens is None:
        return None
    lengths: dict[str, Any] = {
        "cu_seqlens_q": micro.cu_seqlens,
        "cu_seqlens_kv": micro.cu_seqlens,
        "max_seqlen_q": micro.max_seqlen,
        "max_seqlen_kv": micro.max_seqlen,
    }
    if bridges.HAVE_TE:
        return PackedSeqParams(qkv_format="thd", **lengths)
    return BranchedSeqParams(qkv_format="sbhd", branches=micro.branches, **lengths)
