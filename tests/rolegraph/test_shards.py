"""A driver's batch against the same operations on local ones, with strings in place of object references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from rolegraph.batch import Batch
from rolegraph.dispatch import contiguous_parts
from rolegraph.errors import BatchError
from rolegraph.shards import Refs
from rolegraph.transit import decode_arguments, decode_result, encode_arguments, encode_result
from tests.rolegraph.fakes import batch_of

Store = dict[str, Any]


def on_driver(local: Batch, store: Store, sizes: tuple[int, ...]) -> Batch:
    """The batch as an actor would have returned it, in shards of these sizes."""
    parts, start = [], 0
    for size in sizes:
        light, heavy = local.slice(start, start + size).to_parts()
        ref = f"object {len(store)}"
        store[ref] = heavy
        parts.append(Batch.from_parts(light, cast(Any, ref)))
        start += size
    return Batch.concat(parts)


def arrived(batch: Batch, store: Store) -> Batch:
    """The batch as an actor gets it."""
    refs = Refs()
    parcel = batch.pack_into(refs)
    return Batch(parcel.unpack([store[cast(Any, ref)] for ref in refs.refs]))


def same(one: Batch, other: Batch) -> bool:
    return bool(one.table.select(other.column_names).equals(other.table))


@pytest.mark.parametrize(
    "work",
    [
        lambda b: b,
        lambda b: b.slice(3, 9),
        lambda b: b.slice(0, 0),
        lambda b: b.take([11, 0, 0, 5, 4, 3]),
        lambda b: b.take(np.random.default_rng(0).permutation(12)),
        lambda b: b.repeat(3),
        lambda b: b.filter(np.arange(12) % 2 == 0),
        lambda b: Batch.concat([b.slice(8, 12), b.slice(0, 3), b.take([5, 5])]),
        lambda b: Batch.concat([b.take(part) for part in contiguous_parts(12, 5)]),
        lambda b: b.select(["text", "uid"]).with_columns({"x": np.arange(12)}),
        lambda b: b.select(["uid", "text"]).merge(b.select(["length", "response_ids"])).slice(2, 7),
        lambda b: b.drop(["uid", "length"]).slice(1, 5),
        lambda b: b.rename({"text": "said", "uid": "name"}).slice(2, 9),
        lambda b: b.rename({"text": "said"}).take([3, 1, 8]).rename({"said": "text"}),
        lambda b: b.rename({"text": "said"}).merge(b.select(["text"])).take([11, 2]),
        lambda b: Batch.concat([b.rename({"text": "said"}).slice(0, 2), b.rename({"text": "said"}).slice(7)]),
    ],
)
def test_rows_and_columns_are_those_of_a_local_batch(work: Callable[[Batch], Batch]) -> None:
    store: Store = {}
    local = batch_of(12)
    driver = on_driver(local, store, (5, 4, 3))
    assert not driver.is_local
    assert same(arrived(work(driver), store), work(local))
    assert len(work(driver)) == len(work(local))


def test_names_that_are_taken_or_mean_different_columns_are_refused() -> None:
    driver = on_driver(batch_of(12), {}, (12,))
    with pytest.raises(BatchError, match="cannot rename a column to 'uid': there is one of that name"):
        driver.rename({"text": "uid"})
    other = driver.rename({"text": "x", "response_ids": "text"}).rename({"x": "response_ids"})
    with pytest.raises(BatchError, match="cannot concatenate 'text': it is stored as 'response_ids' in one of"):
        Batch.concat([driver.select(["text"]), other.select(["text"])])


def test_scattered_rows_are_put_in_order() -> None:
    store: Store = {}
    local = batch_of(40)
    order = np.random.default_rng(3).permutation(40)
    driver = on_driver(local, store, (25, 15)).take(order)
    assert same(arrived(driver, store), local.take(order))


def test_only_the_shards_that_hold_the_rows_travel() -> None:
    store: Store = {}
    driver = on_driver(batch_of(12), store, (4, 4, 4))
    refs = Refs()
    driver.slice(5, 7).pack_into(refs)
    assert refs.refs == ["object 1"]
    light_only = Refs()
    driver.select(["uid", "length"]).pack_into(light_only)
    assert light_only.refs == []


def test_streamed_columns_do_not_travel_with_the_call_and_their_rows_can_be_read_later() -> None:
    store: Store = {}
    lengths = batch_of(12).numpy("length")
    states = Batch.from_columns({"teacher_hidden": [np.full((n, 4), n, np.float32) for n in lengths]})
    driver = on_driver(batch_of(12), store, (6, 6)).merge(on_driver(states, store, (4, 4, 4)))
    payload, refs = encode_arguments("step", (driver.take([9, 2]),), {})
    assert refs == ["object 0", "object 1"], "what holds hidden states is not among the objects that Ray fetches"
    (batch,) = decode_arguments(payload, [store[cast(Any, ref)] for ref in refs])[0]
    assert batch["uid"].to_pylist() == ["u9", "u2"]
    assert [field.name for field in batch.schema] == ["uid", "length", "response_ids", "text"]
    with pytest.raises(BatchError, match="'teacher_hidden' is in the object store"):
        batch["teacher_hidden"]
    read = Refs()
    hidden = batch.take([1]).select(["teacher_hidden"]).pack_into(read)
    assert read.refs == ["object 2"], "one row needs one shard"
    (row,) = Batch.unpacked(hidden, [store["object 2"]]).lists("teacher_hidden")
    assert row.shape == (lengths[2], 4)
    assert (row == lengths[2]).all()


def test_an_actor_hands_streamed_columns_back_as_the_references_they_were() -> None:
    store: Store = {}
    states = on_driver(Batch.from_columns({"teacher_hidden": [np.ones((2, 4), np.float32)] * 3}), store, (3,))
    rows = Batch.from_columns({"uid": ["a", "b", "c"], "text": ["x", "y", "z"]}).merge(states)
    result, tables, streamed = encode_result(rows)
    assert [table.column_names for table in tables] == [["text"]]
    assert streamed == ()
    back = decode_result(result, cast(Any, "object 9"), cast(Any, "object 10"))
    assert back.column_names == ["uid", "text", "teacher_hidden"]
    refs = Refs()
    back.pack_into(refs)
    assert refs.refs == ["object 9", "object 0"]


def test_streamed_columns_of_a_result_are_an_object_of_their_own() -> None:
    logprobs, states = [[-1.0, -2.0], [-3.0]], [np.ones((2, 4), np.float32), np.ones((1, 4), np.float32)]
    scored = Batch.from_columns({"teacher_token_logprobs": logprobs, "teacher_hidden": states})
    plain = Batch.from_columns({"uid": ["a"], "text": ["x"]})
    result, tables, streamed = encode_result((plain, scored))
    assert [table.column_names for table in tables] == [["text"], ["teacher_token_logprobs"]]
    assert [table.column_names for table in streamed] == [[], ["teacher_hidden"]]
    _, back = decode_result(result, cast(Any, "heavy"), cast(Any, "streamed"))
    payload, refs = encode_arguments("step", (back,), {})
    assert refs == ["heavy"], "whoever needs the logprobs is not sent the states"
    (batch,) = decode_arguments(payload, [tables])[0]
    assert batch["teacher_token_logprobs"].to_pylist() == logprobs
    read = Refs()
    hidden = batch.slice(1, 2).select(["teacher_hidden"]).pack_into(read)
    assert read.refs == ["streamed"]
    assert Batch.unpacked(hidden, [streamed]).lists("teacher_hidden")[0].tolist() == [[1.0] * 4]


def test_two_batches_of_one_call_send_a_shared_shard_once() -> None:
    store: Store = {}
    driver = on_driver(batch_of(12), store, (6, 6))
    refs = Refs()
    driver.slice(0, 3).pack_into(refs)
    driver.slice(2, 9).pack_into(refs)
    assert refs.refs == ["object 0", "object 1"]


def test_columns_of_two_calls_lie_in_two_places() -> None:
    store: Store = {}
    local = batch_of(12)
    scores = Batch.from_columns({"logprobs": [np.full(n, 0.5, np.float32) for n in local.numpy("length")]})
    driver = on_driver(local, store, (12,)).merge(on_driver(scores, store, (5, 7)))
    moved = Batch.concat([driver.slice(6, 12), driver.slice(0, 6)])
    order = [*range(6, 12), *range(6)]
    assert same(arrived(moved, store), local.merge(scores).take(order))


def test_a_heavy_column_is_not_read_by_accident() -> None:
    driver = on_driver(batch_of(3), {}, (3,))
    for read in (lambda: driver["text"], lambda: driver.lists("response_ids"), lambda: driver.table):
        with pytest.raises(BatchError, match=r"is in the object store; `await batch.fetch\("):
            read()
    with pytest.raises(BatchError, match=r"call share\(\)"):
        Batch.concat([driver, batch_of(3)])
    assert driver["uid"].to_pylist() == ["u0", "u1", "u2"]
    assert "in the object store: response_ids, text" in repr(driver)


def test_gathering_one_run_of_one_shard_copies_nothing() -> None:
    store: Store = {}
    driver = on_driver(batch_of(12), store, (12,))
    table = arrived(driver.slice(2, 9), store).table
    whole = store["object 0"].column("response_ids").chunk(0).values
    assert table.column("response_ids").chunk(0).values.buffers()[1].address == whole.buffers()[1].address
