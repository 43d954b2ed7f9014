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
from roles.train.forward import Forward
from roles.train.head_logprobs import head_logprobs
from roles.train.metrics import gather_counts, reduce_over, reduce_stats
from roles.train.options import TrainConfig
from roles.train.packing import MicroBatch, per_token_column, response_tokens
from roles.train.passes import Learner
from roles.train.schedule import learning_rate
from roles.train.steps import steps_of
from roles.train.teaching import TeacherHead, teacher_head, teacher_states

FloatArray = npt.NDArray[np.float32]


class Scores(NamedTuple):
    """[tokens] of one micro-batch, on the CPU."""

    logprobs: FloatArray
    entropy: FloatArray | None


class Trainer(Forward):
    """Steps a policy, and scores with it."""

    config: TrainConfig
    passes: Learner

    def __init__(self, config: TrainConfig, passes: Learner) -> None:
        super().__init__(config, passes)
        self.steps = 0
        """Optimizer steps taken since the start or the last reset."""
        self._teacher_head: TeacherHead | PolicyWeights | None = None
        self._kept_head: TeacherHead | None = None

    # ----- training -----

    def step(self, batch: Batch, loss: Loss, *, temperature: float, lr: float | None) -> dict[str, float]:
        """One optimizer step on this rank's part of the global batch; global metrics on every rank."""
        started = time.perf_counter()
        plan = self._plan(batch)
        device = self.passes.device
        totals = Totals(
            tokens=torch.tensor(plan.tokens, dtype=torch.float32, device=device),
            rows=torch.tensor(plan.samples, dtype=torch.float32, device=device),
        )
        if self.passes.last_stage:
            batch = self._prepare(batch, loss, totals)
        self._kept_head = self._gather_kept_head(batch)
        # Every rank has as many micro-batches, so that these weights add up to 1 and the metric is the plain sum.
        share = torch.tensor(1.0 / (len(plan.rows) * self.passes.data_group.size()), dtype=torch.float64, device=device)
        finish = partial(self._loss, batch, loss=loss, temperature=temperature, totals=totals, share=share)
        stats = self._run(batch, plan, finish, train=True)
        metrics: dict[str, float] = self.passes.on_every_stage(
            lambda: reduce_stats(stats, self.passes.data_group, device)
        )
        rate = self._rate() if lr is None else lr
        grad_norm, skipped = self._update(rate, metrics["loss"])
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
        self.passes.reset()

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

    def _update(self, rate: float, loss: float) -> tuple[float, bool]:
        """Clip and step; returns the gradient norm before clipping, and whether the step was left out.

        A norm that is not finite would make every weight so, and one that is finite beside a `loss` (of all ranks) that
        is not means nothing: that step is skipped on all ranks alike, and the schedule stays where it is.
        """
        norm = self.passes.gradient_norm()
        if not (math.isfinite(norm) and math.isfinite(loss)):
            return norm, True
        limit = self.config.clip_grad
        if limit > 0 and norm > limit:
            self.passes.scale_gradients(limit / (norm + 1e-6))
        self.passes.apply(rate)
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
        tokens = _to_device(tokens, self.passes.device)
        columns = prepare(tokens, reduce_over(self.passes.data_group))
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
        states = self.passes.predicting(micro, hidden)
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
        value = output.loss / self.passes.loss_copies
        return value if value.requires_grad else value + anchor, stats

    # ----- teaching -----

    def use_teacher_head(self, head: Batch | PolicyWeights, info: HeadInfo | None) -> None:
        """See `TrainRole.use_teacher_head`."""
        if isinstance(head, str):
            self._teacher_head = head
        elif self.passes.last_stage:
            if info is None:
                raise ConfigError("a teacher's head comes with its HeadInfo")
            group = self.passes.vocab_group
            rows = len(self.passes.head().weight)
            first = rows * (0 if group is None else group.rank())
            self._teacher_head = teacher_head(head.slice(first, first + rows), info, first, self.passes.device)

    def _gather_kept_head(self, batch: Batch) -> TeacherHead | None:
        """The head of those weights of the policy that taught these rows, unless they are the ones of now.

        Ranks may have to gather it together, so that it is not left to a micro-batch, which may have no rows.
        """
        own = self._teacher_head
        if not isinstance(own, str) or own == "current" or "teacher_hidden" not in batch:
            return None
        return self._as_teacher(self.passes.head_of(own)) if self.passes.last_stage else None

    def _as_teacher(self, head: Head) -> TeacherHead:
        head, dtype = replace(head, weight=head.weight.detach()), str(self.passes.dtype).removeprefix("torch.")
        return TeacherHead(head, HeadInfo(self.passes.vocab_size, head.weight.shape[1], dtype))

    def _own_states(self, states: Tensor, temperature: float) -> States:
        return States(states, self.passes.head(), self.passes.vocab_size, temperature, self.passes.vocab_group)

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
            own = self._kept_head or self._as_teacher(self.passes.head())
        rows = batch.select(["uid", "response_ids", "teacher_hidden"]).take(micro.index).fetch_sync()
        hidden = teacher_states(rows, own.info).to(self.passes.device)
        return States(hidden, own.head, own.info.vocab_size, temperature)

    # ----- scoring -----

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, temperature: float, entropy: bool) -> dict[str, pa.ListArray]:
        """Columns `logprobs` and, where asked, `entropy` of this rank's rows, from the weights the model has now."""
        plan = self._plan(batch)
        finish = partial(self._scores, temperature=temperature, entropy=entropy)
        scores = self._run(batch, plan, finish, train=False)
        scores = self.passes.on_every_stage(lambda: scores)
        parts = list(zip(plan.rows, scores, strict=True))
        columns = {"logprobs": per_token_column(batch, [(rows, score.logprobs) for rows, score in parts])}
        if entropy:
            columns["entropy"] = per_token_column(batch, [(rows, score.entropy) for rows, score in parts])
        return columns

    def _scores(self, micro: MicroBatch, hidden: Tensor, *, temperature: float, entropy: bool) -> tuple[Tensor, Scores]:
        logprobs, entropies = self._score(micro, self.passes.predicting(micro, hidden), temperature, entropy)
        scores = Scores(logprobs.float().cpu().numpy(), None if entropies is None else entropies.float().cpu().numpy())
        return hidden.new_zeros(()), scores

    def _score(
        self, micro: MicroBatch, states: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (and entropies) of the response tokens, [tokens], from states [tokens, h]."""
        return head_logprobs(
            states,
            self.passes.head(),
            micro.labels,
            temperature=temperature,
            vocab_size=self.passes.vocab_size,
            group=self.passes.vocab_group,
            entropy=entropy,
        )

    def _padding(self) -> float:
        """Share of the slots this step that held no token, over all data-parallel ranks."""
        counts = gather_counts([self._tokens, self._slots], self.passes.data_group, self.passes.device).sum(0)
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
