"""The distillation loss: how far the student's next-token distributions are from the teacher's (GKD).

Which formula beta stands for, and its source, is in `rolegraph.losses.divergence`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolegraph.losses.divergence import Divergence, Metrics, TopkMode, linear_generalized_jsd, linear_topk_divergence
from rolegraph.losses.types import LossOutput, Stat, TokenBatch

BUCKETS = (0, 32, 128, 512, 2048)
"""Where in the response the buckets of the positional metrics begin."""


class DistillLoss:
    """Divergence from the teacher over the masked tokens of the global batch, plus `sft_alpha` times cross-entropy.

    With `topk_mode` the teacher's top-K (columns `teacher_ids`, `teacher_logprobs`, the latter at
    `teacher_temperature`, null: the step's) is compared, else its hidden states, over the whole vocabulary.
    Cross-entropy is that of the response tokens at temperature 1.
    """

    needs_states = True
    logprob_temperature = 1.0

    def __init__(
        self,
        *,
        beta: float = 0.5,
        topk_mode: TopkMode | None = None,
        sft_alpha: float = 0.0,
        teacher_temperature: float | None = None,
    ) -> None:
        self.beta = beta
        self.topk_mode = topk_mode
        self.sft_alpha = sft_alpha
        self.teacher_temperature = teacher_temperature
        self.needs_logprobs = sft_alpha > 0

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss of one micro-batch; the metrics are means over masked tokens."""
        total = tokens.totals.tokens.clamp(min=1)
        found = self.compare(tokens, tokens.mask / total)
        mask = tokens.mask
        stats = {"divergence": _mean(found.values, mask), **_details(found, mask), **by_position(tokens, found.values)}
        loss = found.loss
        if self.sft_alpha > 0:
            negative = -torch.where(mask > 0, tokens.logprobs, 0.0)
            loss = loss + self.sft_alpha * negative.sum() / total
            stats["cross_entropy"] = _mean(negative, mask)
        return LossOutput(loss, stats)

    def compare(self, tokens: TokenBatch, weights: Tensor) -> Divergence:
        """The divergence of every token, and their sum by `weights` [tokens], which has the gradient.

        Raises ValueError where the rows lack what the teacher should have given.
        """
        student, teacher = tokens.student, tokens.teacher
        if student is None:
            raise ValueError("the student's states are missing: the train role must know losses that need states")
        if self.topk_mode is not None:
            missing = [name for name in ("teacher_ids", "teacher_logprobs") if name not in tokens.columns]
            if missing:
                raise ValueError(f"the rows have no column {missing[0]}: the teacher has to score them with topk first")
            ids, logprobs = in_vocabulary(
                tokens.columns["teacher_ids"], tokens.columns["teacher_logprobs"], student.vocab_size
            )
            return linear_topk_divergence(
                student.hidden,
                student.head,
                ids,
                logprobs,
                beta=self.beta,
                temperature=student.temperature,
                mode=self.topk_mode,
                teacher_temperature=self.teacher_temperature or student.temperature,
                weights=weights,
                vocab_size=student.vocab_size,
                metrics=True,
                group=student.group,
            )
        if teacher is None:
            raise ValueError("the rows have no teacher_hidden: the teacher has to score them with hidden=true first")
        return linear_generalized_jsd(
            student.hidden,
            student.head,
            teacher.hidden,
            teacher.head,
            beta=self.beta,
            temperature=student.temperature,
            weights=weights,
            vocab_size=min(student.vocab_size, teacher.vocab_size),
            metrics=True,
            group=student.group,
        )


def in_vocabulary(ids: Tensor, logprobs: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """A teacher's top-K [tokens, K] as a student of `vocab_size` ids can be compared with it.

    A teacher of one tokenizer but a wider table may give probability to ids that the student does not have: those are
    marked as not there (-1), and the others get the probability they have among the ids that both have, as far as the
    top-K tell.
    """
    ids = ids.long()
    beyond = ids >= vocab_size
    if not bool(beyond.any()):
        return ids, logprobs
    lost = torch.where(beyond, logprobs.exp(), 0.0).sum(dim=-1, keepdim=True)
    return ids.masked_fill(beyond, -1), logprobs - torch.log1p(-lost.clamp(max=1.0 - torch.finfo(lost.dtype).eps))


def by_position(tokens: TokenBatch, values: Tensor) -> dict[str, Stat]:
    """The mean of `values` [tokens] by where in the response a token stands: `divergence/tokens_0_31`, ..."""
    lengths = torch.bincount(tokens.row, minlength=tokens.rows)
    starts = lengths.cumsum(0) - lengths
    position = torch.arange(len(tokens.row), device=tokens.row.device) - starts[tokens.row]
    found = {}
    for begin, end in zip(BUCKETS, (*BUCKETS[1:], None), strict=True):
        inside = position >= begin if end is None else (position >= begin) & (position < end)
        weight = tokens.mask * inside
        name = f"divergence/tokens_{begin}_" + ("up" if end is None else str(end - 1))
        if bool(inside.any()):
            found[name] = _mean(values, weight)
    return found


def _details(found: Divergence, mask: Tensor) -> dict[str, Stat]:
    metrics: Metrics | None = found.metrics
    if metrics is None:
        return {}
    return {
        "kl/forward": _mean(metrics.forward_kl, mask),
        "kl/reverse": _mean(metrics.reverse_kl, mask),
        "teacher/entropy": _mean(metrics.teacher_entropy, mask),
        "teacher/top_agreement": _mean(metrics.top_agreement, mask),
        "teacher/mass_covered": _mean(metrics.mass_covered, mask),
    }


def _mean(values: Tensor, weight: Tensor) -> Stat:
    """Masked tokens may hold anything, also what is not finite."""
    return Stat(torch.where(weight > 0, values.detach() * weight, 0.0).sum(), weight.sum())
