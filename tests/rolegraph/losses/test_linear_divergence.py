"""Divergences from hidden states: equal to those of the projected logits, in chunks, over shards, within the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from rolegraph.losses import comparison, projection
from rolegraph.losses.divergence import Divergence, Head, generalized_jsd, linear_generalized_jsd
from tests.memory import peak_bytes
from tests.rolegraph.losses.divergences import BETAS, Case, apply, full, make_case

VOCAB = 300


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 32 columns and more, so that small cases have several."""
    monkeypatch.setattr(comparison, "CPU_BLOCK_BYTES", 2048)
    monkeypatch.setattr(comparison, "MIN_COLUMNS", 32)
    projection.release_buffers()
    yield
    projection.release_buffers()


def run(
    case: Case, *, beta: float = 0.3, chunk_size: int | None = 10, metrics: bool = False, vocab_size: int | None = VOCAB
) -> Divergence:
    return linear_generalized_jsd(
        case.hidden,
        case.weight,
        case.teacher_hidden,
        case.teacher_weight,
        beta=beta,
        temperature=0.7,
        weights=case.weights,
        vocab_size=vocab_size,
        chunk_size=chunk_size,
        metrics=metrics,
    )


def logits_of(case: Case) -> tuple[Tensor, Tensor]:
    return case.hidden @ case.weight.t(), case.teacher_hidden @ case.teacher_weight.t()


@pytest.mark.parametrize("beta", BETAS)
def test_equals_the_divergence_of_the_projected_logits(beta: float) -> None:
    case = make_case(dtype=torch.float64)
    found = run(case, beta=beta)
    expected = full(*logits_of(case), beta, 0.7, VOCAB)
    torch.testing.assert_close(found.values, expected, atol=1e-13, rtol=1e-12)
    assert not found.values.requires_grad
    loss = (expected * case.weights).sum()
    torch.testing.assert_close(found.loss, loss, atol=1e-13, rtol=1e-12)
    hidden, weight = torch.autograd.grad(found.loss * 3.0, case.leaves)
    torch.testing.assert_close((hidden, weight), torch.autograd.grad(loss * 3.0, case.leaves), atol=1e-12, rtol=1e-10)
    assert torch.equal(weight[VOCAB:], torch.zeros_like(weight[VOCAB:]))
    masked = case.weights == 0
    assert masked.any()
    assert torch.equal(hidden[masked], torch.zeros_like(hidden[masked]))


@pytest.mark.parametrize("beta", BETAS)
def test_float32_is_close_to_double_precision(beta: float) -> None:
    case = make_case()
    found = run(case, beta=beta)
    precise = replace(case, **{name: t.detach().double().requires_grad_() for name, t in vars(case).items()})
    expected = full(*logits_of(precise), beta, 0.7, VOCAB)
    torch.testing.assert_close(found.values.double(), expected, atol=3e-6, rtol=2e-6)
    gradients = torch.autograd.grad(found.loss, case.leaves)
    references = torch.autograd.grad((expected * precise.weights).sum(), precise.leaves)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient.double(), reference, atol=5e-6, rtol=1e-5)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    case = make_case(dtype=torch.bfloat16)
    found = run(case)
    precise = replace(case, **{name: t.detach().double().requires_grad_() for name, t in vars(case).items()})
    expected = full(*logits_of(precise), 0.3, 0.7, VOCAB)
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values.double(), expected, atol=3e-6, rtol=2e-6)
    gradients = torch.autograd.grad(found.loss, case.leaves)
    references = torch.autograd.grad((expected * precise.weights).sum(), precise.leaves)
    for gradient, reference in zip(gradients, references, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), reference, atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("soft_cap", [None, 2.5])
def test_gradcheck_with_bias_scale_and_soft_cap(
    beta: float, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "CPU_BLOCK_BYTES", 1)
    monkeypatch.setattr(comparison, "MIN_COLUMNS", 5)
    case = make_case(3, 14, 16, width=2, dtype=torch.float64)

    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        student = Head(weight, bias, scale=1.7, soft_cap=soft_cap)
        return linear_generalized_jsd(
            hidden,
            student,
            case.teacher_hidden,
            Head(case.teacher_weight, scale=0.5, soft_cap=30.0),
            beta=beta,
            temperature=0.8,
            weights=case.weights.double(),
            vocab_size=12,
            chunk_size=2,
        ).loss

    assert torch.autograd.gradcheck(call, (case.hidden, case.weight, case.bias))


def test_heads_are_applied_as_described() -> None:
    case = make_case(dtype=torch.float64)
    student = Head(case.weight, case.bias, scale=0.6, soft_cap=3.0)
    teacher = Head(case.teacher_weight, scale=1.3, soft_cap=20.0)
    found = linear_generalized_jsd(case.hidden, student, case.teacher_hidden, teacher, beta=0.3, chunk_size=9)
    logits = apply(student, case.hidden), apply(teacher, case.teacher_hidden)
    torch.testing.assert_close(found.values, full(*logits, 0.3, 1.0, 310), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 7, 36, 37, 1000, None])
def test_the_chunk_size_changes_nothing(chunk_size: int | None) -> None:
    case = make_case(dtype=torch.float64)
    found, whole = run(case, chunk_size=chunk_size, metrics=True), run(case, chunk_size=37, metrics=True)
    torch.testing.assert_close(found, whole, atol=1e-12, rtol=1e-12)
    gradients = (torch.autograd.grad(one.loss, case.leaves) for one in (found, whole))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


def test_no_weights_are_weights_of_one() -> None:
    case = make_case(dtype=torch.float64)
    found = linear_generalized_jsd(case.hidden, case.weight, case.teacher_hidden, case.teacher_weight, beta=0.5)
    torch.testing.assert_close(found.loss, found.values.sum())


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_equal_to_the_student_gives_exactly_zero(beta: float) -> None:
    case = make_case()
    found = linear_generalized_jsd(
        case.hidden, case.weight, case.hidden.detach(), case.weight.detach(), beta=beta, metrics=True, chunk_size=10
    )
    zeros = torch.zeros(37)
    assert torch.equal(found.values, zeros)
    assert found.metrics is not None
    assert torch.equal(found.metrics.forward_kl, zeros)
    assert torch.equal(found.metrics.reverse_kl, zeros)
    assert torch.equal(found.metrics.top_agreement, torch.ones(37))
    for gradient in torch.autograd.grad(found.loss, case.leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    shifted = linear_generalized_jsd(
        case.hidden, case.weight, case.hidden.detach().roll(1, 0), case.weight.detach(), beta=beta
    )
    assert shifted.loss > (0.001 if beta == 0.001 else 0.1) * 37


@pytest.mark.parametrize("beta", BETAS)
def test_metrics_are_those_of_the_logits(beta: float) -> None:
    case = make_case(dtype=torch.float64)
    with torch.no_grad():
        case.teacher_weight[:VOCAB, :16] += case.weight[:VOCAB]
        case.teacher_hidden[:, :16] += case.hidden
    metrics = run(case, beta=beta, metrics=True).metrics
    assert metrics is not None
    student, teacher = (logits[:, :VOCAB] / 0.7 for logits in logits_of(case))
    torch.testing.assert_close(metrics.forward_kl, full(student, teacher, 0.0, 1.0, VOCAB))
    torch.testing.assert_close(metrics.reverse_kl, full(student, teacher, 1.0, 1.0, VOCAB))
    entropy = torch.distributions.Categorical(logits=teacher).entropy()
    torch.testing.assert_close(metrics.teacher_entropy, entropy)
    agreement = (student.argmax(-1) == teacher.argmax(-1)).double()
    assert 0 < agreement.mean() < 1
    assert torch.equal(metrics.top_agreement, agreement)
    assert torch.equal(metrics.mass_covered, torch.ones_like(agreement))


def test_only_the_gradients_asked_for() -> None:
    case = make_case(dtype=torch.float64)
    both = torch.autograd.grad(run(case).loss, case.leaves)
    frozen = replace(case, weight=case.weight.detach())
    torch.testing.assert_close(torch.autograd.grad(run(frozen).loss, frozen.hidden)[0], both[0])
    frozen = replace(case, hidden=case.hidden.detach())
    torch.testing.assert_close(torch.autograd.grad(run(frozen).loss, frozen.weight)[0], both[1])
    with torch.no_grad():
        assert not run(case).loss.requires_grad


def test_a_second_backward_gives_the_same() -> None:
    case = make_case()
    loss = run(case).loss
    first = [gradient.clone() for gradient in torch.autograd.grad(loss, case.leaves, retain_graph=True)]
    torch.testing.assert_close(torch.autograd.grad(loss * 2.0, case.leaves), tuple(2 * part for part in first))


def test_no_tokens_give_zero_gradients() -> None:
    case = make_case(0)
    found = run(case, metrics=True)
    assert found.values.shape == (0,)
    found.loss.backward()
    assert case.weight.grad is not None
    assert torch.equal(case.weight.grad, torch.zeros_like(case.weight))


def test_memory_is_two_buffers_of_a_chunk_and_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "CPU_BLOCK_BYTES", 2**18)
    tokens, columns, width, chunk = 512, 8192, 32, 64
    case = make_case(tokens, columns, columns, width=width)
    logits, buffer = tokens * columns * 4, chunk * columns * 4
    gradients = (tokens + columns) * width * 4

    def step(metrics: bool) -> None:
        found = linear_generalized_jsd(
            case.hidden,
            case.weight,
            case.teacher_hidden,
            case.teacher_weight,
            beta=0.5,
            chunk_size=chunk,
            metrics=metrics,
        )
        torch.autograd.grad(found.loss, case.leaves)

    small = 2**20  # two blocks of 256 KiB and the statistics of blocks and tokens
    for metrics in (False, True):
        projection.release_buffers()
        assert 2 * buffer < peak_bytes(lambda metrics=metrics: step(metrics)) < 2 * buffer + gradients + small
    assert 2 * buffer + gradients + small < logits / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": -0.1}, "beta is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"chunk_size": 0}, "chunk_size is 0; a chunk has at least one token"),
        ({"vocab_size": 311}, r"vocab_size is 311, but the smaller of both heads has columns for 0\.\.309"),
        ({"weights": torch.ones(36)}, r"weights of shape \[36\] for 37 tokens"),
        ({"teacher_hidden": torch.zeros(36, 24)}, "student has 37 tokens and the teacher 36"),
        ({"teacher_hidden": torch.zeros(37, 23)}, r"shape \[37, 23\] do not fit a head of \[320, 24\]"),
        ({"student_head": Head(torch.zeros(310, 16), first=8)}, r"token ids 0\.\.7 are compared by no rank: cut"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    case = make_case()
    arguments: dict[str, object] = {
        "student_hidden": case.hidden,
        "student_head": case.weight,
        "teacher_hidden": case.teacher_hidden,
        "teacher_head": case.teacher_weight,
        "beta": 0.5,
    }
    with pytest.raises(ValueError, match=message):
        linear_generalized_jsd(**{**arguments, **change})  # type: ignore[arg-type]


def test_a_head_describes_itself_or_is_refused() -> None:
    weight = torch.zeros(6, 3)
    with pytest.raises(ValueError, match=r"a head of 6 rows has a bias of shape \[5\]"):
        Head(weight, torch.zeros(5))
    with pytest.raises(ValueError, match=r"soft_cap is 0\.0: null for none"):
        Head(weight, soft_cap=0.0)
    with pytest.raises(ValueError, match="6 rows cannot have 7 columns"):
        Head(weight, columns=7)
    with pytest.raises(ValueError, match=r"a head's weight is \[rows, h\]"):
        Head(weight[0])


# Rows of the student's shards, of the teacher's, their columns if padding is inside, first ids, vocabulary.
SHARDED: list[tuple[tuple[int, int], tuple[int, int], tuple[int, int] | None, int]] = [
    ((150, 150), (150, 150), None, 300),
    ((160, 160), (160, 140), None, 290),
    ((200, 110), (200, 120), None, 305),
    ((160, 160), (192, 192), (150, 145), 295),
    ((160, 160), (160, 160), None, 100),  # the second shard has padding alone
]


def shards(number: int, rank: int, case: Case) -> tuple[Head, Head, slice]:
    """One rank's heads, and which of the whole student's rows its columns are."""
    student, teacher, columns, _ = SHARDED[number]
    held = columns or student
    first = sum(held[:rank])

    def cut(weight: Tensor, rows: int, held: int) -> Tensor:
        own = weight.detach()[first : first + held]
        return torch.cat([own, torch.full((rows - len(own), weight.shape[1]), 9.0, dtype=own.dtype)])

    own = columns[rank] if columns else None
    return (
        Head(cut(case.weight, student[rank], held[rank]).requires_grad_(), columns=own),
        Head(cut(case.teacher_weight, teacher[rank], (columns or teacher)[rank]), columns=own),
        slice(first, first + held[rank]),
    )


def _shard(rank: int, folder: str) -> None:
    """One rank of the tensor-parallel group: every case, its results in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    comparison.CPU_BLOCK_BYTES, comparison.MIN_COLUMNS = 2048, 32
    results = []
    for number, (*_, vocab) in enumerate(SHARDED):
        for beta in (0.0, 0.3, 1.0):
            case = make_case(dtype=torch.float64)
            student, teacher, _ = shards(number, rank, case)
            found = linear_generalized_jsd(
                case.hidden,
                student,
                case.teacher_hidden,
                teacher,
                beta=beta,
                temperature=0.7,
                weights=case.weights,
                vocab_size=vocab,
                chunk_size=10,
                metrics=True,
                group=dist.group.WORLD,
            )
            hidden, weight = torch.autograd.grad(found.loss, (case.hidden, student.weight))
            dist.all_reduce(hidden)
            results.append((found.loss.detach(), found.values, tuple(found.metrics or ()), hidden, weight))
    wide = make_case(dtype=torch.float64)
    logits = [part.detach() for part in logits_of(wide)]
    own, other = (part[:, :200] if rank == 0 else part[:, 200:] for part in logits)
    own.requires_grad_()
    values = generalized_jsd(own, other, beta=0.3, temperature=0.7, vocab_size=VOCAB, group=dist.group.WORLD)
    (gradient,) = torch.autograd.grad((values * wide.weights).sum(), own)
    results.append((values.detach(), gradient))
    try:
        linear_generalized_jsd(
            wide.hidden,
            wide.weight[: 150 + 10 * rank],
            wide.teacher_hidden,
            wide.teacher_weight[: 160 - 10 * rank],
            beta=0.5,
            group=dist.group.WORLD,
        )
    except ValueError as error:
        results.append(str(error))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_tensor_parallel_shards_equal_the_whole(tmp_path: Path) -> None:
    mp.spawn(_shard, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        *found, logits, message = torch.load(tmp_path / f"{rank}.pt")
        for number, (*_, vocab) in enumerate(SHARDED):
            for beta in (0.0, 0.3, 1.0):
                case = make_case(dtype=torch.float64)
                whole = run(case, beta=beta, chunk_size=None, metrics=True, vocab_size=vocab)
                hidden, weight = torch.autograd.grad(whole.loss, case.leaves)
                loss, values, metrics, found_hidden, found_weight = found.pop(0)
                torch.testing.assert_close((loss, values), (whole.loss.detach(), whole.values))
                torch.testing.assert_close(metrics, tuple(whole.metrics or ()))
                torch.testing.assert_close(found_hidden, hidden)
                own = weight[shards(number, rank, case)[2]]
                torch.testing.assert_close(found_weight[: len(own)], own)
                assert torch.equal(found_weight[len(own) :], torch.zeros_like(found_weight[len(own) :]))
        student, teacher = logits_of(make_case(dtype=torch.float64))
        case, student = make_case(dtype=torch.float64), student.detach().requires_grad_()
        expected = full(student, teacher, 0.3, 0.7, VOCAB)
        (gradient,) = torch.autograd.grad((expected * case.weights).sum(), student)
        torch.testing.assert_close(logits[0], expected.detach())
        torch.testing.assert_close(logits[1], gradient[:, :200] if rank == 0 else gradient[:, 200:])
        assert message.startswith("token ids 150..159 are compared by no rank: cut the student's and the teacher's")
