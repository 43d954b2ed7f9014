"""Cutting a rank's rows into micro-batches: pure arithmetic on lengths, the same answer for the same lengths.

Rows of like length go together, so that little of a padded micro-batch is padding; a packed one has none, so there the
rows are packed first-fit decreasing. The largest micro-batches come first: a shortage of memory shows at once, and the
allocator's buffers fit everything that follows.

Where neighbouring rows share their prompt, they stay together as far as the limits allow: what is packed are then
pieces of such a family, each as long as its prompt and its responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rolegraph.errors import PlanError
from roles.train.options import DEFAULT_MICRO_BATCH_ROWS

ACTIVATION_BYTES = 512 * 2**20
"""What a micro-batch may keep between forward and backward where no setting bounds it: short rows of a small model go
through in one pass, the fixed cost of which would else be most of it."""


def activation_bytes(model: Any, item: int) -> int:
    """Bytes a token keeps on a rank from forward to backward, roughly: what matrices, norms and attention read.

    `model` is a megatron-core TransformerConfig, `item` the bytes of a number.
    """
    queries, keys = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    inner = model.moe_ffn_hidden_size * model.moe_router_topk if model.num_moe_experts else model.ffn_hidden_size
    layer = 6 * model.hidden_size + 4 * (queries + keys) * model.kv_channels + 3 * inner
    ranks = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    return max(1, int(layer * item * model.num_layers) // ranks)


def tokens_that_fit(longest: int, token_bytes: int, multiple_of: int = 1) -> int:
    """Tokens of a micro-batch that no setting bounds, for rows of at most `longest` tokens.

    >>> tokens_that_fit(80, 2**17), tokens_that_fit(4000, 2**17)
    (4096, 16000)
    """
    return max(DEFAULT_MICRO_BATCH_ROWS * -(-longest // multiple_of) * multiple_of, ACTIVATION_BYTES // token_bytes)


@dataclass(frozen=True)
class _Size:
    """How many tokens some rows take as one micro-batch."""

    lengths: Sequence[int]
    padding_free: bool
    multiple_of: int
    shared: Sequence[int]
    """Tokens that each row need not take when it follows the row before it."""

    def __call__(self, rows: Sequence[int]) -> int:
        """Tokens of the micro-batch, its padding counted."""
        if not rows:
            return 0
        if self.padding_free:
            return self.round(self.tokens(rows))
        return len(rows) * self.round(max(self.lengths[row] for row in rows))

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens of the rows end to end, shared prompts counted once."""
        shared = sum(self.shared[row] for before, row in pairwise(rows) if row == before + 1)
        return sum(self.lengths[row] for row in rows) - shared

    def round(self, tokens: int) -> int:
        """The next multiple of `multiple_of`."""
        return -(-tokens // self.multiple_of) * self.multiple_of


def plan_microbatches(
    lengths: Sequence[int],
    *,
    rows_per: int | None = None,
    tokens_per: int | None = None,
    count: int | None = None,
    padding_free: bool = False,
    multiple_of: int = 1,
    shared: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split rows 0..len(lengths)-1 into micro-batches; every row is in exactly one.

    `rows_per` limits the rows of a micro-batch and `tokens_per` its tokens (padding counted: rows x the longest, each
    rounded up to `multiple_of`; packed: the rounded sum); with both, both hold, with neither, only `count` splits.
    `count` asks for at least that many micro-batches, since ranks that share collectives must agree on the number: the
    largest are split further, and with fewer rows than `count` the last ones are empty. `shared` are the tokens of each
    row's prompt where the row before it has the same one, else 0 (packed rows only).

    Raises PlanError where one row alone exceeds `tokens_per`.

    >>> plan_microbatches([3, 9, 4, 8], rows_per=2)
    [[1, 3], [2, 0]]
    >>> plan_microbatches([3, 9, 4, 8], tokens_per=12, padding_free=True)
    [[1, 0], [3, 2]]
    >>> plan_microbatches([9, 5, 8, 9], rows_per=3, padding_free=True, shared=[0, 4, 4, 0])
    [[0, 1, 2], [3]]
    """
    size = _Size([int(length) for length in lengths], padding_free, multiple_of, shared or [0] * len(lengths))
    _check(size, rows_per, tokens_per, count)
    order = sorted(_pieces(size, tokens_per, rows_per), key=lambda piece: (-size.tokens(piece), piece[0]))
    if tokens_per is not None and padding_free:
        parts = _first_fit(order, size, tokens_per, rows_per)
    else:
        parts = _cut(order, size, tokens_per, rows_per)
    while count is not None and len(parts) < count:
        parts = _split_largest(parts, size)
    return sorted(parts, key=lambda part: -size(part))


def _check(size: _Size, rows_per: int | None, tokens_per: int | None, count: int | None) -> None:
    """Refuse limits below one, and rows that no micro-batch can hold."""
    limits = {"micro_batch_size": rows_per, "max_tokens_per_micro_batch": tokens_per, "count": count}
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise PlanError(f"train.{name} is {limit}; give a number of at least 1, or null")
    longest = max(size.lengths, default=0)
    if tokens_per is not None and size.round(longest) > tokens_per:
        row = size.lengths.index(longest)
        rounded = f", {size.round(longest)} when padded to a multiple of {size.multiple_of}"
        raise PlanError(
            f"row {row} is {longest} tokens long{rounded if size.multiple_of > 1 else ''}: more than "
            f"train.max_tokens_per_micro_batch={tokens_per}; raise it to at least {size.round(longest)}, or shorten "
            "the rows by data.max_length and algorithm.max_completion_length"
        )


def _pieces(size: _Size, tokens_per: int | None, rows_per: int | None) -> list[list[int]]:
    """Neighbouring rows that share a prompt, as many in a piece as the limits allow; other rows are alone."""
    pieces: list[list[int]] = []
    used = 0
    for row in range(len(size.lengths)):
        own = size.lengths[row] - size.shared[row]
        if size.shared[row] and _fits(pieces[-1], used, 1, own, size, tokens_per, rows_per):
            pieces[-1].append(row)
            used += own
        else:
            pieces.append([row])
            used = size.lengths[row]
    return pieces


def _cut(order: Sequence[list[int]], size: _Size, tokens_per: int | None, rows_per: int | None) -> list[list[int]]:
    """Cut pieces, longest first, as late as the limits allow: the fewest parts that neighbours in length can make."""
    parts: list[list[int]] = []
    used = 0
    for piece in order:
        tokens = size.tokens(piece)
        # Longest first, so the first row of a part sets the padded length of the whole part.
        if parts and _fits(parts[-1], used, len(piece), tokens, size, tokens_per, rows_per):
            parts[-1].extend(piece)
        else:
            parts.append(list(piece))
            used = 0
        used += tokens
    return parts


def _fits(
    part: Sequence[int], used: int, rows: int, tokens: int, size: _Size, tokens_per: int | None, rows_per: int | None
) -> bool:
    """Whether some rows, none longer than the first of a padded `part`, still have room beside its `used` tokens."""
    if rows_per is not None and len(part) + rows > rows_per:
        return False
    if tokens_per is None:
        return True
    if size.padding_free:
        return size.round(used + tokens) <= tokens_per
    return (len(part) + rows) * size.round(size.lengths[part[0]]) <= tokens_per


def _first_fit(order: Sequence[list[int]], size: _Size, tokens_per: int, rows_per: int | None) -> list[list[int]]:
    """First-fit decreasing bin packing: within 11/9 of the fewest parts (plus one)."""
    parts: list[list[int]] = []
    used: list[int] = []
    for piece in order:
        tokens = size.tokens(piece)
        for index, part in enumerate(parts):
            if _fits(part, used[index], len(piece), tokens, size, tokens_per, rows_per):
                part.extend(piece)
                used[index] += tokens
                break
        else:
            parts.append(list(piece))
            used.append(tokens)
    return parts


def _split_largest(parts: list[list[int]], size: _Size) -> list[list[int]]:
    """Halve, by tokens, the largest part that has more than one row; add an empty part where none has."""
    splittable = [index for index, part in enumerate(parts) if len(part) > 1]
    if not splittable:
        return [*parts, []]
    index = max(splittable, key=lambda i: (size(parts[i]), len(parts[i]), -i))
    part = parts[index]
    total = size.tokens(part)
    cut = 1
    ends = list(accumulate(size.tokens(pair) - size.lengths[pair[0]] for pair in pairwise(part)))
    first = size.lengths[part[0]]
    while cut < len(part) - 1 and 2 * (first + ends[cut - 1]) <= total:
        cut += 1
    return [*parts[:index], part[:cut], part[cut:], *parts[index + 1 :]]
