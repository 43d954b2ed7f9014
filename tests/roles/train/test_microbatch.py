"""Plans of micro-batches: every row once, limits kept, padding low, numbers of micro-batches forced."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from rolegraph.errors import PlanError
from roles.train.microbatch import activation_bytes, plan_microbatches, tokens_that_fit


def tokens(lengths: list[int], part: list[int], *, padding_free: bool, multiple_of: int) -> int:
    def rounded(count: int) -> int:
        return (count + multiple_of - 1) // multiple_of * multiple_of

    if not part:
        return 0
    if padding_free:
        return rounded(sum(lengths[row] for row in part))
    return len(part) * rounded(max(lengths[row] for row in part))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("padding_free", [False, True])
def test_every_row_once_within_the_limits(seed: int, padding_free: bool) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(0, 60) for _ in range(draw.randint(0, 70))]
    rows_per = draw.choice([None, 1, 3, 8])
    tokens_per = draw.choice([None, 64, 200])
    count = draw.choice([None, 1, 5, 40])
    multiple_of = draw.choice([1, 4])

    def plan() -> list[list[int]]:
        return plan_microbatches(
            lengths,
            rows_per=rows_per,
            tokens_per=tokens_per,
            count=count,
            padding_free=padding_free,
            multiple_of=multiple_of,
        )

    parts = plan()
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert parts == plan()
    sizes = [tokens(lengths, part, padding_free=padding_free, multiple_of=multiple_of) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert rows_per is None or all(len(part) <= rows_per for part in parts)
    assert tokens_per is None or all(size <= tokens_per for size in sizes)
    assert count is None or len(parts) >= count
    if count is None or len(parts) > count:
        assert all(parts)


@pytest.mark.parametrize("seed", range(40))
def test_families_stay_together_within_the_limits(seed: int) -> None:
    draw = random.Random(seed)
    lengths, shared = [], []
    for _ in range(draw.randint(1, 12)):
        prompt = draw.randint(1, 30)
        size = draw.randint(1, 8)
        lengths += [prompt + draw.randint(0, 30) for _ in range(size)]
        shared += [0] + [prompt] * (size - 1)
    rows_per = draw.choice([None, 3, 8])
    tokens_per = draw.choice([None, 64, 200, 1000])
    count = draw.choice([None, 5, 40])

    def size_of(part: list[int]) -> int:
        twice = sum(shared[row] for before, row in itertools.pairwise(part) if row == before + 1)
        return -(-(sum(lengths[row] for row in part) - twice) // 4) * 4

    parts = plan_microbatches(
        lengths,
        rows_per=rows_per,
        tokens_per=tokens_per,
        count=count,
        padding_free=True,
        multiple_of=4,
        shared=shared,
    )
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert rows_per is None or all(len(part) <= rows_per for part in parts)
    sizes = [size_of(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert tokens_per is None or all(size <= tokens_per for size in sizes)
    if rows_per == 8 and tokens_per in (None, 1000) and count is None:
        cut = [row for row in range(1, len(lengths)) if shared[row]]
        assert all(any(row in part and row - 1 in part for part in parts) for row in cut)


def test_a_family_takes_its_prompt_once() -> None:
    shared = [0, 50, 50, 50, 0, 50]
    assert plan_microbatches([60] * 6, tokens_per=90, padding_free=True, shared=shared) == [[0, 1, 2, 3], [4, 5]]
    assert plan_microbatches([60] * 6, tokens_per=80, padding_free=True, shared=shared) == [[0, 1, 2], [4, 5], [3]]


def test_rows_of_like_length_share_their_padding() -> None:
    lengths = [100, 1, 99, 2, 98, 3]
    assert plan_microbatches(lengths, rows_per=3) == [[0, 2, 4], [5, 3, 1]]
    draw = random.Random(0)
    lengths = [draw.randint(1, 512) for _ in range(256)]
    parts = plan_microbatches(lengths, tokens_per=4096)
    padded = sum(tokens(lengths, part, padding_free=False, multiple_of=1) for part in parts)
    assert padded < 1.1 * sum(lengths)


def test_packing_comes_close_to_the_fewest() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 512) for _ in range(256)]
    parts = plan_microbatches(lengths, tokens_per=2048, padding_free=True)
    assert len(parts) <= -(-sum(lengths) // 2048) + 1


def test_count_splits_the_largest() -> None:
    assert plan_microbatches([8, 8, 2, 2], rows_per=2, count=3) == [[0], [1], [2, 3]]
    assert plan_microbatches([4, 4, 4, 4], count=2, padding_free=True) == [[0, 1], [2, 3]]
    assert plan_microbatches([6, 2, 2, 2], count=2, padding_free=True) == [[0], [1, 2, 3]]


def test_fewer_rows_than_count_leave_empty_ones() -> None:
    assert plan_microbatches([5, 7], rows_per=4, count=4) == [[1], [0], [], []]
    assert plan_microbatches([], rows_per=4, count=2) == [[], []]
    assert plan_microbatches([], rows_per=4) == []


@pytest.mark.parametrize("padding_free", [False, True])
def test_a_row_beyond_the_budget_is_named(padding_free: bool) -> None:
    with pytest.raises(PlanError, match=r"row 1 is 65 tokens long.*train\.max_tokens_per_micro_batch=64.*least 65"):
        plan_microbatches([3, 65], tokens_per=64, padding_free=padding_free)
    with pytest.raises(PlanError, match=r"row 0 is 62 tokens long, 64 when padded to a multiple of 8"):
        plan_microbatches([62, 3], tokens_per=63, padding_free=padding_free, multiple_of=8)


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ({"rows_per": 0}, "micro_batch_size"),
        ({"tokens_per": -1}, "max_tokens_per_micro_batch"),
        ({"count": 0}, "count"),
    ],
)
def test_limits_below_one(limits: dict[str, int], key: str) -> None:
    with pytest.raises(PlanError, match=key):
        plan_microbatches([1], **limits)  # type: ignore[arg-type]


def test_short_rows_of_a_small_model_go_through_at_once_and_long_ones_four_by_four() -> None:
    model = SimpleNamespace(
        hidden_size=128, num_attention_heads=4, num_query_groups=2, kv_channels=32, ffn_hidden_size=384,
        num_moe_experts=None, num_layers=4, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
    )  # fmt: skip
    small = activation_bytes(model, 4)
    assert small == 4 * 4 * (6 * 128 + 4 * 6 * 32 + 3 * 384)
    assert plan_microbatches([80] * 64, tokens_per=tokens_that_fit(80, small)) == [list(range(64))]
    model.num_layers, model.hidden_size, model.ffn_hidden_size = 36, 4096, 12288
    large = activation_bytes(model, 2)
    assert tokens_that_fit(1000, large) == 4000
    assert tokens_that_fit(1001, large, multiple_of=8) == 4 * 1008
    assert [len(part) for part in plan_microbatches([1000] * 6, tokens_per=4000)] == [4, 2]
    model.tensor_model_parallel_size = 2
    assert activation_bytes(model, 2) == large // 2
    model.num_moe_experts, model.moe_ffn_hidden_size, model.moe_router_topk = 64, 768, 8
    assert activation_bytes(model, 2) < large // 2
