"""Running a model over micro-batches: how rows are cut, how Megatron's schedule is called, what each stage gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
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

from rolegraph.batch import Batch
from rolegraph.losses.projection import operands, precision, project
from roles.train import bridge as bridges
from roles.train import context
from roles.train.attention import BranchedSeqParams
from roles.train.config import MegatronModelConfig
from roles.train.metrics import gather_counts
from roles.train.microbatch import activation_bytes, plan_microbatches, tokens_that_fit
from roles.train.model import Model
from roles.train.packing import MicroBatch, collate, response_tokens, shared_prompts
from roles.train.scoring import Shard, TokenScores, score_tokens
from roles.train.teaching import score_columns, seen_by_teacher


class Plan(NamedTuple):
    """How this rank works through its rows; every data-parallel rank has as many micro-batches."""

    rows: list[list[int]]
    tokens: float
    """Trained response tokens of the whole global batch."""
    samples: float
    """Rows of the global batch with such a token."""
    all_rows: int


class Forward:
    """Passes of a `Model` over a rank's rows; every rank of the mesh takes part in each."""

    def __init__(self, config: MegatronModelConfig, model: Model) -> None:
        self.config = config
        self.computes = model
        self._data_group = parallel_state.get_data_parallel_group()
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._stage_group = parallel_state.get_pipeline_model_parallel_group()
        self._last_stage = parallel_state.is_pipeline_last_stage()
        self._sequence_parallel = config.uses_sequence_parallel
        self._context_group = parallel_state.get_context_parallel_group()
        self._multiple_of = config.tensor_model_parallel_size if self._sequence_parallel else 1
        if self._context_group.size() > 1:
            self._multiple_of *= 2 * self._context_group.size()
        self._share_prompts = config.wants_shared_prompts and not bridges.HAVE_TE
        self._token_bytes = activation_bytes(model.bridge.config, model.dtype.itemsize)
        self._tokens = self._slots = 0

    def _predicting(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """[tokens, h] the states that predict each response token, from those of all positions, [seq, batch, h]."""
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

    @torch.no_grad()
    def teach(self, batch: Batch, *, topk: int, hidden: bool, temperature: float) -> Batch:
        """The columns of `TeacherRole.score` for this rank's rows, from the weights the model has now."""
        rows = seen_by_teacher(batch, self.computes.bridge.vocab_size)
        plan = self._plan(rows)
        self.computes.runs.eval()
        finish = partial(self._teach, topk=topk, hidden=hidden, temperature=temperature)
        scores: list[TokenScores] = self._run(rows, plan, finish, forward_only=True)
        scores = self._on_every_stage(lambda: scores)
        return score_columns(rows, list(zip(plan.rows, scores, strict=True)))

    def _teach(
        self, micro: MicroBatch, states: Tensor, *, topk: int, hidden: bool, temperature: float
    ) -> tuple[Tensor, TokenScores]:
        states = self._predicting(micro, states)
        head, vocab_size = self.computes.model.head(), self.computes.bridge.vocab_size
        first = len(head) * self._tensor_group.rank()
        shard = Shard(
            columns=min(max(vocab_size - first, 0), len(head)),
            first=first,
            group=self._tensor_group if self._tensor_group.size() > 1 else None,
        )
        scores = score_tokens(
            states,
            partial(_logits, head),
            micro.labels,
            shard,
            topk=topk,
            keep_hidden=hidden,
            temperature=temperature,
        )
        return states.new_zeros(()), scores.cpu()

    @torch.no_grad()
    def whole_head(self) -> Tensor:
        """[padded vocabulary, h] the output weight, gathered over tensor-parallel ranks, on every rank."""
        if self._last_stage:
            own = self.computes.model.head().contiguous()
            parts = [torch.empty_like(own) for _ in range(self._tensor_group.size())]
            dist.all_gather(parts, own, group=self._tensor_group)
            whole = torch.cat(parts)
        return self._on_every_stage(lambda: whole.cpu())

    def _plan(self, batch: Batch) -> Plan:
        """Cut this rank's rows; the ranks agree on totals and on the number of micro-batches."""
        config = self.config
        lengths = np.diff(batch.ragged("prompt_ids").offsets) + np.diff(batch.ragged("response_ids").offsets)
        rows_per, tokens_per = config.micro_batch_size, config.max_tokens_per_micro_batch
        if rows_per is None and tokens_per is None:
            tokens_per = tokens_that_fit(int(lengths.max(initial=1)), self._token_bytes, self._multiple_of)
        cut = partial(
            plan_microbatches,
            lengths.tolist(),
            rows_per=rows_per,
            tokens_per=tokens_per,
            padding_free=config.uses_padding_free,
            multiple_of=self._multiple_of,
            shared=shared_prompts(batch).tolist() if self._share_prompts else None,
        )
        rows = cut()
        tokens, samples = response_tokens(batch).totals() if len(batch) else (0.0, 0.0)
        counts = gather_counts([tokens, samples, len(batch), len(rows)], self._data_group, self.computes.device)
        most = max(int(counts[:, 3].max()), 1)
        if len(rows) != most:
            rows = cut(count=most)
        all_tokens, all_samples, all_rows, _ = counts.sum(0).tolist()
        return Plan(rows, all_tokens, all_samples, int(all_rows))

    def _run(
        self,
        batch: Batch,
        plan: Plan,
        finish: Callable[[MicroBatch, Tensor], tuple[Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; what `finish` returned for each, on the last stage."""
        micro_batches = self._micro_batches(batch, plan)

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
            model=self.computes.runs,
            num_microbatches=len(plan.rows),
            # Stages tell each other the shapes; these two only have to be there.
            seq_length=self._multiple_of,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results

    def _micro_batches(self, batch: Batch, plan: Plan) -> Iterator[MicroBatch]:
        self._tokens = self._slots = 0
        for rows in plan.rows:
            micro = collate(
                batch,
                rows,
                padding_free=self.config.uses_padding_free,
                share_prompts=self._share_prompts,
                multiple_of=self._multiple_of,
            )
            self._slots += micro.input_ids.numel()
            self._tokens += micro.tokens
            yield micro.to(self.computes.device)

    def _hidden(self, model: torch.nn.Module, micro: MicroBatch) -> Tensor:
        """[seq, batch, hidden] of this stage."""
        kwargs: dict[str, Any] = {"packed_seq_params": self._packed(micro)}
        if self.computes.dtype != torch.float32:
            kwargs["fp32_output"] = False
        rank, ranks = self._context_group.rank(), self._context_group.size()
        output: Tensor = model(
            input_ids=context.split(micro.input_ids, rank, ranks),
            position_ids=context.split(micro.position_ids, rank, ranks),
            attention_mask=None,
            **kwargs,
        )
        return output

    def _packed(self, micro: MicroBatch) -> PackedSeqParams | None:
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

    def _on_every_stage(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on the last pipeline stage, on all stages."""
        value = make() if self._last_stage else None
        if self._stage_group.size() == 1:
            return value
        box = [value]
        last = dist.get_global_rank(self._stage_group, self._stage_group.size() - 1)
        dist.broadcast_object_list(box, src=last, group=self._stage_group)
        return box[0]


def _logits(head: Tensor, states: Tensor) -> Tensor:
    """[tokens, rows of the head] in float32."""
    states, matrix = operands(states, head)
    return project(states, matrix, states.new_empty(len(states), len(matrix), dtype=precision(states)))
