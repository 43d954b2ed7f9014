"""Log-probabilities of labels straight from hidden states, without ever holding the logits of a whole micro-batch.

The projection to the vocabulary, its softmax and both gradients run in blocks of vocabulary columns that stay in cache.
A block is to the row what a tensor-parallel shard is to the vocabulary: it contributes a logsumexp, the label's logit
if the label lies in it, and a share of the entropy, and the shares are put together at the end, over blocks and shards
alike. Blocks of columns, not of tokens, because then each weight row is read once a pass, and its gradient is finished
in one GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rolegraph.losses.projection import accumulate, give_buffer, operands, precision, project, take_buffer

DEFAULT_BUDGET_BYTES = 512 * 2**20
_CPU_BLOCK_BYTES = 6 * 2**20
_GPU_BLOCK_BYTES = 256 * 2**20
_MIN_COLUMNS = 128


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    entropy: bool = False,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (nats) of `labels` under softmax(hidden @ weight.T / temperature), and the entropies.

    `hidden` [tokens, h] are the final states, `weight` [columns, h] this rank's rows of the output head, `labels`
    [tokens] ids in the whole vocabulary. Columns from `vocab_size` on are padding: no probability, no gradient. Both
    results are [tokens] float32 (float64 for float64 inputs), the entropies without gradient, null unless asked for.

    In a tensor-parallel `group` the shards have equal sizes and follow each other in rank order; every rank gets the
    whole result, and the gradient of `hidden` is this shard's part: the caller sums it over the group.

    Between forward and backward the softmax is kept as far as `budget_bytes` goes and the rest is computed again, so
    memory is O(budget + tokens x h). On a CPU the arithmetic is float32 whatever the inputs; elsewhere the GEMMs take
    the inputs' type and everything between them is float32.

    Raises ValueError for a temperature that is not above 0, and for labels outside the vocabulary.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; logprobs need one above 0")
    parallel = group is not None and dist.get_world_size(group) > 1
    total = weight.shape[0] * (dist.get_world_size(group) if parallel else 1)
    first = weight.shape[0] * dist.get_rank(group) if parallel else 0
    vocab_size = total if vocab_size is None else min(vocab_size, total)
    head = _Head(
        temperature=temperature,
        columns=min(max(vocab_size - first, 0), weight.shape[0]),
        first=first,
        group=group if parallel else None,
        vocab_size=vocab_size,
        entropy=entropy,
        budget_bytes=budget_bytes,
    )
    logprobs, entropies = _LinearLogprobs.apply(hidden, weight, labels, head)  # type: ignore[no-untyped-call]
    return logprobs, entropies if entropy else None


@dataclass(frozen=True)
class _Head:
    """What stays the same over the blocks of one call."""

    temperature: float
    columns: int
    """Columns of this shard that are no padding."""
    first: int
    """The vocabulary id of this shard's first column."""
    vocab_size: int
    group: dist.ProcessGroup | None
    entropy: bool
    budget_bytes: int


@dataclass
class _Block:
    """Some columns of this shard, and the tokens whose labels are among them."""

    start: int
    stop: int
    tokens: Tensor
    columns: Tensor
    """The labels of those tokens, counted from `start`."""


class _LinearLogprobs(torch.autograd.Function):
    """A block's softmax is kept as exp(logits - maximum in the block): normalising it is one factor a token."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, head: _Head):  # type: ignore[no-untyped-def]
        states, matrix = operands(hidden, weight)
        blocks, width = _blocks(states, labels, head)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        kept = _Kept(states, len(blocks), width, head.budget_bytes if wanted else 0)
        scratch, spare = _empty(states, width), _empty(states, width if head.entropy else 0)
        peaks = torch.empty(len(blocks), len(states), dtype=scratch.dtype, device=states.device)
        sums, means = torch.empty_like(peaks), torch.zeros_like(peaks)
        label_logits = torch.zeros_like(states[:, 0], dtype=scratch.dtype)
        for index, block in enumerate(blocks):
            logits = _project(states, matrix, block, head, scratch)
            label_logits[block.tokens] = logits[block.tokens, block.columns]
            torch.amax(logits, dim=-1, out=peaks[index])
            exps = kept.take(index, block)
            if exps is None:
                exps = _view(spare, len(states), block) if head.entropy else logits
            torch.exp(logits.sub_(peaks[index][:, None]), out=exps)
            torch.sum(exps, dim=-1, out=sums[index])
            if head.entropy:
                torch.sum(logits.mul_(exps), dim=-1, out=means[index])
        lse, entropies = _merge(peaks + sums.log(), sums.log() - means / sums)
        if head.group is not None:
            lse, label_logits, entropies = _over_shards(lse, label_logits, entropies, head.group)
        ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        if wanted:
            ctx.save_for_backward(hidden, weight, labels, peaks, lse)
            ctx.head, ctx.kept = head, kept
        return label_logits - lse, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, _: Tensor | None):  # type: ignore[no-untyped-def]
        if grad is None:
            return None, None, None, None
        hidden, weight, labels, peaks, lse = ctx.saved_tensors
        head, kept = ctx.head, ctx.kept
        states, matrix = operands(hidden, weight)
        blocks, width = _blocks(states, labels, head)
        scratch = _empty(states, width)
        grad = grad.to(scratch.dtype) / head.temperature
        # The padding rows beyond the blocks get a zero gradient, not the garbage of an empty tensor.
        grad_weight = torch.empty_like(matrix) if ctx.needs_input_grad[1] else None
        if grad_weight is not None:
            grad_weight[head.columns :].zero_()
        grad_hidden = torch.zeros_like(states, dtype=scratch.dtype) if ctx.needs_input_grad[0] else None
        for index, block in enumerate(blocks):
            exps = kept.take(index, block)
            slope = _view(scratch, len(states), block)
            if exps is None:
                exps = _project(states, matrix, block, head, scratch).sub_(peaks[index][:, None]).exp_()
            torch.mul(exps, (-grad * torch.exp(peaks[index] - lse))[:, None], out=slope)
            slope[block.tokens, block.columns] += grad[block.tokens]
            operand = slope.to(matrix.dtype)
            if grad_weight is not None:
                torch.mm(operand.t(), states, out=grad_weight[block.start : block.stop])
            if grad_hidden is not None:
                accumulate(grad_hidden, operand, matrix[block.start : block.stop])
        kept.release()
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
        )


class _Kept:
    """The exponentials of the first blocks, as many as the budget holds, from forward to backward."""

    def __init__(self, states: Tensor, blocks: int, width: int, budget_bytes: int) -> None:
        self._tokens = len(states)
        self._slot = self._tokens * width
        item = precision(states).itemsize
        self._count = min(blocks, budget_bytes // max(self._slot * item, 1))
        self._buffer: Tensor | None = None
        if self._count:
            self._buffer = take_buffer(self._count * self._slot, states, at_most=budget_bytes // item)

    def take(self, index: int, block: _Block) -> Tensor | None:
        """The place of block `index`, [tokens, columns]; null where the budget ends, or after `release`."""
        if self._buffer is None or index >= self._count:
            return None
        return _view(self._buffer[index * self._slot :], self._tokens, block)

    def release(self) -> None:
        """Let the next call have the memory; a second backward computes the blocks again."""
        if self._buffer is not None:
            give_buffer(self._buffer)
        self._buffer = None


def _empty(states: Tensor, width: int) -> Tensor:
    """Room for `width` columns of every token, flat."""
    return torch.empty(len(states) * width, dtype=precision(states), device=states.device)


def _view(flat: Tensor, tokens: int, block: _Block) -> Tensor:
    """The start of a flat buffer as [tokens, columns of the block]."""
    width = block.stop - block.start
    return flat[: tokens * width].view(tokens, width)


def _blocks(states: Tensor, labels: Tensor, head: _Head) -> tuple[list[_Block], int]:
    """Cut the shard's columns into blocks and give each the tokens whose labels it holds; with the widest width."""
    block_bytes = _CPU_BLOCK_BYTES if states.device.type == "cpu" else _GPU_BLOCK_BYTES
    width = max(block_bytes // (max(len(states), 1) * precision(states).itemsize), _MIN_COLUMNS)
    width = max(min(width, head.columns), 1)
    starts = list(range(0, head.columns, width))
    ordered, order = torch.sort(labels - head.first, stable=True)
    # One transfer tells the host both the limits of the blocks and whether all labels are in the vocabulary.
    edges = torch.tensor([-head.first, *starts, head.columns, head.vocab_size - head.first], device=labels.device)
    below, *bounds, within = torch.searchsorted(ordered, edges).tolist()
    if below > 0 or within < len(labels):
        raise ValueError(f"{below + len(labels) - within} labels are outside 0..{head.vocab_size - 1}, the vocabulary")
    blocks = []
    for start, low, high in zip(starts, bounds[:-1], bounds[1:], strict=True):
        columns = ordered[low:high] - start
        blocks.append(_Block(start, min(start + width, head.columns), order[low:high], columns))
    return blocks, width


def _project(states: Tensor, matrix: Tensor, block: _Block, head: _Head, scratch: Tensor) -> Tensor:
    """The logits of a block over the temperature, [tokens, columns], in `scratch`."""
    out = _view(scratch, len(states), block)
    return project(states, matrix[block.start : block.stop], out, scale=1.0 / head.temperature)


def _merge(lse: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Logsumexp and entropy of the whole from those of its parts: [parts, tokens] to [tokens].

    H = sum of share x H(part) - share x log(share), all terms positive: no digits cancel, as they would in
    logsumexp - mean logit. A part of padding alone has logsumexp -inf and share 0.
    """
    whole = torch.logsumexp(lse, dim=0)
    share = torch.exp(lse - whole)
    return whole, torch.sum(share * entropy + torch.special.entr(share), dim=0)


def _over_shards(
    lse: Tensor, label_logits: Tensor, entropy: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """The same over the shards of a tensor-parallel group; one of them has each label's logit, the others 0."""
    own = torch.stack([lse, label_logits, entropy])
    shards = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, own, group=group)
    lses, logits, entropies = torch.stack(shards, dim=1)
    lse, entropy = _merge(lses, entropies)
    return lse, logits.sum(dim=0), entropy
