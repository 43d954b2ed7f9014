"""Every value of dispatch, execute and collect, as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import rolegraph.dispatch
from rolegraph.batch import Batch
from rolegraph.dispatch import empty_result, flatten, gather, returns_batch, scatter
from rolegraph.errors import BatchError, RoleGraphError
from rolegraph.role import Mesh, Role, endpoint


def nothing(results: Sequence[int]) -> int:
    return len(results)


class Sample(Role):
    @endpoint()
    def to_all(self, x: list[int]) -> int:
        return 0

    @endpoint(execute="first")
    def to_first(self, x: list[int]) -> int:
        return 0

    @endpoint(dispatch="slice")
    def sliced(self, x: list[int], y: list[int] | None = None, *, k: str = "") -> int:
        return 0

    @endpoint(dispatch="slice", collect="flatten")
    def flat(self, x: list[int]) -> list[int]:
        return x

    @endpoint(dispatch="slice", collect="flatten")
    def pair(self, x: list[int]) -> tuple[Batch, list[int]]:
        raise NotImplementedError

    @endpoint(dispatch="slice", collect="flatten")
    def bare(self, x):  # type: ignore[no-untyped-def]
        return x

    @endpoint(dispatch="slice", collect=nothing)
    def counted(self, x: list[int]) -> int:
        return 0

    @endpoint(dispatch=lambda n, i, x: ((x[i],), {"n": n}))
    def by_pair(self, x: list[int], n: int = 0) -> int:
        return 0

    @endpoint(dispatch=lambda n, i, x: (x[i], n))
    def by_value(self, x: list[int]) -> int:
        return 0

    @endpoint(dispatch="dp")
    def dp(self, batch: Batch) -> Batch | None:
        return batch

    @endpoint(dispatch="dp", cost="length")
    def dp_cost(self, batch: Batch, extra: list[str] | None = None) -> Batch:
        return batch

    @endpoint(dispatch="dp", collect="none")
    def dp_each(self, batch: Batch) -> int:
        return 0


def rows(n: int, lengths: list[int] | None = None) -> Batch:
    return Batch.from_columns({"uid": [f"u{i}" for i in range(n)], "length": lengths or [1] * n})


def uids(batch: Batch) -> list[str]:
    return batch["uid"].to_pylist()


def test_all_replicates_and_first_asks_rank_0_alone() -> None:
    assert [(c.rank, c.args) for c in scatter(Sample.to_all, ([1, 2],), {}, Mesh(dp=2))] == [
        (0, ([1, 2],)),
        (1, ([1, 2],)),
    ]
    calls = scatter(Sample.to_first, ([1, 2],), {}, Mesh(dp=2))
    assert [(c.rank, c.args) for c in calls] == [(0, ([1, 2],))]
    assert gather(Sample.to_first, calls, [5], Mesh(dp=2)) == 5


@pytest.mark.parametrize(
    ("items", "parts"),
    [
        ([1, 2, 3, 4, 5, 6, 7], {0: [1, 2, 3], 1: [4, 5], 2: [6, 7]}),
        ([1, 2, 3, 4, 5, 6], {0: [1, 2], 1: [3, 4], 2: [5, 6]}),
        ([1, 2], {0: [1], 1: [2]}),
        ([], {}),
    ],
)
def test_slice_cuts_contiguous_balanced_parts(items: list[int], parts: dict[int, list[int]]) -> None:
    for args, kwargs in (((items,), {}), ((), {"x": items}), ((items,), {"k": "same"})):
        calls = scatter(Sample.sliced, args, kwargs, Mesh(dp=3))
        assert {c.rank: (c.args or (c.kwargs["x"],))[0] for c in calls} == parts
        assert all(c.kwargs.get("k") == kwargs.get("k") for c in calls)


def test_slice_cuts_all_lists_and_batches_alike() -> None:
    calls = scatter(Sample.sliced, (rows(3), [7, 8, 9]), {}, Mesh(dp=2))
    assert [(uids(c.args[0]), c.args[1]) for c in calls] == [(["u0", "u1"], [7, 8]), (["u2"], [9])]
    with pytest.raises(BatchError, match=r"sliced\(\).*differ in length: argument 1 has 3, k has 2"):
        scatter(Sample.sliced, (rows(3),), {"k": [1, 2]}, Mesh(dp=2))


def test_slice_without_anything_to_cut_replicates() -> None:
    assert [c.rank for c in scatter(Sample.sliced, (5,), {}, Mesh(dp=2))] == [0, 1]


def test_callable_returns_a_pair_or_the_only_argument() -> None:
    calls = scatter(Sample.by_pair, ([7, 8],), {}, Mesh(dp=2))
    assert [(c.args, c.kwargs) for c in calls] == [((7,), {"n": 2}), ((8,), {"n": 2})]
    calls = scatter(Sample.by_value, ([7, 8],), {}, Mesh(dp=2))
    assert [(c.args, c.kwargs) for c in calls] == [(((7, 2),), {}), (((8, 2),), {})]


def test_dp_gives_peers_the_same_part_and_calls_every_rank() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2)
    calls = scatter(Sample.dp, (rows(3),), {}, mesh)
    assert [(c.rank, uids(c.args[0])) for c in calls] == [
        (rank, ["u2"] if mesh.at(rank).dp_rank else ["u0", "u1"]) for rank in range(8)
    ]
    fewer = scatter(Sample.dp, (rows(1),), {}, Mesh(dp=2))
    assert [len(c.args[0]) for c in fewer] == [1, 0]
    assert scatter(Sample.dp, (rows(0),), {}, mesh) == []


def test_dp_is_collected_once_a_dp_rank_from_the_peer_that_returned_something() -> None:
    mesh = Mesh(dp=2, tp=1, pp=2)
    calls = scatter(Sample.dp, (rows(3),), {}, mesh)
    results = [None if mesh.at(c.rank).pp_rank == 0 else c.args[0] for c in calls]
    assert uids(gather(Sample.dp, calls, results, mesh)) == ["u0", "u1", "u2"]
    assert gather(Sample.dp_each, calls, [10, 11, 12, 13], mesh) == [10, 11]


def test_balanced_parts_are_put_back_in_row_order() -> None:
    batch = rows(6, [9, 1, 8, 2, 7, 3])
    calls = scatter(Sample.dp_cost, (batch, list("abcdef")), {}, Mesh(dp=2))
    loads = [int(c.args[0].numpy("length").sum()) for c in calls]
    assert loads == [15, 15]
    assert [c.args[1] for c in calls] == [[("abcdef")[i] for i in c.rows] for c in calls]
    assert uids(gather(Sample.dp_cost, calls, [c.args[0] for c in calls], Mesh(dp=2))) == uids(batch)
    doubled = gather(Sample.dp_cost, calls, [c.args[0].repeat(2) for c in calls], Mesh(dp=2))
    assert uids(doubled) == uids(batch.repeat(2))
    tuples = gather(Sample.dp_cost, calls, [(c.args[0], list(c.rows)) for c in calls], Mesh(dp=2))
    assert tuples[1] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RoleGraphError, match="returned 5 rows for 6"):
        gather(Sample.dp_cost, calls, [calls[0].args[0], calls[1].args[0].slice(1)], Mesh(dp=2))


def test_balanced_parts_by_lists_of_costs() -> None:
    parts = rolegraph.dispatch.parts_by_cost(np.ones(10), 3)
    assert sorted(len(part) for part in parts) == [3, 3, 4]
    zeros = rolegraph.dispatch.parts_by_cost(np.zeros(4), 2)
    assert sorted(len(part) for part in zeros) == [2, 2]


def test_flatten_joins_batches_lists_and_tuples() -> None:
    assert uids(flatten("f", [rows(1), rows(2)])) == ["u0", "u0", "u1"]
    assert flatten("f", [[1], [], [2, 3]]) == [1, 2, 3]
    both = flatten("f", [([1], rows(1)), ([2], rows(1))])
    assert isinstance(both, tuple)
    assert both[0] == [1, 2]
    assert len(both[1]) == 2
    assert flatten("f", [None, None]) is None


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([{"loss": 1.0}], r"f\(\) returned dict, which cannot be flattened \(a dict of numbers has no order of rows\)"),
        ([1.0, 2.0], r"returned float, which cannot be flattened.*collect='none'"),
        ([[1], None], "different types to flatten: NoneType, list"),
        ([([1],), ([1], [2])], "tuples of different lengths"),
    ],
)
def test_flatten_says_what_it_cannot_join(results: list[Any], message: str) -> None:
    with pytest.raises(RoleGraphError, match=message):
        flatten("f", results)


def test_empty_results_have_the_right_type() -> None:
    empty = rows(0)
    assert empty_result(Sample.sliced, (empty,), {}) == []
    assert empty_result(Sample.flat, ([],), {}) == []
    assert empty_result(Sample.counted, ([],), {}) == 0
    batch, items = empty_result(Sample.pair, (empty,), {})
    assert batch.column_names == ["uid", "length"]
    assert items == []
    assert len(empty_result(Sample.dp, (), {"batch": empty})) == 0
    assert empty_result(Sample.bare, ([],), {}) == [], "without annotation: what was cut"
    assert empty_result(Sample.bare, (empty,), {}).column_names == ["uid", "length"]


def test_heavy_results_are_known_from_the_annotation() -> None:
    assert [returns_batch(e) for e in (Sample.dp, Sample.pair, Sample.flat)] == [True, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dispatch": "slices"}, "dispatch='slices'.*use all, slice, dp, queue or a callable"),
        ({"execute": "rank0"}, "use all, first"),
        ({"collect": "concat"}, "use none, flatten or a callable"),
        ({"lane": "fast"}, "use main, control"),
        ({"dispatch": "slice", "cost": "length"}, "balances dispatch='dp' only"),
        ({"dispatch": "queue", "collect": "none"}, "flatten"),
    ],
)
def test_options_outside_the_table_fail_when_the_class_is_written(options: dict[str, Any], message: str) -> None:
    make: Callable[..., Any] = endpoint
    with pytest.raises(TypeError, match=message):
        make(**options)
