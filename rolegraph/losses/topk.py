"""Divergence from the top-K tokens of a teacher: what is compared is K numbers a token, and the rest as one more bin.

`renormalize` needs the student's logits of those K tokens alone; `tail` the logsumexp of all others as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rolegraph.losses.comparison import Metrics, check_measure
from rolegraph.losses.heads import Common, Shard, common_columns, group_of
from rolegraph.losses.projection import precision

TopkMode = Literal["renormalize", "tail"]


def topk_divergence(
    student_logits: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    mode: TopkMode = "renormalize",
    teacher_temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The divergence (nats) of each token, [tokens], on the teacher's top-K; a gradient for the student's logits.

    `student_logits` are [tokens, vocab], or in a tensor-parallel `group` this rank's columns, shards following each
    other in rank order, of any sizes; ids from `vocab_size` on are padding. `teacher_ids` and `teacher_logprobs` are
    [tokens, K] in any order; an id below 0 marks an entry that is not there. Logprobs (natural logs) are those of
    softmax(logits / teacher_temperature): 1 for engines, whose prompt logprobs ignore the sampling temperature.

    mode renormalize: both sides over those K tokens alone, whatever mass they cover. tail: one more bin for all other
    tokens, which needs logprobs taken at `temperature`. The teacher's bin is what its logprobs leave of 1, at least the
    rounding of float32 (1.2e-7), below which logprobs cannot say what is left; none where K is the whole vocabulary.

    Raises ValueError for a beta outside 0..1, a temperature that is not above 0, K = 1 renormalised (both sides are 1:
    no signal), a tail at another temperature, ids outside the vocabulary or twice in a row, shapes that do not fit.
    """
    options = TopkOptions(beta, temperature, mode, teacher_temperature)
    options.check(teacher_ids, teacher_logprobs, len(student_logits))
    group = group_of(group)
    shard = Shard(student_logits.shape[-1])
    common = common_columns(shard, shard, vocab_size, group, student_logits.device)
    picks = Picks.of(teacher_ids, common)
    picked, outside = _Pick.apply(  # type: ignore[no-untyped-call]
        student_logits, picks, common, temperature, mode == "tail", group
    )
    return compare_topk(picked, outside, teacher_logprobs, picks, options).values


@dataclass(frozen=True)
class TopkOptions:
    """How K tokens are compared."""

    beta: float
    temperature: float
    mode: TopkMode
    teacher_temperature: float

    def check(self, ids: Tensor, logprobs: Tensor, tokens: int) -> None:
        """Raises ValueError for what cannot be compared."""
        check_measure(self.beta, self.temperature)
        if not self.teacher_temperature > 0.0:
            raise ValueError(f"teacher_temperature is {self.teacher_temperature}; logprobs are taken at one above 0")
        if ids.dim() != 2 or ids.shape != logprobs.shape:
            raise ValueError(
                f"teacher ids of shape {list(ids.shape)} and logprobs of {list(logprobs.shape)}: both are [tokens, K]"
            )
        if len(ids) != tokens:
            raise ValueError(
                f"the student has {tokens} tokens and the teacher {len(ids)}: both need one entry a response token"
            )
        if self.mode not in ("renormalize", "tail"):
            raise ValueError(f"mode is {self.mode!r}; choose renormalize or tail")
        if self.mode == "renormalize" and ids.shape[1] < 2:
            raise ValueError(
                f"K = {ids.shape[1]} renormalised carries no signal (both sides are 1): use mode tail, or K >= 2"
            )
        if self.mode == "tail" and self.temperature != self.teacher_temperature:
            raise ValueError(
                f"mode tail at temperature {self.temperature} with teacher logprobs of {self.teacher_temperature}: "
                "what the top-K leave at another temperature is unknown; use the same, or mode renormalize"
            )


@dataclass(frozen=True)
class Picks:
    """The teacher's ids, and where they lie among this shard's columns."""

    valid: Tensor
    """[tokens, K] bool, false for an entry that is not there."""
    owned: Tensor
    """[tokens, K] bool, in this shard."""
    columns: Tensor
    """[tokens, K] counted from this shard's first common column, 0 where it is not owned."""
    whole: Tensor
    """[tokens] bool, the entries are the whole vocabulary: nothing is left for the tail."""

    @classmethod
    def of(cls, ids: Tensor, common: Common) -> Picks:
        """Look the ids up. Raises ValueError for ids past the vocabulary, or twice in one row."""
        ids = ids.long()
        first, vocab_size = common.begin, common.vocab_size
        valid = ids >= 0
        ordered = ids.sort(dim=-1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(dim=-1)
        # One transfer to the host answers both.
        beyond, repeated = torch.stack([(ids >= vocab_size).sum(), twice.sum()]).tolist()
        if beyond:
            raise ValueError(f"{beyond} teacher ids are outside 0..{vocab_size - 1}, the vocabulary")
        if repeated:
            raise ValueError(f"{repeated} rows of teacher ids, row {int(twice.nonzero()[0])} first, name an id twice")
        owned = valid & (ids >= first) & (ids < first + common.columns)
        return cls(valid, owned, torch.where(owned, ids - first, 0), valid.sum(dim=-1) == vocab_size)

    def part(self, rows: slice) -> Picks:
        """The same for some tokens."""
        return Picks(self.valid[rows], self.owned[rows], self.columns[rows], self.whole[rows])

    def take(self, logits: Tensor) -> Tensor:
        """[tokens, K] of this shard's [tokens, columns], 0 where another shard has the entry."""
        if not logits.shape[1]:
            return logits.new_zeros(self.columns.shape)
        return torch.where(self.owned, logits.gather(1, self.columns), 0.0)

    def add(self, logits: Tensor, values: Tensor) -> None:
        """Add [tokens, K] to the entries of [tokens, columns] that this shard has."""
        if logits.shape[1]:
            logits.scatter_add_(1, self.columns, torch.where(self.owned, values, 0.0))


class TopkResult(NamedTuple):
    """Per token, [tokens]."""

    values: Tensor
    """Nats, with a gradient."""
    metrics: Metrics
    """Of the distributions as compared; the top token is that among the teacher's top-K."""


def compare_topk(
    picked: Tensor, outside: Tensor | None, teacher_logprobs: Tensor, picks: Picks, options: TopkOptions
) -> TopkResult:
    """Compare the student's logits over the temperature, [tokens, K] of the ids and [tokens] of all others together.

    `outside` is the logsumexp of the tokens that are not among the ids, null in mode renormalize.
    """
    valid, ids = picks.valid, picks.valid.shape[1]
    given = teacher_logprobs.to(picked.dtype)
    mass = torch.where(valid, given.exp(), 0.0).sum(dim=-1)
    if outside is None:
        teacher = given * (options.teacher_temperature / options.temperature)
    else:
        least = torch.finfo(torch.float32).eps
        rest = torch.where(picks.whole, 0.0, (1.0 - mass).clamp(min=least))
        teacher = torch.cat([given, rest.log()[:, None]], dim=-1)
        picked = torch.cat([picked, outside[:, None]], dim=-1)
        valid = torch.cat([valid, ~picks.whole[:, None]], dim=-1)
    # A finite stand-in: its probability is 0, and rows without any entry stay free of NaN.
    lowest = torch.finfo(picked.dtype).min / 4
    student = torch.log_softmax(torch.where(valid, picked, lowest), dim=-1)
    teacher = torch.log_softmax(torch.where(valid, teacher, lowest), dim=-1)
    values = _divergence(student, teacher, valid, options.beta)
    with torch.no_grad():
        share = torch.where(valid, teacher.exp(), 0.0)
        metrics = Metrics(
            _divergence(student, teacher, valid, 0.0),
            _divergence(student, teacher, valid, 1.0),
            -torch.where(share > 0, share * teacher, 0.0).sum(dim=-1),
            (student[:, :ids].argmax(dim=-1) == teacher[:, :ids].argmax(dim=-1)).to(picked.dtype),
            mass,
        )
    return TopkResult(values, metrics)


def _divergence(student: Tensor, teacher: Tensor, valid: Tensor, beta: float) -> Tensor:
    """The divergence of [tokens, bins] log-probabilities, [tokens], by the formulas of `comparison`."""
    first, second = torch.where(valid, student.exp(), 0.0), torch.where(valid, teacher.exp(), 0.0)
    ratio = torch.where(valid, student - teacher, 0.0)
    if beta == 0.0:
        return (first - second - torch.where(second > 0, second * ratio, 0.0)).sum(dim=-1)
    if beta == 1.0:
        return (second - first + torch.where(first > 0, first * ratio, 0.0)).sum(dim=-1)
    # Beyond the bound one side has no probability left to change the sums.
    limit = 700.0 if ratio.dtype == torch.float64 else 80.0
    ratio = ratio.clamp(-limit, limit)
    mixed = torch.log1p(beta * torch.expm1(-ratio))
    return -(beta * second * (ratio + mixed) + (1.0 - beta) * first * mixed).sum(dim=-1)


class _Pick(torch.autograd.Function):
    """Logits over the temperature at the teacher's ids, and the logsumexp of all others, over the whole vocabulary."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        logits: Tensor,
        picks: Picks,
        common: Common,
        temperature: float,
        tail: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = precision(logits)
        local = logits[:, common.student : common.student + common.columns]
        ctx.picks, ctx.common, ctx.temperature, ctx.shape, ctx.dtype = picks, common, temperature, logits.shape, dtype
        ctx.set_materialize_grads(False)
        if not tail:
            return over_shards(picks.take(local).to(dtype) / temperature, group), None
        wide = local.to(dtype) / temperature
        picked = over_shards(picks.take(wide), group)
        outside = logsumexp_outside(wide, picks, group)
        ctx.save_for_backward(wide, outside)
        return picked, outside

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_outside: Tensor | None):  # type: ignore[no-untyped-def]
        common, picks = ctx.common, ctx.picks
        slope = torch.zeros(ctx.shape, dtype=ctx.dtype, device=picks.columns.device)
        local = slope[:, common.student : common.student + common.columns]
        if grad_outside is not None:
            wide, outside = ctx.saved_tensors
            torch.sub(wide, finite(outside)[:, None], out=local).exp_().mul_(grad_outside[:, None])
        if grad is not None:
            picks.add(local, grad)
        return slope.div_(ctx.temperature), None, None, None, None, None


def over_shards(picked: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over the shards, one of which has each entry, the others 0."""
    if group is not None:
        dist.all_reduce(picked, group=group)
    return picked


def logsumexp_outside(
    logits: Tensor, picks: Picks, group: dist.ProcessGroup | None, spare_columns: int = 2048
) -> Tensor:
    """Set the picked entries of [tokens, columns] to -inf; the logsumexp of the rest over all shards, [tokens]."""
    picks.add(logits, torch.full_like(picks.columns, -torch.inf, dtype=logits.dtype))
    parts = [logits.new_full((len(logits),), -torch.inf)]
    # In blocks: the exponentials of all columns at once would be a second tensor of this size.
    parts += [torch.logsumexp(block, dim=-1) for block in logits.split(spare_columns, dim=-1) if block.shape[1]]
    own = torch.logsumexp(torch.stack(parts), dim=0)
    if group is None:
        return own
    shards = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, own, group=group)
    return torch.logsumexp(torch.stack(shards), dim=0)


def finite(logsumexp: Tensor) -> Tensor:
    """0 in place of the -inf of no tokens at all, so that exp(-inf - logsumexp) is 0."""
    return torch.where(logsumexp == -torch.inf, 0.0, logsumexp)
