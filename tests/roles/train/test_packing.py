"""Micro-batches from rows: what lies where, padded and packed, against a plain loop."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from rolegraph.batch import Batch
from rolegraph.errors import AlignmentError
from roles.train.packing import MicroBatch, collate, per_token_column, response_tokens, shared_prompts

PROMPTS = [[11, 12, 13], [21], [31, 32], [], [51, 52, 53, 54]]
RESPONSES = [[14, 15], [22, 23, 24], [], [41, 42], [55]]


def make_batch(**changes: object) -> Batch:
    columns: dict[str, object] = {
        "uid": ["a", "b", "c", "d", "e"],
        "prompt_ids": PROMPTS,
        "response_ids": RESPONSES,
        "response_mask": [[1, 0], [1, 1, 1], [], [1, 1], [1]],
        "rollout_logprobs": [[-0.1 * token for token in response] for response in RESPONSES],
        "advantage": [0.5, None, 2.0, -1.0, 0.0],
        "weight_version": pa.array([1, 2, 3, 4, 5], pa.int64()),
        "question": ["?"] * 5,
        "numbers": [[1], [1, 2], [3], [], []],
        **changes,
    }
    return Batch.from_columns({name: values for name, values in columns.items() if values is not None})


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("multiple_of", [1, 4])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [4, 0], [2], [3, 2, 1], [1]])
def test_each_response_token_is_predicted_by_the_one_before(
    padding_free: bool, multiple_of: int, rows: list[int]
) -> None:
    micro = collate(make_batch(), rows, padding_free=padding_free, multiple_of=multiple_of, pad_id=99)
    ids = micro.input_ids.flatten().tolist()
    positions = micro.position_ids.flatten().tolist()
    at = 0
    for order, row in enumerate(rows):
        for entry, token in enumerate(RESPONSES[row]):
            assert (int(micro.labels[at]), int(micro.row[at])) == (token, order)
            before = (PROMPTS[row] + RESPONSES[row])[: len(PROMPTS[row]) + entry]
            place = int(micro.predict[at])
            if before:
                assert ids[place + 1 - len(before) : place + 2] == [*before, token]
                assert positions[place] == len(before) - 1
            else:
                assert micro.mask[at] == 0.0
            at += 1
    assert at == len(micro.labels) == len(micro.predict) == len(micro.mask)
    assert micro.input_ids.dtype == micro.predict.dtype == micro.labels.dtype == torch.int64


def test_padded_layout() -> None:
    micro = collate(make_batch(), [0, 2], padding_free=False, multiple_of=4, pad_id=99)
    assert micro.input_ids.tolist() == [[11, 12, 13, 14, 15, 99, 99, 99], [31, 32] + [99] * 6]
    assert micro.position_ids.tolist() == [list(range(8))] * 2
    assert micro.cu_seqlens is None
    assert micro.max_seqlen == 8


def test_packed_layout() -> None:
    micro = collate(make_batch(), [0, 2], padding_free=True, multiple_of=4, pad_id=99)
    assert micro.input_ids.tolist() == [[11, 12, 13, 14, 15, 31, 32, 99]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0]]
    assert micro.cu_seqlens is not None
    assert micro.cu_seqlens.dtype == torch.int32
    assert micro.cu_seqlens.tolist() == [0, 5, 7, 8]
    assert micro.max_seqlen == 5


def groups() -> Batch:
    """Groups of rows: prompts of three, then of one token; an empty response in each; one prompt comes again."""
    prompts = [[1, 2, 3]] * 3 + [[5]] * 2 + [[]] * 2 + [[1, 2, 3], [1, 2, 4]]
    responses = [[10, 11], [], [12], [13, 14, 15], [], [16], [17], [18], [19, 20]]
    return Batch.from_columns({"uid": ["a"] * 9, "prompt_ids": prompts, "response_ids": responses})


def test_shared_prompts_are_laid_out_once() -> None:
    micro = collate(groups(), range(9), padding_free=True, share_prompts=True, multiple_of=8, pad_id=99)
    ids = [1, 2, 3, 10, 11, 12, 5, 13, 14, 15, 16, 17, 1, 2, 3, 18, 1, 2, 4, 19, 20]
    assert micro.input_ids.tolist() == [ids + [99] * 3]
    places = [0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert micro.position_ids.tolist() == [[*places, 0, 1, 2]]
    assert micro.cu_seqlens is not None
    assert micro.cu_seqlens.tolist() == [0, 6, 10, 11, 12, 16, 21, 24]
    assert micro.branches == ((3, 2, 1), (4,), (1,), (1,), (4,), (5,), (3,))
    assert (micro.tokens, micro.max_seqlen) == (21, 5)
    assert micro.predict.tolist() == [2, 3, 2, 6, 7, 8, 10, 11, 14, 18, 19]
    assert micro.row.tolist() == [0, 0, 2, 3, 3, 3, 5, 6, 7, 8, 8]
    assert shared_prompts(groups()).tolist() == [0, 3, 3, 0, 1, 0, 0, 0, 0]


def test_nothing_branches_where_nothing_is_shared() -> None:
    one, two = (collate(groups(), [0, 3, 1, 7], padding_free=True, share_prompts=share) for share in (True, False))
    # Rows 1 and 7 are neighbours here, and one of them is empty: a plain sequence.
    assert one.branches == ((5,), (4,), (4,))
    assert two.branches == ()
    assert collate(groups(), [0, 3], padding_free=True, share_prompts=True).branches == ()


def test_the_tail_counts_among_packed_sequences() -> None:
    micro = collate(make_batch(), [2], padding_free=True, multiple_of=16)
    assert micro.cu_seqlens is not None
    assert micro.cu_seqlens.tolist() == [0, 2, 16]
    assert micro.max_seqlen == 14


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_no_rows_give_a_dummy_row(padding_free: bool, multiple_of: int) -> None:
    micro = collate(make_batch(), [], padding_free=padding_free, multiple_of=multiple_of, pad_id=7)
    assert micro.input_ids.tolist() == [[7] * multiple_of]
    assert micro.position_ids.tolist() == [list(range(multiple_of))]
    assert len(micro.labels) == len(micro.predict) == len(micro.mask) == micro.rows == 0
    assert micro.columns["advantage"].shape == micro.columns["rollout_logprobs"].shape == (0,)
    assert micro.response.totals() == (0.0, 0.0)
    if padding_free:
        assert micro.cu_seqlens is not None
        assert micro.cu_seqlens.tolist() == [0, multiple_of]


@pytest.mark.parametrize("padding_free", [False, True])
def test_rows_without_a_token(padding_free: bool) -> None:
    empty = Batch.from_columns({"uid": ["a", "b"], "prompt_ids": [[], [1]], "response_ids": [[], [2]]})
    micro = collate(empty, [0, 1], padding_free=padding_free)
    assert micro.rows == 2
    assert micro.row.tolist() == [1]
    assert micro.input_ids.tolist() == ([[1, 2]] if padding_free else [[0, 0], [1, 2]])
    alone = collate(empty, [0], padding_free=padding_free)
    assert alone.input_ids.tolist() == [[0]]
    assert alone.rows == 1
    assert len(alone.labels) == 0


def test_mask_and_totals() -> None:
    tokens = response_tokens(make_batch())
    assert tokens.mask.tolist() == [1, 0, 1, 1, 1, 0, 1, 1]
    assert tokens.totals() == (6.0, 4.0)
    assert response_tokens(make_batch(response_mask=None)).mask.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]
    assert tokens.columns["response_mask"].tolist() == [1, 0, 1, 1, 1, 1, 1, 1]


def test_columns() -> None:
    columns = response_tokens(make_batch(), [1, 4]).columns
    assert set(columns) == {"response_mask", "rollout_logprobs", "advantage", "weight_version"}
    torch.testing.assert_close(columns["rollout_logprobs"], torch.tensor([-2.2, -2.3, -2.4, -5.5]))
    assert columns["advantage"].dtype == torch.float32
    assert columns["advantage"][0].isnan()
    assert columns["advantage"][1] == 0.0
    assert columns["weight_version"].dtype == torch.int64
    assert columns["weight_version"].tolist() == [2, 5]


def test_per_token_columns_of_the_user_and_of_k_entries() -> None:
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    kind = pa.list_(pa.float32(), 2)
    offsets = pa.array(np.cumsum([0] + [len(response) for response in RESPONSES]), pa.int32())
    top = pa.ListArray.from_arrays(offsets, pa.FixedSizeListArray.from_arrays(values.reshape(-1), type=kind))
    own = [[float(token) for token in response] for response in RESPONSES]
    columns = response_tokens(make_batch(teacher_logprobs=top, mine=own), [1, 4]).columns
    assert columns["teacher_logprobs"].tolist() == values[[2, 3, 4, 7]].tolist()
    assert columns["mine"].tolist() == [22.0, 23.0, 24.0, 55.0]


def test_misaligned_column_names_the_row() -> None:
    batch = make_batch(rollout_logprobs=[[-1.0, -1.0], [-1.0, -1.0], [], [-1.0, -1.0], [-1.0]])
    with pytest.raises(AlignmentError, match="row b: column rollout_logprobs has 2 entries for 3 response tokens"):
        collate(batch, [1], padding_free=False)


def test_results_return_to_their_rows() -> None:
    batch = make_batch()
    parts = []
    for rows in ([4, 1], [], [0, 3, 2]):
        micro = collate(batch, rows, padding_free=True)
        parts.append((rows, micro.labels.to(torch.float32).numpy()))
    column = per_token_column(batch, parts)
    assert column.type == pa.list_(pa.float32())
    assert column.to_pylist() == [[14, 15], [22, 23, 24], [], [0, 42], [55]]
    scored = batch.with_columns({"logprobs": column})
    scored.check_alignment()


def test_rows_of_a_slice() -> None:
    part = make_batch().slice(1, 5)
    assert collate(part, [0, 3], padding_free=True).input_ids.tolist() == [[21, 22, 23, 24, 51, 52, 53, 54, 55]]
    assert per_token_column(part, [([0, 1, 2, 3], np.ones(6, np.float32))]).to_pylist() == [[1] * 3, [], [0, 1], [1]]


def test_moves_as_a_whole() -> None:
    moved = collate(make_batch(), [0, 1], padding_free=True).to("meta")
    assert isinstance(moved, MicroBatch)
    tensors = [
        moved.input_ids,
        moved.position_ids,
        moved.cu_seqlens,
        moved.predict,
        moved.labels,
        moved.mask,
        moved.row,
    ]
    assert all(tensor is not None and tensor.is_meta for tensor in [*tensors, moved.row, *moved.columns.values()])
