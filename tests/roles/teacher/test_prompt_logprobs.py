"""Reading an engine's prompt logprobs: every shape in which entries may come, and answers about other tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolegraph.errors import AlignmentError
from roles.rollout.engine import PromptLogprobs
from roles.teacher.prompt_logprobs import response_scores

Entries = list[tuple[int, float]]
GONE = (-1, -math.inf)
SAMPLED = 7
"""The response token at the position that a table below is about."""
OTHERS: list[Entries] = [[], [(3, -1.0), (5, -0.5)], [(4, -2.0)]]
"""Positions before it: a prompt of two tokens, and a response token 4."""


def answer(positions: list[Entries]) -> PromptLogprobs:
    flat = [entry for entries in positions for entry in entries]
    return PromptLogprobs(
        np.cumsum([0, *map(len, positions)]),
        np.array([token for token, _ in flat], np.int32),
        np.array([value for _, value in flat], np.float32),
    )


def scores(
    positions: list[Entries], *, topk: int = 2, prompt: int = 2, response: tuple[int, ...] = (4, SAMPLED)
) -> Any:
    return response_scores(answer(positions), prompt, np.array(response, np.int32), topk, "row-9")


@pytest.mark.parametrize(
    ("entries", "topk", "token", "best"),
    [
        pytest.param([(7, -0.25), (7, -0.25), (2, -2.0)], 2, -0.25, [(7, -0.25), (2, -2.0)], id="sampled-is-first"),
        pytest.param([(7, -2.0), (2, -0.25), (7, -2.0)], 2, -2.0, [(2, -0.25), (7, -2.0)], id="sampled-is-second"),
        pytest.param([(7, -9.0), (2, -0.25), (1, -2.0)], 2, -9.0, [(2, -0.25), (1, -2.0)], id="sampled-is-beyond-k"),
        pytest.param([(2, -0.25), (7, -2.0)], 2, -2.0, [(2, -0.25), (7, -2.0)], id="k-entries-without-extra"),
        pytest.param([(1, -2.0), (7, -9.0), (2, -0.25)], 2, -9.0, [(2, -0.25), (1, -2.0)], id="any-order"),
        pytest.param([(2, -0.25), (1, -2.0), (7, -9.0)], 2, -9.0, [(2, -0.25), (1, -2.0)], id="sampled-comes-last"),
        pytest.param([(7, -3.0)], 2, -3.0, [(7, -3.0), GONE], id="one-entry"),
        pytest.param([(7, -3.0), (7, -3.0)], 2, -3.0, [(7, -3.0), GONE], id="one-token-twice"),
        pytest.param([(7, -3.0), (2, -0.5)], 4, -3.0, [(2, -0.5), (7, -3.0), GONE, GONE], id="fewer-than-k"),
        pytest.param(
            [(2, -0.5), (2, -0.5), (2, -0.5), (1, -1.0), (7, -4.0)], 2, -4.0, [(2, -0.5), (1, -1.0)], id="thrice"
        ),
        pytest.param(
            [(6, -5.0), (7, -4.0), (3, -3.0), (2, -2.0)], 1, -4.0, [(2, -2.0)], id="more-entries-than-asked-for"
        ),
        pytest.param([(7, -1.0), (2, -1.0), (7, -1.0)], 2, -1.0, [(7, -1.0), (2, -1.0)], id="a-tie"),
        pytest.param([(7, -4.0), (2, -0.5)], 0, -4.0, [], id="no-top"),
        pytest.param([(7, -math.inf), (2, 0.0)], 2, -math.inf, [(2, 0.0), (7, -math.inf)], id="impossible-token"),
    ],
)
def test_entries_are_sorted_out(entries: Entries, topk: int, token: float, best: Entries) -> None:
    found = scores([*OTHERS, entries], topk=topk)
    assert (found.token_logprobs.dtype, found.ids.dtype, found.logprobs.dtype) == (np.float32, np.int32, np.float32)
    assert found.token_logprobs.tolist() == [-2.0, token]
    assert found.ids.shape == found.logprobs.shape == (2, topk)
    assert sorted(zip(found.ids[1].tolist(), found.logprobs[1].tolist(), strict=True)) == sorted(best)
    assert found.logprobs[1].tolist() == [value for _, value in best], "likeliest first"
    assert found.ids[0].tolist() == ([4, *[-1] * (topk - 1)] if topk else [])


def test_an_empty_response_has_no_scores() -> None:
    found = scores([[], [(3, -1.0)]], response=())
    assert (found.token_logprobs.shape, found.ids.shape, found.logprobs.shape) == ((0,), (0, 2), (0, 2))


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ([[], [(4, -1.0)], [(7, -2.0)]], "logprobs for 3 tokens, and was asked about 4 (2 of the prompt and 2 of the"),
        ([*OTHERS, [(7, -1.0)], [(1, -1.0)]], "logprobs for 5 tokens, and was asked about 4"),
        ([[(3, -1.0)], [(4, -2.0)], [(7, -1.0)], [(9, -1.0)]], "1 entries at its first token, which nothing comes"),
        ([[], [(4, -2.0)], [(7, -1.0)], [(9, -1.0)]], "response token 0 (id 4) lacks that token, and so do 1 others"),
        ([[], [(1, -1.0)], [(2, -1.0)], [(4, -1.0)]], "response token 0 (id 4) lacks that token"),
        ([*OTHERS, [(1, -1.0), (2, -1.0)]], "response token 1 (id 7) lacks that token: it is about other tokens"),
        ([*OTHERS, []], "response token 1 (id 7) lacks that token"),
    ],
    ids=["a-token-short", "a-token-long", "shifted-left", "shifted-within", "shifted-right", "not-there", "no-entries"],
)
def test_an_answer_about_other_tokens_names_the_row(positions: list[Entries], words: str) -> None:
    with pytest.raises(AlignmentError) as caught:
        scores(positions)
    assert str(caught.value).startswith("row row-9: ")
    assert words in str(caught.value)


def test_lists_that_end_early_name_the_row() -> None:
    whole = answer([*OTHERS, [(7, -1.0)]])
    with pytest.raises(AlignmentError, match="row x: the engine's positions end at entry 4, and it gave 3 ids and 4"):
        response_scores(
            PromptLogprobs(whole.offsets, whole.token_ids[:-1], whole.logprobs), 2, np.array([4, SAMPLED]), 2, "x"
        )


def test_the_tensors_of_the_engine_begin_with_the_second_token() -> None:
    def part(ids: list[list[int]], logprobs: list[list[float]]) -> Any:
        return SimpleNamespace(logprob_token_ids=np.array(ids), logprobs=np.array(logprobs))

    found = PromptLogprobs.of([part([[3, 5]], [[-1.0, -0.5]]), part([[4, 9], [7, 2]], [[-2.0, -0.5], [-3.0, -0.25]])])
    assert found.offsets.tolist() == [0, 0, 2, 4, 6]
    scored = response_scores(found, 2, np.array([4, 7]), 1, "x")
    assert scored.token_logprobs.tolist() == [-2.0, -3.0]
    assert scored.ids.tolist() == [[9], [2]]
