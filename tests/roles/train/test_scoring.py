"""What a teacher tells about tokens, against the plain log-softmax; in one process and over vocabulary shards."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from rolegraph.host import free_port
from roles.train import scoring
from roles.train.scoring import Shard, TokenScores, score_tokens

VOCABULARY, PADDED = 37, 48


def case(tokens: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head with padding rows that would win, and labels."""
    torch.manual_seed(0)
    head = torch.randn(PADDED, 8)
    head[VOCABULARY:] = 50.0
    return torch.randn(tokens, 8), head, torch.randint(0, VOCABULARY, (tokens,))


def reference(temperature: float) -> Tensor:
    hidden, head, _ = case()
    return torch.log_softmax((hidden @ head[:VOCABULARY].T).double() / temperature, -1)


def check(scores: TokenScores, temperature: float, topk: int) -> None:
    hidden, _, labels = case()
    expected = reference(temperature)
    torch.testing.assert_close(
        scores.token_logprobs.double(), expected.gather(1, labels[:, None])[:, 0], rtol=0, atol=2e-5
    )
    best, ids = expected.topk(topk)
    assert scores.ids is not None
    assert scores.logprobs is not None
    assert scores.ids.dtype == torch.int32
    assert torch.equal(scores.ids.long(), ids)
    torch.testing.assert_close(scores.logprobs.double(), best, rtol=0, atol=2e-5)
    assert scores.hidden is not None
    assert torch.equal(scores.hidden, hidden)


def test_scores_are_those_of_the_log_softmax_in_chunks_of_any_size(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    hidden, head, labels = case()
    for chunk_bytes in (1, 3 * 4 * VOCABULARY, 2**20):
        monkeypatch.setattr(scoring, "CHUNK_BYTES", chunk_bytes)
        for temperature in (1.0, 0.7):
            scores = score_tokens(
                hidden,
                lambda h: h @ head.T,
                labels,
                Shard(VOCABULARY),
                topk=5,
                keep_hidden=True,
                temperature=temperature,
            )
            check(scores, temperature, 5)


def test_no_tokens_have_no_scores() -> None:
    _, head, _ = case()
    scores = score_tokens(torch.zeros(0, 8), lambda h: h @ head.T, torch.zeros(0, dtype=torch.long), Shard(37), topk=3)
    assert scores.token_logprobs.shape == (0,)
    assert scores.ids is not None
    assert scores.ids.shape == (0, 3)


def _rank(rank: int, port: int, bounds: list[int], topk: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(bounds) - 1)
    hidden, head, labels = case()
    own = head[bounds[rank] : bounds[rank + 1]]
    shard = Shard(max(0, min(bounds[rank + 1], VOCABULARY) - bounds[rank]), bounds[rank], dist.group.WORLD)
    scores = score_tokens(hidden, lambda h: h @ own.T, labels, shard, topk=topk, keep_hidden=True, temperature=0.7)
    check(scores, 0.7, topk)
    every = score_tokens(hidden, lambda h: h @ own.T, labels, shard, topk=VOCABULARY + 2)
    assert every.ids is not None
    assert every.logprobs is not None
    assert every.ids.sort(-1).values.tolist() == [[-1, -1, *range(VOCABULARY)]] * len(labels)
    assert bool(torch.isneginf(every.logprobs[every.ids < 0]).all())
    dist.destroy_process_group()


@pytest.mark.slow
def test_shards_of_unequal_sizes_agree_on_the_best_of_all() -> None:
    # The second shard has fewer tokens than K, the third is padding alone. All together have fewer than a K beyond the
    # vocabulary, and say so.
    mp.spawn(_rank, args=(free_port(), [0, 33, 40, 48], 6), nprocs=3)
