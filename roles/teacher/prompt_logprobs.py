"""From an engine's prompt logprobs to what a teacher tells of the response tokens. Pure, numpy alone.

An engine answers for every token it was given, the prompt's too, with some entries (token id, logprob) at its position:
those of the token itself, and of the likeliest ones. This is one of the two places where token positions are counted
(the trainer's forward is the other), so whatever does not fit is an error and never cut to size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rolegraph.errors import AlignmentError
from roles.rollout.engine import PromptLogprobs

Array = np.ndarray[Any, Any]


class Scores(NamedTuple):
    """What a teacher thinks of one response."""

    token_logprobs: Array
    """[tokens] float32, of the response tokens."""
    ids: Array
    """[tokens, K] int32, likeliest first; -1 where the engine gave fewer than K."""
    logprobs: Array
    """[tokens, K] float32, theirs; -inf where there is none."""

    @classmethod
    def of_nothing(cls, topk: int) -> Scores:
        """Those of an empty response."""
        return cls(np.zeros(0, np.float32), np.zeros((0, topk), np.int32), np.zeros((0, topk), np.float32))


def response_scores(given: PromptLogprobs, prompt_length: int, response: Array, topk: int, uid: str) -> Scores:
    """Read the entries of the response's positions, whatever their order and number.

    `response` [tokens] are the ids that follow `prompt_length` ids of the prompt. Entry i of the result is about
    response token i given everything before it, which is the engine's position `prompt_length + i`.

    Raises AlignmentError, naming the uid, for an answer of another length than what was asked about, for one whose
    first position has entries (there is nothing before it), and for a position that lacks the token itself.
    """
    expected, positions = prompt_length + len(response), len(given.offsets) - 1
    if positions != expected:
        raise AlignmentError(
            f"row {uid}: the engine answered with logprobs for {positions} tokens, and was asked about {expected} "
            f"({prompt_length} of the prompt and {len(response)} of the response)"
        )
    counts = np.diff(given.offsets)
    if not len(given.token_ids) == len(given.logprobs) == given.offsets[-1] or (counts < 0).any():
        raise AlignmentError(
            f"row {uid}: the engine's positions end at entry {given.offsets[-1]}, and it gave {len(given.token_ids)} "
            f"ids and {len(given.logprobs)} logprobs"
        )
    if expected and counts[0]:
        raise AlignmentError(
            f"row {uid}: the engine's answer has {counts[0]} entries at its first token, which nothing comes before: "
            "it is shifted by a token"
        )
    ids, logprobs = _matrix(given, prompt_length, counts[prompt_length:])
    own = ids == response[:, None]
    if len(missing := np.flatnonzero(~own.any(axis=1))):
        place = int(missing[0])
        raise AlignmentError(
            f"row {uid}: the engine's answer for response token {place} (id {response[place]}) lacks that token"
            + (f", and so do {len(missing) - 1} others" if len(missing) > 1 else "")
            + ": it is about other tokens than it was asked about"
        )
    tokens = np.where(own, logprobs, -np.inf).max(axis=1, initial=-np.inf).astype(np.float32)
    return Scores(tokens, *_likeliest(ids, logprobs, topk))


def _matrix(given: PromptLogprobs, first: int, counts: Array) -> tuple[Array, Array]:
    """Ids and logprobs of the positions from `first` on, [tokens, most entries], missing ones -1 and -inf."""
    width = int(counts.max(initial=0))
    there = np.arange(width) < counts[:, None]
    ids = np.full(there.shape, -1, np.int32)
    logprobs = np.full(there.shape, -np.inf, np.float32)
    start = int(given.offsets[first])
    ids[there], logprobs[there] = given.token_ids[start:], given.logprobs[start:]
    return ids, logprobs


def _likeliest(ids: Array, logprobs: Array, topk: int) -> tuple[Array, Array]:
    """The first K different ids of each row, likeliest first, filled up with -1 and -inf."""
    width = max(topk, ids.shape[1])
    fill = ((0, 0), (0, width - ids.shape[1]))
    ids = np.pad(ids, fill, constant_values=-1)
    logprobs = np.pad(logprobs, fill, constant_values=-np.inf)
    ids, logprobs = _by(np.argsort(-logprobs, axis=1, kind="stable"), ids, logprobs)
    # An id that is there twice stays at its better rank.
    by_id = np.argsort(ids, axis=1, kind="stable")
    sorted_ids = np.take_along_axis(ids, by_id, axis=1)
    again = np.zeros(ids.shape, bool)
    again[:, 1:] = sorted_ids[:, 1:] == sorted_ids[:, :-1]
    repeated = np.zeros(ids.shape, bool)
    np.put_along_axis(repeated, by_id, again, axis=1)
    ids, logprobs = np.where(repeated, -1, ids), np.where(repeated, -np.inf, logprobs)
    ids, logprobs = _by(np.argsort(repeated, axis=1, kind="stable"), ids, logprobs)
    return ids[:, :topk], logprobs[:, :topk]


def _by(order: Array, *arrays: Array) -> tuple[Array, ...]:
    return tuple(np.take_along_axis(array, order, axis=1) for array in arrays)
