"""linear_logprobs against plain projection and log_softmax: values, gradients, shards, memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from rolegraph.losses import projection
from roles.train import logprob
from roles.train.logprob import linear_logprobs
from tests.memory import peak_bytes

ALL, HALF, NOTHING = 2**30, 40_000, 0
"""Budgets that keep the whole softmax, some blocks of it, none of it."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 16 columns and more, so that small cases have several."""
    monkeypatch.setattr(logprob, "_CPU_BLOCK_BYTES", 8192)
    monkeypatch.setattr(logprob, "_MIN_COLUMNS", 16)
    projection.release_buffers()
    yield
    projection.release_buffers()


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    labels: Tensor


def make_case(
    tokens: int = 37,
    columns: int = 300,
    width: int = 24,
    *,
    vocab: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Case:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(columns, width, generator=generator)
    labels = torch.randint(vocab or columns, (tokens,), generator=generator)
    return Case(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels)


def reference(case: Case, temperature: float, vocab: int) -> tuple[Tensor, Tensor]:
    precise = torch.float64 if case.hidden.dtype == torch.float64 else torch.float32
    logits = case.hidden.to(precise) @ case.weight.to(precise)[:vocab].t() / temperature
    every = torch.log_softmax(logits, dim=-1)
    return every.gather(1, case.labels[:, None])[:, 0], -(every.exp() * every).sum(-1)


def gradients(case: Case, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    upstream = torch.linspace(-1.0, 2.0, len(logprobs), dtype=logprobs.dtype)
    left, right = torch.autograd.grad(logprobs, (case.hidden, case.weight), upstream)
    return left, right


@pytest.mark.parametrize("budget", [ALL, HALF, NOTHING])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocab", [300, 277, 3])
def test_equals_log_softmax(budget: int, temperature: float, vocab: int) -> None:
    case = make_case(vocab=vocab)
    found, entropies = linear_logprobs(
        case.hidden,
        case.weight,
        case.labels,
        temperature=temperature,
        vocab_size=vocab,
        entropy=True,
        budget_bytes=budget,
    )
    expected, expected_entropies = reference(case, temperature, vocab)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(entropies, expected_entropies, atol=5e-6, rtol=1e-6)
    assert entropies is not None
    assert not entropies.requires_grad
    hidden, weight = gradients(case, found)
    torch.testing.assert_close((hidden, weight), gradients(case, expected), atol=5e-5, rtol=1e-5)
    assert torch.equal(weight[vocab:], torch.zeros_like(weight[vocab:]))


@pytest.mark.parametrize("budget", [ALL, NOTHING])
def test_gradcheck(budget: int) -> None:
    case = make_case(5, 50, 4, dtype=torch.float64)

    def call(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight, case.labels, temperature=0.7, vocab_size=50, budget_bytes=budget)[0]

    assert torch.autograd.gradcheck(call, (case.hidden, case.weight))


@pytest.mark.parametrize("budget", [ALL, NOTHING])
def test_bfloat16_inputs_are_computed_in_float32(budget: int) -> None:
    case = make_case(dtype=torch.bfloat16)
    found, _ = linear_logprobs(case.hidden, case.weight, case.labels, budget_bytes=budget)
    expected, _ = reference(case, 1.0, 300)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-6)
    hidden, weight = gradients(case, found)
    assert hidden.dtype == weight.dtype == torch.bfloat16
    torch.testing.assert_close((hidden, weight), gradients(case, expected), atol=1e-2, rtol=1e-2)


def test_extreme_logits_stay_exact() -> None:
    case = make_case()
    with torch.no_grad():
        case.hidden.mul_(300.0)
    found, entropies = linear_logprobs(case.hidden, case.weight, case.labels, entropy=True)
    expected, expected_entropies = reference(
        Case(*(t.double() for t in (case.hidden, case.weight)), case.labels), 1.0, 300
    )
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), expected_entropies, atol=2e-3, rtol=1e-4)


def test_no_tokens_give_zero_gradients() -> None:
    case = make_case(0)
    found, entropies = linear_logprobs(case.hidden, case.weight, case.labels, entropy=True)
    assert found.shape == (0,)
    assert entropies is not None
    assert entropies.shape == (0,)
    found.sum().backward()
    assert case.weight.grad is not None
    assert torch.equal(case.weight.grad, torch.zeros_like(case.weight))


def test_only_the_gradients_asked_for() -> None:
    case = make_case()
    found, _ = linear_logprobs(case.hidden.detach(), case.weight, case.labels)
    (alone,) = torch.autograd.grad(found.sum(), (case.weight,))
    found, _ = linear_logprobs(case.hidden, case.weight, case.labels)
    torch.testing.assert_close(alone, torch.autograd.grad(found.sum(), (case.weight,))[0])


def test_a_second_backward_gives_the_same() -> None:
    case = make_case()
    found, _ = linear_logprobs(case.hidden, case.weight, case.labels)
    first = torch.autograd.grad(found.sum(), (case.hidden, case.weight), retain_graph=True)
    linear_logprobs(case.hidden, case.weight, case.labels)  # takes the buffer of the first call
    torch.testing.assert_close(torch.autograd.grad(found.sum(), (case.hidden, case.weight)), first)


def test_refuses_labels_outside_the_vocabulary() -> None:
    case = make_case()
    with pytest.raises(ValueError, match=r"1 labels are outside 0\.\.276"):
        linear_logprobs(case.hidden, case.weight, torch.tensor([277] + [0] * 36), vocab_size=277)
    with pytest.raises(ValueError, match="1 labels are outside"):
        linear_logprobs(case.hidden, case.weight, torch.tensor([-1] + [0] * 36))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_refuses_temperature(temperature: float) -> None:
    case = make_case()
    with pytest.raises(ValueError, match="temperature is"):
        linear_logprobs(case.hidden, case.weight, case.labels, temperature=temperature)


@pytest.mark.parametrize("entropy", [False, True])
def test_memory_stays_in_the_budget(entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "_CPU_BLOCK_BYTES", 2**20)
    tokens, columns, width = 512, 8192, 32
    case = make_case(tokens, columns, width)
    logits = tokens * columns * 4
    gradients_bytes = (tokens + columns) * width * 4

    def run(budget: int) -> int:
        projection.release_buffers()

        def step() -> None:
            found, _ = linear_logprobs(
                case.hidden, case.weight, case.labels, vocab_size=columns, entropy=entropy, budget_bytes=budget
            )
            torch.autograd.grad(found.sum(), (case.hidden, case.weight))

        return peak_bytes(step)

    small = 3 * 2**20  # scratch of a block (two with the entropy), and the statistics of blocks and tokens
    assert run(0) < gradients_bytes + small < logits / 2
    assert logits // 4 - 65536 < run(logits // 4) < gradients_bytes + small + logits // 4
    assert logits < run(logits) < gradients_bytes + small + logits


SHARDED = [(150, 300), (160, 271), (160, 100)]
"""Columns of a shard and the vocabulary; the last leaves the second shard with padding alone."""


def _shard(rank: int, folder: str) -> None:
    """One rank of the tensor-parallel group: every case, its results in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    logprob._CPU_BLOCK_BYTES, logprob._MIN_COLUMNS = 8192, 16
    results = []
    for columns, vocab in SHARDED:
        case = make_case(columns=2 * columns, vocab=vocab)
        shard = case.weight.detach()[rank * columns : (rank + 1) * columns].requires_grad_()
        found, entropies = linear_logprobs(
            case.hidden,
            shard,
            case.labels,
            temperature=0.8,
            vocab_size=vocab,
            group=dist.group.WORLD,
            entropy=True,
            budget_bytes=HALF,
        )
        hidden, weight = gradients(Case(case.hidden, shard, case.labels), found)
        dist.all_reduce(hidden)
        results.append((found.detach(), entropies, hidden, weight))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_tensor_parallel_shards_equal_the_whole(tmp_path: Path) -> None:
    mp.spawn(_shard, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        for (columns, vocab), found in zip(SHARDED, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            case = make_case(columns=2 * columns, vocab=vocab)
            expected, entropies = reference(case, 0.8, vocab)
            hidden, weight = gradients(case, expected)
            part = weight[rank * columns : (rank + 1) * columns]
            torch.testing.assert_close(found, (expected, entropies, hidden, part), atol=3e-5, rtol=1e-5)
