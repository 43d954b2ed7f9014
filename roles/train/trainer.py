"""Forward and backward over micro-batches, and the optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
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
from rolegraph.losses.types import Loss, LossOutput, Stat, TokenBatch, Totals
from roles.train import bridge as bridges
from roles.train import context
from roles.train.attention import BranchedSeqParams
from roles.train.config import MegatronTrainConfig
from roles.train.logprob import linear_logprobs
from roles.train.metrics import gather_counts, reduce_over, reduce_stats
from roles.train.microbatch import plan_microbatches
from roles.train.model import Policy
from roles.train.packing import MicroBatch, collate, per_token_column, response_tokens, shared_prompts
from roles.train.schedule import learning_rate

FloatArray = npt.NDArray[np.float32]


class Plan(NamedTuple):
    """How this rank works through its rows; every data-parallel rank has as many micro-batches."""

    rows: list[list[int]]
    tokens: float
    """Trained response tokens of the whole global batch."""
    samples: float
    """Rows of the global batch with such a token."""
    all_rows: int


class Scores(NamedTuple):
    """[tokens] of one micro-batch, on the CPU."""

    logprobs: FloatArray
    entropy: FloatArray | None


class Trainer:
    """Steps a `Policy`, and scores with it."""

    def __init__(self, config: MegatronTrainConfig, policy: Policy) -> None:
        self.config = config
        self.policy = policy
        self.steps = 0
        """Optimizer steps taken since the start or the last reset."""
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
        self._tokens = self._slots = 0

    # ----- training -----

    def step(self, batch: Batch, loss: Loss, *, temperature: float, lr: float | None) -> dict[str, float]:
        """One optimizer step on this rank's part of the global batch; global metrics on every rank."""
        started = time.perf_counter()
        policy = self.policy
        plan = self._plan(batch)
        device = policy.device
        totals = Totals(
            tokens=torch.tensor(plan.tokens, dtype=torch.float32, device=device),
            rows=torch.tensor(plan.samples, dtype=torch.float32, device=device),
        )
        if self._last_stage:
            batch = self._prepare(batch, loss, totals)
        policy.ddp.train()
        policy.ddp.zero_grad_buffer()
        policy.optimizer.zero_grad()
        # Every rank has as many micro-batches, so that these weights add up to 1 and the metric is the plain sum.
        share = torch.tensor(1.0 / (len(plan.rows) * self._data_group.size()), dtype=torch.float64, device=device)
        finish = partial(self._loss, loss=loss, temperature=temperature, totals=totals, share=share)
        stats = self._run(batch, plan, finish, forward_only=False)
        rate = self._rate() if lr is None else lr
        grad_norm, skipped = self._update(rate)
        metrics: dict[str, float] = self._on_every_stage(lambda: reduce_stats(stats, self._data_group, device))
        metrics |= {
            "grad_norm": grad_norm,
            "lr": rate,
            "tokens": plan.tokens,
            "rows": float(plan.all_rows),
            "micro_batches": float(len(plan.rows)),
            "padding": self._padding(),
            "skipped": float(skipped),
            "seconds": time.perf_counter() - started,
        }
        return metrics

    def reset(self) -> None:
        """Forget moments and the place in the schedule."""
        self.steps = 0
        for part in getattr(self.policy.optimizer, "chained_optimizers", [self.policy.optimizer]):
            if part.optimizer is None:
                continue
            for state in part.optimizer.state.values():
                for value in state.values():
                    if torch.is_tensor(value):
                        value.zero_()
            for group in part.optimizer.param_groups:
                # Transformer Engine's AdamW counts its steps here.
                group.pop("step", None)

    def _rate(self) -> float:
        config = self.config
        return learning_rate(
            self.steps,
            lr=config.lr,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
            min_lr=config.min_lr,
        )

    def _update(self, rate: float) -> tuple[float, bool]:
        """Clip and step; returns the gradient norm before clipping, and whether the step was left out.

        A norm that is not finite would make every weight so: that step is skipped on all ranks alike.
        """
        optimizer = self.policy.optimizer
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm() or 0.0)
        if not math.isfinite(norm):
            return norm, True
        for group in optimizer.param_groups:
            group["lr"] = rate
        limit = self.config.clip_grad
        if limit > 0 and norm > limit:
            grads = [
                param.grad
                for part in getattr(optimizer, "chained_optimizers", [optimizer])
                for param in part.get_parameters()
                if param.grad is not None
            ]
            torch._foreach_mul_(grads, limit / (norm + 1e-6))
        optimizer.step_with_ready_grads()
        self.steps += 1
        return norm, False

    @torch.no_grad()
    def _prepare(self, batch: Batch, loss: Loss, totals: Totals) -> Batch:
        """Run the loss's `prepare` hook over all rows of this rank; its columns join the batch."""
        prepare: Callable[..., Mapping[str, Tensor]] | None = getattr(loss, "prepare", None)
        if prepare is None:
            return batch
        response = response_tokens(batch)
        old = response.columns.get("logprobs", response.columns.get("rollout_logprobs"))
        tokens = TokenBatch(
            logprobs=torch.zeros(len(response.labels)) if old is None else old,
            mask=response.mask,
            row=response.row,
            rows=response.rows,
            columns=response.columns,
            totals=totals,
        )
        tokens = _to_device(tokens, self.policy.device)
        columns = prepare(tokens, reduce_over(self._data_group))
        lengths = batch.ragged("response_ids").offsets
        return batch.with_columns({name: _as_column(name, value, lengths) for name, value in columns.items()})

    def _loss(
        self, micro: MicroBatch, hidden: Tensor, *, loss: Loss, temperature: float, totals: Totals, share: Tensor
    ) -> tuple[Tensor, Mapping[str, Stat]]:
        anchor = hidden.reshape(-1)[:0].sum()
        if micro.rows == 0:
            # Without rows the pass still has to reach every collective of the backward.
            return anchor, {"loss": Stat(anchor.detach(), share)}
        logprobs, entropy = self._score(micro, hidden, temperature, bool(getattr(loss, "needs_entropy", False)))
        output: LossOutput = loss(
            TokenBatch(
                logprobs=logprobs,
                mask=micro.mask,
                row=micro.row,
                rows=micro.rows,
                columns=micro.columns,
                totals=totals,
                entropy=entropy,
            )
        )
        stats = {"loss": Stat(output.loss.detach(), share), **output.stats}
        # Context-parallel ranks each compute the whole loss, and their gradients are added up.
        value = output.loss / self._context_group.size()
        return value if value.requires_grad else value + anchor, stats

    # ----- scoring -----

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, temperature: float, entropy: bool) -> dict[str, pa.ListArray]:
        """Columns `logprobs` and, where asked, `entropy` of this rank's rows, from the weights the model has now."""
        plan = self._plan(batch)
        self.policy.ddp.eval()
        finish = partial(self._scores, temperature=temperature, entropy=entropy)
        scores = self._run(batch, plan, finish, forward_only=True)
        scores = self._on_every_stage(lambda: scores)
        parts = list(zip(plan.rows, scores, strict=True))
        columns = {"logprobs": per_token_column(batch, [(rows, score.logprobs) for rows, score in parts])}
        if entropy:
            columns["entropy"] = per_token_column(batch, [(rows, score.entropy) for rows, score in parts])
        return columns

    def _scores(self, micro: MicroBatch, hidden: Tensor, *, temperature: float, entropy: bool) -> tuple[Tensor, Scores]:
        logprobs, entropies = self._score(micro, hidden, temperature, entropy)
        scores = Scores(logprobs.float().cpu().numpy(), None if entropies is None else entropies.float().cpu().numpy())
        return hidden.new_zeros(()), scores

    def _score(
        self, micro: MicroBatch, hidden: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (and entropies) of the response tokens, [tokens], from hidden states [seq, batch, h]."""
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
        return linear_logprobs(
            selected,
            self.policy.model.head(),
            micro.labels,
            temperature=temperature,
            vocab_size=self.policy.bridge.vocab_size,
            group=self._tensor_group if self._tensor_group.size() > 1 else None,
            entropy=entropy,
        )

    # ----- micro-batches -----

    def _plan(self, batch: Batch) -> Plan:
        """Cut this rank's rows; the ranks agree on totals and on the number of micro-batches."""
        config = self.config
        lengths = np.diff(batch.ragged("prompt_ids").offsets) + np.diff(batch.ragged("response_ids").offsets)
        cut = partial(
            plan_microbatches,
            lengths.tolist(),
            rows_per=config.rows_per_micro_batch,
            tokens_per=config.max_tokens_per_micro_batch,
            padding_free=config.uses_padding_free,
            multiple_of=self._multiple_of,
            shared=shared_prompts(batch).tolist() if self._share_prompts else None,
        )
        rows = cut()
        tokens, samples = response_tokens(batch).totals() if len(batch) else (0.0, 0.0)
        counts = gather_counts([tokens, samples, len(batch), len(rows)], self._data_group, self.policy.device)
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
            model=self.policy.ddp,
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
            yield micro.to(self.policy.device)

    def _padding(self) -> float:
        """Share of the slots this step that held no token, over all data-parallel ranks."""
        counts = gather_counts([self._tokens, self._slots], self._data_group, self.policy.device).sum(0)
        return 1.0 - float(counts[0]) / float(counts[1])

    def _hidden(self, model: torch.nn.Module, micro: MicroBatch) -> Tensor:
        """[seq, batch, hidden] of this stage."""
        kwargs: dict[str, Any] = {"packed_seq_params": self._packed(micro)}
        if self.policy.dtype != torch.float32:
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


def row_divergence(batch: Batch, ref_logprobs: pa.ListArray) -> pa.Array:
    """[rows] float64, sum over trained tokens of `logprobs` - `ref_logprobs`: the k1 estimate of each row's KL."""
    response = response_tokens(batch)
    gap = batch.ragged("logprobs").values.astype(np.float64) - ref_logprobs.values.to_numpy()
    mask = response.mask.numpy() > 0
    return pa.array(np.bincount(response.row.numpy()[mask], weights=gap[mask], minlength=response.rows))


def _to_device(tokens: TokenBatch, device: torch.device) -> TokenBatch:
    if device.type == "cpu":
        return tokens
    return TokenBatch(
        logprobs=tokens.logprobs.to(device),
        mask=tokens.mask.to(device),
        row=tokens.row.to(device),
        rows=tokens.rows,
        columns={name: column.to(device) for name, column in tokens.columns.items()},
        totals=tokens.totals,
    )


def _as_column(name: str, value: Tensor, offsets: npt.NDArray[np.integer[Any]]) -> pa.Array:
    """A prepared tensor as a column: per token where it has one entry a response token, else per row."""
    values = value.detach().cpu().numpy()
    bounds = np.asarray(offsets, dtype=np.int32) - np.int32(offsets[0])
    if len(values) == bounds[-1]:
        return pa.ListArray.from_arrays(pa.array(bounds), pa.array(values))
    if len(values) == len(bounds) - 1:
        return pa.array(values)
    raise ValueError(
        f"prepare() gave column {name} of length {len(values)}; it must be one entry a response token ({bounds[-1]}) "
        f"or one a row ({len(bounds) - 1})"
    )
