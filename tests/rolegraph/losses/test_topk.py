"""Divergences from a teacher's top-K: formula, tail, order and gaps; from logits and hidden states; over shards."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolegraph.losses import projection
from rolegraph.losses.divergence import Head, TopkMode, generalized_jsd, linear_topk_divergence, topk_divergence
from tests.memory import peak_bytes
from tests.rolegraph.losses.divergences import (
    BETAS,
    Case,
    apply,
    full,
    make_case,
    teacher_topk,
    topk_reference,
)

MODES: list[TopkMode] = ["renormalize", "tail"]
VOCAB = 300


def teacher_of(case: Case, k: int, mode: TopkMode) -> tuple[Tensor, Tensor, float]:
    """Ids, logprobs and their temperature: 1 for renormalize, 0.7 for tail."""
    temperature = 0.7 if mode == "tail" else 1.0
    logits = (case.teacher_hidden @ case.teacher_weight.t())[:, :VOCAB]
    return *teacher_topk(logits, k, temperature), temperature


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [2, 20])
def test_equals_the_formula(k: int, beta: float, mode: TopkMode) -> None:
    case = make_case(dtype=torch.float64)
    ids, logprobs, taken = teacher_of(case, k, mode)
    logits = (case.hidden @ case.weight.t()).detach().requires_grad_()
    found = topk_divergence(
        logits, ids, logprobs, beta=beta, temperature=0.7, mode=mode, teacher_temperature=taken, vocab_size=VOCAB
    )
    expected = topk_reference(logits, ids, logprobs, beta, 0.7, mode, VOCAB)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    upstream = torch.linspace(-1.0, 2.0, len(found), dtype=torch.float64)
    gradients = [torch.autograd.grad(values, logits, upstream)[0] for values in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)
    assert torch.equal(gradients[0][:, VOCAB:], torch.zeros(37, 10, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta: float, mode: TopkMode) -> None:
    student, teacher = torch.randn(2, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids, logprobs = teacher_topk(teacher, 5)
    ids[1, 2], ids[3] = -1, -1
    assert torch.autograd.gradcheck(
        lambda x: topk_divergence(x, ids, logprobs, beta=beta, mode=mode), student.requires_grad_()
    )


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    beta=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    mode=st.sampled_from(MODES),
    vocab=st.integers(2, 50),
    temperature=st.sampled_from([0.5, 1.0]),
)
def test_k_of_the_whole_vocabulary_is_the_full_divergence(
    seed: int, beta: float, mode: TopkMode, vocab: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 6, vocab, generator=generator, dtype=torch.float64) * 3
    student.requires_grad_()
    taken = temperature if mode == "tail" else 1.0
    ids, logprobs = teacher_topk(teacher, vocab, taken, seed=seed)
    found = topk_divergence(
        student, ids, logprobs, beta=beta, temperature=temperature, mode=mode, teacher_temperature=taken
    )
    whole = generalized_jsd(student, teacher, beta=beta, temperature=temperature)
    torch.testing.assert_close(found, whole, atol=1e-11, rtol=1e-9)
    gradients = [torch.autograd.grad(values.sum(), student)[0] for values in (found, whole)]
    torch.testing.assert_close(*gradients, atol=1e-11, rtol=1e-9)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    beta=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    mode=st.sampled_from(MODES),
    k=st.integers(2, 9),
    scale=st.sampled_from([0.1, 3.0, 20.0]),
)
def test_never_negative_below_the_full_divergence_and_zero_for_equal_ones(
    seed: int, beta: float, mode: TopkMode, k: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 6, 40, generator=generator) * scale
    ids, logprobs = teacher_topk(teacher, k, seed=seed)
    found = topk_divergence(student, ids, logprobs, beta=beta, mode=mode)
    assert found.isfinite().all()
    assert found.min() >= -1e-6
    if mode == "tail":
        # Putting tokens together into one bin loses information, never adds any.
        assert (found <= generalized_jsd(student, teacher, beta=beta) * (1 + 1e-5) + 2e-4).all()
    equal = topk_divergence(teacher, ids, logprobs, beta=beta, mode=mode)
    # The least mass of a tail, 1.2e-7, times its log against a student that leaves e^-60.
    torch.testing.assert_close(equal, torch.zeros(6), atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_entries_that_are_not_there_count_nothing(mode: TopkMode) -> None:
    case = make_case(dtype=torch.float64)
    ids, logprobs, taken = teacher_of(case, 8, mode)
    logits = (case.hidden @ case.weight.t()).detach().requires_grad_()
    options = {"beta": 0.3, "temperature": 0.7, "mode": mode, "teacher_temperature": taken, "vocab_size": VOCAB}
    expected = topk_divergence(logits, ids, logprobs, **options)  # type: ignore[arg-type]
    padded_ids = torch.cat([torch.full_like(ids[:, :1], -1), ids, torch.full_like(ids[:, :2], -100)], -1)
    padded = torch.cat([torch.full_like(logprobs[:, :1], math.nan), logprobs, torch.zeros_like(logprobs[:, :2])], -1)
    found = topk_divergence(logits, padded_ids, padded, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), logits)[0])
    if mode == "renormalize":
        nothing = topk_divergence(logits, torch.full_like(ids, -1), logprobs, **options)  # type: ignore[arg-type]
        assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize("beta", BETAS)
def test_logprobs_that_leave_nothing_for_the_tail_stay_finite(beta: float) -> None:
    """A sure teacher in float32: the probabilities of its top-K add up to 1 or a little more."""
    student = torch.zeros(2, 9, requires_grad=True)
    ids = torch.tensor([[3, 1], [3, 1]])
    logprobs = torch.tensor([[0.0, -20.0], [math.log(0.5), math.log(0.5) + 1e-7]])
    found = topk_divergence(student, ids, logprobs, beta=beta, mode="tail")
    assert found.isfinite().all()
    assert found.min() > 0
    assert torch.autograd.grad(found.sum(), student)[0].isfinite().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk_size", [None, 10])
def test_hidden_states_give_the_same_as_logits(beta: float, mode: TopkMode, chunk_size: int | None) -> None:
    case = make_case(dtype=torch.float64)
    ids, logprobs, taken = teacher_of(case, 12, mode)
    ids[5, 3] = -1
    head = Head(case.weight, case.bias, scale=1.3, soft_cap=4.0)
    found = linear_topk_divergence(
        case.hidden,
        head,
        ids,
        logprobs,
        beta=beta,
        temperature=0.7,
        mode=mode,
        teacher_temperature=taken,
        weights=case.weights,
        vocab_size=VOCAB,
        chunk_size=chunk_size,
        metrics=True,
    )
    logits = apply(head, case.hidden)
    values = topk_divergence(
        logits, ids, logprobs, beta=beta, temperature=0.7, mode=mode, teacher_temperature=taken, vocab_size=VOCAB
    )
    loss = (values * case.weights).sum()
    torch.testing.assert_close((found.loss, found.values), (loss, values.detach()))
    leaves = (case.hidden, case.weight, case.bias)
    torch.testing.assert_close(torch.autograd.grad(found.loss * 3, leaves), torch.autograd.grad(loss * 3, leaves))
    assert found.metrics is not None
    chosen = {0.0: found.metrics.forward_kl, 1.0: found.metrics.reverse_kl}
    torch.testing.assert_close(chosen.get(beta, found.values), found.values)
    mass = torch.where(ids >= 0, logprobs.exp(), 0.0).sum(-1)
    torch.testing.assert_close(found.metrics.mass_covered, mass)


def test_metrics_of_the_tokens_compared() -> None:
    student = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))
    ids = torch.tensor([[2, 0], [2, 0]])
    logprobs = torch.log(torch.tensor([[0.6, 0.2], [0.6, 0.2]]))
    metrics = linear_topk_divergence(student, torch.eye(4), ids, logprobs, beta=0.5, metrics=True).metrics
    assert metrics is not None
    torch.testing.assert_close(metrics.mass_covered, torch.tensor([0.8, 0.8]))
    torch.testing.assert_close(metrics.top_agreement, torch.tensor([1.0, 0.0]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    torch.testing.assert_close(metrics.teacher_entropy, torch.tensor([entropy, entropy]))
    torch.testing.assert_close(metrics.forward_kl[0], torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(metrics.forward_kl[1], torch.tensor(0.75 * math.log(2.25) - 0.25 * math.log(8 / 3)))


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_hidden_states_are_computed_in_float32(mode: TopkMode) -> None:
    case = make_case(dtype=torch.bfloat16)
    logits = (case.teacher_hidden.float() @ case.teacher_weight.float().t())[:, :VOCAB]
    ids, logprobs = teacher_topk(logits, 12)
    found = linear_topk_divergence(case.hidden, case.weight, ids, logprobs, beta=0.3, mode=mode, vocab_size=VOCAB)
    precise = [leaf.detach().double().requires_grad_() for leaf in case.leaves]
    expected = topk_reference(precise[0] @ precise[1].t(), ids, logprobs, 0.3, 1.0, mode, VOCAB)
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values.double(), expected, atol=3e-6, rtol=1e-5)
    gradients = torch.autograd.grad(found.loss, case.leaves)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected.sum(), precise), strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), reference, atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_give_zero_gradients(mode: TopkMode) -> None:
    case = make_case(0)
    found = linear_topk_divergence(
        case.hidden, case.weight, torch.zeros(0, 5, dtype=torch.long), torch.zeros(0, 5), beta=0.3, mode=mode
    )
    found.loss.backward()
    assert case.weight.grad is not None
    assert torch.equal(case.weight.grad, torch.zeros_like(case.weight))


@pytest.mark.parametrize("mode", MODES)
def test_memory_is_one_buffer_of_a_chunk_and_the_gradients(mode: TopkMode) -> None:
    tokens, columns, width, chunk, k = 512, 8192, 32, 64, 16
    case = make_case(tokens, columns, 50, width=width)
    ids = torch.rand(tokens, columns).topk(k).indices
    logprobs = torch.log_softmax(torch.randn(tokens, k), -1) - 0.5

    def step() -> None:
        found = linear_topk_divergence(case.hidden, case.weight, ids, logprobs, beta=0.5, mode=mode, chunk_size=chunk)
        torch.autograd.grad(found.loss, case.leaves)

    buffer = chunk * (columns if mode == "tail" else k * width) * 4
    gradients = (tokens + columns) * width * 4
    small = 3 * 2**19  # exponentials of some columns, ids and what is computed of K numbers a token
    projection.release_buffers()
    assert buffer < peak_bytes(step) < buffer + gradients + small < tokens * columns * 4 / 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 2.0}, "beta is 2.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"teacher_temperature": -1.0}, "teacher_temperature is -1.0"),
        ({"mode": "truncate"}, "mode is 'truncate'; choose renormalize or tail"),
        ({"mode": "tail", "temperature": 0.7}, r"tail at temperature 0\.7 with teacher logprobs of 1\.0: what"),
        ({"teacher_ids": torch.tensor([[1, 4, 9], [2, 3, 1]])}, r"1 teacher ids are outside 0\.\.8, the vocabulary"),
        ({"teacher_ids": torch.tensor([[1, 4, 2], [2, 3, 2]])}, "1 rows of teacher ids, row 1 first, name an id twice"),
        ({"teacher_logprobs": torch.zeros(2, 2)}, r"ids of shape \[2, 3\] and logprobs of \[2, 2\]"),
        ({"student_logits": torch.zeros(3, 9)}, "student has 3 tokens and the teacher 2"),
        (
            {"teacher_ids": torch.tensor([[1], [2]]), "teacher_logprobs": torch.zeros(2, 1)},
            r"K = 1 renormalised carries no signal \(both sides are 1\): use mode tail, or K >= 2",
        ),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "student_logits": torch.zeros(2, 9),
        "teacher_ids": torch.tensor([[1, 4, 2], [2, 3, 1]]),
        "teacher_logprobs": torch.full((2, 3), -2.0),
        "beta": 0.5,
    }
    with pytest.raises(ValueError, match=message):
        topk_divergence(**{**arguments, **change})  # type: ignore[arg-type]


def test_one_token_and_a_tail_is_a_signal() -> None:
    student = torch.zeros(1, 9, requires_grad=True)
    found = topk_divergence(student, torch.tensor([[4]]), torch.tensor([[-0.1]]), beta=0.0, mode="tail")
    teacher = torch.tensor([math.exp(-0.1), 1 - math.exp(-0.1)])
    torch.testing.assert_close(found[0], (teacher * (teacher / torch.tensor([1 / 9, 8 / 9])).log()).sum())


SHARDED = [((150, 160), 300), ((200, 110), 290), ((210, 100), 150)]
"""Rows of both shards and the vocabulary; the last leaves the second shard with padding alone."""


def outcome(case: Case, own: slice, mode: TopkMode, vocab: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Values and gradients of both functions for some rows of the head."""
    logits = (case.teacher_hidden @ case.teacher_weight.t())[:, :vocab]
    ids, logprobs = teacher_topk(logits, 12)
    weight = case.weight.detach()[own].clone().requires_grad_()
    found = linear_topk_divergence(
        case.hidden, weight, ids, logprobs, beta=0.3, mode=mode, vocab_size=vocab, group=group, chunk_size=10
    )
    hidden, gradient = torch.autograd.grad(found.loss, (case.hidden, weight))
    given = (case.hidden @ weight.t()).detach().requires_grad_()
    values = topk_divergence(given, ids, logprobs, beta=0.3, mode=mode, vocab_size=vocab, group=group)
    (logits_gradient,) = torch.autograd.grad((values * case.weights).sum(), given)
    if group is not None:
        dist.all_reduce(hidden, group=group)
    return [found.loss.detach(), found.values, values.detach(), hidden, gradient, logits_gradient]


def _shard(rank: int, folder: str) -> None:
    """One rank of the tensor-parallel group: every case, its results in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = []
    for rows, vocab in SHARDED:
        for mode in MODES:
            own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
            results.append(outcome(make_case(dtype=torch.float64), own, mode, vocab, dist.group.WORLD))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_tensor_parallel_shards_equal_the_whole(tmp_path: Path) -> None:
    mp.spawn(_shard, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for rows, vocab in SHARDED:
            for mode in MODES:
                own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
                *same, gradient, logits_gradient = outcome(
                    make_case(dtype=torch.float64), slice(None), mode, vocab, None
                )
                expected = [*same, gradient[own], logits_gradient[:, own]]
                torch.testing.assert_close(found.pop(0), expected)


def test_full_reference_is_its_own_formula() -> None:
    """The reference that all these tests lean on, by hand: two tokens, beta 0.25."""
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    mixture = [0.25 * 0.9 + 0.75 * 0.5, 0.25 * 0.1 + 0.75 * 0.5]
    expected = 0.25 * (0.9 * math.log(0.9 / mixture[0]) + 0.1 * math.log(0.1 / mixture[1]))
    expected += 0.75 * 0.5 * (math.log(0.5 / mixture[0]) + math.log(0.5 / mixture[1]))
    found = full(student, teacher, 0.25, 1.0, 2)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), atol=1e-7, rtol=1e-6)
