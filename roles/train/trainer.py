"""Forward and backward over micro-batches, and the optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from rolegraph.batch import Batch
from rolegraph.errors import ConfigError, RoleGraphError
from rolegraph.interfaces import HeadInfo, PolicyWeights
from rolegraph.losses.heads import Head
from rolegraph.losses.types import Loss, LossOutput, Stat, States, Steps, TokenBatch, Totals
from roles.train.config import MegatronTrainConfig
from roles.train.forward import Forward
from roles.train.logprob import linear_logprobs
from roles.train.metrics import gather_counts, reduce_over, reduce_stats
from roles.train.model import Policy
from roles.train.packing import MicroBatch, per_token_column, response_tokens
from roles.train.schedule import learning_rate
from roles.train.steps import steps_of
from roles.train.teaching import TeacherHead, teacher_head, teacher_states

FloatArray = npt.NDArray[np.float32]


class Scores(NamedTuple):
    """[tokens] of one micro-batch, on the CPU."""

    logprobs: FloatArray
    entropy: FloatArray | None


class Trainer(Forward):
    """Steps a `Policy`, and scores with it."""

    config: MegatronTrainConfig
    policy: Policy

    def __init__(self, config: MegatronTrainConfig, policy: Policy) -> None:
        super().__init__(config, policy)
        self.policy = policy
        self.steps = 0
        """Optimizer steps taken since the start or the last reset."""
        self._teacher_head: TeacherHead | PolicyWeights | None = None

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
        policy.runs.train()
        policy.runs.zero_grad_buffer()
        policy.optimizer.zero_grad()
        # Every rank has as many micro-batches, so that these weights add up to 1 and the metric is the plain sum.
        share = torch.tensor(1.0 / (len(plan.rows) * self._data_group.size()), dtype=torch.float64, device=device)
        finish = partial(self._loss, batch, loss=loss, temperature=temperature, totals=totals, share=share)
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
            steps=steps_of(batch),
        )
        tokens = _to_device(tokens, self.policy.device)
        columns = prepare(tokens, reduce_over(self._data_group))
        lengths = batch.ragged("response_ids").offsets
        return batch.with_columns({name: _as_column(name, value, lengths) for name, value in columns.items()})

    def _loss(
        self,
        batch: Batch,
        micro: MicroBatch,
        hidden: Tensor,
        *,
        loss: Loss,
        temperature: float,
        totals: Totals,
        share: Tensor,
    ) -> tuple[Tensor, Mapping[str, Stat]]:
        anchor = hidden.reshape(-1)[:0].sum()
        if micro.rows == 0:
            # Without rows the pass still has to reach every collective of the backward.
            return anchor, {"loss": Stat(anchor.detach(), share)}
        states = self._predicting(micro, hidden)
        logprobs, entropy = micro.mask.new_zeros(len(micro.labels)), None
        if getattr(loss, "needs_logprobs", True):
            at = getattr(loss, "logprob_temperature", None) or temperature
            logprobs, entropy = self._score(micro, states, at, bool(getattr(loss, "needs_entropy", False)))
        needs_states = getattr(loss, "needs_states", False)
        output: LossOutput = loss(
            TokenBatch(
                logprobs=logprobs,
                mask=micro.mask,
                row=micro.row,
                rows=micro.rows,
                columns=micro.columns,
                totals=totals,
                entropy=entropy,
                student=self._own_states(states, temperature) if needs_states else None,
                teacher=self._teacher_states(batch, micro, temperature) if needs_states else None,
            )
        )
        stats = {"loss": Stat(output.loss.detach(), share), **output.stats}
        # Context-parallel ranks each compute the whole loss, and their gradients are added up.
        value = output.loss / self._context_group.size()
        return value if value.requires_grad else value + anchor, stats

    # ----- teaching -----

    def use_teacher_head(self, head: Batch | PolicyWeights, info: HeadInfo | None) -> None:
        """See `TrainRole.use_teacher_head`."""
        if isinstance(head, str):
            self._teacher_head = head
        elif self._last_stage:
            if info is None:
                raise ConfigError("a teacher's head comes with its HeadInfo")
            rows = len(self.policy.model.head())
            first = rows * self._tensor_group.rank()
            self._teacher_head = teacher_head(head.slice(first, first + rows), info, first, self.policy.device)

    def _own_states(self, states: Tensor, temperature: float) -> States:
        group = self._tensor_group if self._tensor_group.size() > 1 else None
        head = Head(self.policy.model.head())
        return States(states, head, self.policy.bridge.vocab_size, temperature, group)

    def _teacher_states(self, batch: Batch, micro: MicroBatch, temperature: float) -> States | None:
        """The teacher's states for these rows, read from the object store now; null for rows without any."""
        if "teacher_hidden" not in batch:
            return None
        own = self._teacher_head
        if own is None:
            raise RoleGraphError(
                "the rows have the teacher's hidden states, and nobody gave its head: use_teacher_head()"
            )
        if isinstance(own, str):
            weight = self.policy.head_of(own)
            dtype = str(self.policy.dtype).removeprefix("torch.")
            own = TeacherHead(Head(weight), HeadInfo(self.policy.bridge.vocab_size, weight.shape[1], dtype))
        rows = batch.select(["uid", "response_ids", "teacher_hidden"]).take(micro.index).fetch_sync()
        hidden = teacher_states(rows, own.info).to(self.policy.device)
        return States(hidden, own.head, own.info.vocab_size, temperature)

    # ----- scoring -----

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, temperature: float, entropy: bool) -> dict[str, pa.ListArray]:
        """Columns `logprobs` and, where asked, `entropy` of this rank's rows, from the weights the model has now."""
        plan = self._plan(batch)
        self.policy.runs.eval()
        finish = partial(self._scores, temperature=temperature, entropy=entropy)
        scores = self._run(batch, plan, finish, forward_only=True)
        scores = self._on_every_stage(lambda: scores)
        parts = list(zip(plan.rows, scores, strict=True))
        columns = {"logprobs": per_token_column(batch, [(rows, score.logprobs) for rows, score in parts])}
        if entropy:
            columns["entropy"] = per_token_column(batch, [(rows, score.entropy) for rows, score in parts])
        return columns

    def _scores(self, micro: MicroBatch, hidden: Tensor, *, temperature: float, entropy: bool) -> tuple[Tensor, Scores]:
        logprobs, entropies = self._score(micro, self._predicting(micro, hidden), temperature, entropy)
        scores = Scores(logprobs.float().cpu().numpy(), None if entropies is None else entropies.float().cpu().numpy())
        return hidden.new_zeros(()), scores

    def _score(
        self, micro: MicroBatch, states: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (and entropies) of the response tokens, [tokens], from states [tokens, h]."""
        return linear_logprobs(
            states,
            self.policy.model.head(),
            micro.labels,
            temperature=temperature,
            vocab_size=self.policy.bridge.vocab_size,
            group=self._tensor_group if self._tensor_group.size() > 1 else None,
            entropy=entropy,
        )

    def _padding(self) -> float:
        """Share of the slots this step that held no token, over all data-parallel ranks."""
        counts = gather_counts([self._tokens, self._slots], self._data_group, self.policy.device).sum(0)
        return 1.0 - float(counts[0]) / float(counts[1])


def row_divergence(batch: Batch, ref_logprobs: pa.ListArray) -> pa.Array:
    """[rows] float64, sum over trained tokens of `logprobs` - `ref_logprobs`: the k1 estimate of each row's KL."""
    response = response_tokens(batch)
    gap = batch.ragged("logprobs").values.astype(np.float64) - ref_logprobs.values.to_numpy()
    mask = response.mask.numpy() > 0
    return pa.array(np.bincount(response.row.numpy()[mask], weights=gap[mask], minlength=response.rows))


def _to_device(tokens: TokenBatch, device: torch.device) -> TokenBatch:
    if device.type == "cpu":
        return tokens
    steps = tokens.steps
    return replace(
        tokens,
        logprobs=tokens.logprobs.to(device),
        mask=tokens.mask.to(device),
        row=tokens.row.to(device),
        columns={name: column.to(device) for name, column in tokens.columns.items()},
        steps=steps and Steps(steps.scores.to(device), steps.row.to(device), steps.last.to(device)),
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
