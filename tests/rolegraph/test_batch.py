"""Local batches: values in, values out, and what a pickle of a part carries."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from rolegraph.batch import Batch, Ragged
from rolegraph.columns import compact
from rolegraph.errors import AlignmentError, BatchError


def sample(rows: int = 4) -> Batch:
    return Batch.from_columns(
        {
            "uid": [f"u{i}" for i in range(rows)],
            "reward": [0.5 * i for i in range(rows)],
            "prompt_ids": [list(range(i + 1)) for i in range(rows)],
            "text": [f"row {i}" for i in range(rows)],
        }
    )


def test_known_columns_get_their_types() -> None:
    batch = Batch.from_columns(
        {"prompt_ids": [[1], []], "response_mask": [[True], [False]], "reward": [None, None], "rewards/x": [None, 1]}
    )
    types = {field.name: field.type for field in batch.table.schema}
    assert types["prompt_ids"] == pa.list_(pa.int32())
    assert types["response_mask"] == pa.list_(pa.uint8())
    assert types["reward"] == types["rewards/x"] == pa.float64()
    masks = Batch.from_table(pa.table({"m": pa.array([[True, False]], pa.list_(pa.bool_()))}))
    assert masks.ragged("m").values.tolist() == [1, 0]
    assert masks.ragged("m").values.dtype == np.uint8


def test_rows_and_columns_are_chosen() -> None:
    batch = sample()
    assert batch.take([2, 0, 2])["uid"].to_pylist() == ["u2", "u0", "u2"]
    assert batch.slice(1, 3)["text"].to_pylist() == ["row 1", "row 2"]
    assert batch.slice(-1)["uid"].to_pylist() == ["u3"]
    assert batch.filter([True, False, False, True])["uid"].to_pylist() == ["u0", "u3"]
    assert batch.repeat(2)["uid"].to_pylist() == ["u0", "u0", "u1", "u1", "u2", "u2", "u3", "u3"]
    assert batch.select(["text", "uid"]).column_names == ["text", "uid"]
    assert batch.drop(["text", "nothing"]).column_names == ["uid", "reward", "prompt_ids"]
    assert Batch.concat([batch.slice(2), batch.slice(0, 2)])["uid"].to_pylist() == ["u2", "u3", "u0", "u1"]
    assert batch["uid"].to_pylist() == ["u0", "u1", "u2", "u3"], "the batch itself never changes"
    assert batch.repeat(0).column_names == batch.column_names
    assert len(batch.repeat(0)) == 0


@pytest.mark.parametrize("indices", [[4], [-1]])
def test_take_outside_the_rows_is_an_error(indices: list[int]) -> None:
    with pytest.raises(BatchError, match=f"row {indices[0]} of 4 rows"):
        sample().take(indices)


def test_errors_name_the_column() -> None:
    batch = sample()
    with pytest.raises(BatchError, match="no column 'uidd'; there are: uid, reward"):
        batch["uidd"]
    with pytest.raises(BatchError, match="no column 'x'"):
        batch.select(["x"])
    with pytest.raises(BatchError, match=r"differ in their number of rows.*'b': 2"):
        Batch.from_columns({"a": [1], "b": [1, 2]})
    with pytest.raises(BatchError, match="a mask of shape"):
        batch.filter([True])
    with pytest.raises(BatchError, match="lack the columns text"):
        Batch.concat([batch, batch.drop(["text"])])
    with pytest.raises(BatchError, match="'uid' differs"):
        batch.merge(batch.take([1, 0, 2, 3]).select(["uid"]))
    with pytest.raises(BatchError, match="3 rows beside 4"):
        batch.merge(Batch.from_columns({"x": [1, 2, 3]}))
    with pytest.raises(BatchError, match="'text' is string, not a list"):
        batch.ragged("text")


def test_numpy_turns_nulls_into_nan() -> None:
    batch = Batch.from_columns({"reward": [1.0, None], "count": pa.array([1, None]), "flag": [True, False]})
    assert np.isnan(batch.numpy("reward")[1])
    assert np.isnan(batch.numpy("count")[1])
    assert batch.numpy("flag").dtype == bool
    full = Batch.from_columns({"x": np.arange(3)})
    assert not full.numpy("x").flags.writeable, "zero-copy views of a batch cannot be written through"


def test_ragged_is_flat_values_and_offsets() -> None:
    batch = sample().slice(1, 3)
    ragged = batch.ragged("prompt_ids")
    assert ragged.values.tolist() == [0, 1, 0, 1, 2]
    assert ragged.offsets.tolist() == [0, 2, 5]
    assert [row.tolist() for row in batch.lists("prompt_ids")] == [[0, 1], [0, 1, 2]]
    assert batch.slice(0, 0).lists("prompt_ids") == []
    nulls = Batch.from_columns({"teacher_prompt_ids": [[1], None, [2, 3]]}).ragged("teacher_prompt_ids")
    assert nulls.values.tolist() == [1, 2, 3]
    assert nulls.offsets.tolist() == [0, 1, 1, 3]


def test_ragged_of_k_entries_a_token() -> None:
    values, offsets = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([0, 4, 6], np.int32)
    batch = Batch.from_columns({"teacher_logprobs": Ragged(values, offsets)})
    assert batch["teacher_logprobs"].type == pa.list_(pa.list_(pa.float32(), 2))
    back = batch.slice(1).ragged("teacher_logprobs")
    assert back.values.tolist() == [[8, 9], [10, 11]]
    assert back.offsets.tolist() == [0, 2]


def test_lists_of_numpy_arrays_become_a_ragged_column() -> None:
    batch = Batch.from_columns({"logprobs": [np.zeros(2, np.float32), np.ones(0, np.float32)]})
    assert batch["logprobs"].type == pa.list_(pa.float32())
    assert batch["logprobs"].to_pylist() == [[0, 0], []]


def big(rows: int = 64, tokens: int = 1000) -> Batch:
    ids = np.arange(rows * tokens, dtype=np.int32)
    offsets = np.arange(rows + 1, dtype=np.int32) * tokens
    top = Ragged(np.zeros((rows * tokens, 2), np.float32), offsets)
    messages = [[{"role": "user", "content": "x" * tokens}]] * rows
    return Batch.from_columns(
        {
            "x": np.arange(rows),
            "ids": Ragged(ids, offsets),
            "top": top,
            "s": ["x" * tokens] * rows,
            "messages": messages,
        }
    )


def test_a_part_pickles_only_its_own_rows() -> None:
    whole = big()
    for part in (whole.slice(8, 16), whole.take([8, 9, 10, 11, 12, 13, 14, 15])):
        assert len(pickle.dumps(part, protocol=5)) < len(pickle.dumps(whole, protocol=5)) / 7
        assert pickle.loads(pickle.dumps(part)).table.equals(part.table)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1], None, [2, 3], [4]] * 500),
        pa.array([1, None, 3, 4] * 500),
        pa.array([True, False, None, True] * 500),
        pa.array(["a", None, "ccc", ""] * 500),
        pa.array([[[1.0, 2.0]], [], [[3.0, 4.0]], []] * 500, pa.list_(pa.list_(pa.float64(), 2))),
        pa.array([[1], [], [2, 3], [4]] * 500, pa.large_list(pa.int64())),
        pa.array([{"a": 1, "b": "x"}] * 2000),
    ],
)
def test_compact_keeps_the_values(array: pa.Array) -> None:
    for start, length in ((0, 2000), (1, 3), (13, 100), (1999, 1), (2000, 0)):
        part = array.slice(start, length)
        assert compact(part).equals(part)
    assert compact(array.slice(100, 4)).get_total_buffer_size() < array.get_total_buffer_size() / 4


def test_alignment_error_names_the_uid() -> None:
    good = {"uid": ["a", "b"], "response_ids": [[1, 2], []], "response_mask": [[1, 1], []]}
    Batch.from_columns({**good, "rollout_logprobs": [[-1.0, -2.0], None]}).check_alignment()
    with pytest.raises(AlignmentError, match="row b: column rollout_logprobs has 2 entries for 0 response tokens"):
        Batch.from_columns({**good, "rollout_logprobs": [[-1.0, -2.0], [-1.0, -2.0]]}).check_alignment()
    with pytest.raises(AlignmentError, match="row a: column rollout_logprobs has 0 entries for 2 response tokens;"):
        Batch.from_columns({**good, "rollout_logprobs": [None, []]}).check_alignment()


def test_concat_promotes_columns_of_nulls() -> None:
    joined = Batch.concat([Batch.from_columns({"x": [None, None]}), Batch.from_columns({"x": [1, 2]})])
    assert joined["x"].to_pylist() == [None, None, 1, 2]
    assert joined["x"].type == pa.int64()
    with pytest.raises(BatchError, match="different types"):
        Batch.concat([Batch.from_columns({"x": ["a"]}), Batch.from_columns({"x": [[1]]})])
