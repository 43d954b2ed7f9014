"""The distillation loss on plain tensors: what it hands to the divergences, and what it makes of their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rolegraph.losses.distill import DistillLoss, in_vocabulary
from rolegraph.losses.divergence import Head, generalized_jsd, topk_divergence
from rolegraph.losses.types import LossOutput, States, TokenBatch, Totals

TOKENS, HIDDEN, VOCAB, PADDED, WIDER = 50, 12, 40, 48, 45
"""The student's ids and the rows of its head; a teacher of the same tokenizer with a wider table."""
TEMPERATURE = 0.7


def states(columns: int, vocab_size: int, seed: int) -> States:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw)
    return States(hidden, Head(torch.randn(columns, HIDDEN, generator=draw)), vocab_size, TEMPERATURE)


def logits(of: States) -> Tensor:
    return of.hidden @ of.head.weight.T


def batch(teacher: bool = True, **columns: Tensor) -> TokenBatch:
    """Two rows, of which the first has 40 tokens; every seventh token is not the policy's own."""
    mask = torch.ones(TOKENS)
    mask[::7] = 0.0
    return TokenBatch(
        logprobs=-torch.rand(TOKENS, generator=torch.Generator().manual_seed(3)),
        mask=mask,
        row=(torch.arange(TOKENS) >= 40).long(),
        rows=2,
        columns=columns,
        totals=Totals(torch.tensor(2.0 * float(mask.sum())), torch.tensor(4.0)),
        student=states(PADDED, VOCAB, 1),
        teacher=states(WIDER, WIDER, 2) if teacher else None,
    )


def mean(output: LossOutput, name: str) -> float:
    stat = output.stats[name]
    assert stat.weight is not None
    return float(stat.value / stat.weight)


def test_whole_vocabularies_over_the_ids_that_both_have() -> None:
    tokens = batch()
    assert tokens.student is not None
    assert tokens.teacher is not None
    output = DistillLoss(beta=0.3, sft_alpha=0.2)(tokens)
    student, teacher = logits(tokens.student)[:, :VOCAB], logits(tokens.teacher)[:, :VOCAB]
    values = generalized_jsd(student, teacher, beta=0.3, temperature=TEMPERATURE)
    expected = ((values - 0.2 * tokens.logprobs) * tokens.mask).sum() / tokens.totals.tokens
    torch.testing.assert_close(output.loss, expected)
    assert mean(output, "divergence") == pytest.approx(
        float((values * tokens.mask).sum() / tokens.mask.sum()), rel=1e-4
    )
    assert mean(output, "cross_entropy") == pytest.approx(
        float(-(tokens.logprobs * tokens.mask).sum() / tokens.mask.sum()), rel=1e-5
    )


def test_metrics_say_how_far_apart_both_are() -> None:
    tokens = batch()
    assert tokens.student is not None
    assert tokens.teacher is not None
    output = DistillLoss(beta=0.5)(tokens)
    one = torch.log_softmax(logits(tokens.student)[:, :VOCAB] / TEMPERATURE, -1)
    two = torch.log_softmax(logits(tokens.teacher)[:, :VOCAB] / TEMPERATURE, -1)
    expected = {
        "kl/forward": (two.exp() * (two - one)).sum(-1),
        "kl/reverse": (one.exp() * (one - two)).sum(-1),
        "teacher/entropy": -(two.exp() * two).sum(-1),
        "teacher/top_agreement": (one.argmax(-1) == two.argmax(-1)).float(),
        "teacher/mass_covered": torch.ones(TOKENS),
    }
    for name, values in expected.items():
        assert mean(output, name) == pytest.approx(float((values * tokens.mask).sum() / tokens.mask.sum()), rel=1e-4)


def test_metrics_by_position_count_from_the_start_of_each_response() -> None:
    output = DistillLoss(beta=0.5)(batch())
    weights = {name: float(stat.weight) for name, stat in output.stats.items() if stat.weight is not None}
    first = [n for n in range(TOKENS) if (n < 32 or n >= 40) and n % 7]
    second = [n for n in range(32, 40) if n % 7]
    assert weights["divergence/tokens_0_31"] == len(first)
    assert weights["divergence/tokens_32_127"] == len(second)
    assert [name for name in output.stats if "tokens_" in name] == [
        "divergence/tokens_0_31",
        "divergence/tokens_32_127",
    ]


@pytest.mark.parametrize("mode", ["renormalize", "tail"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_ids_that_the_student_does_not_have_are_left_out_of_both_sides(mode: Any, beta: float) -> None:
    tokens = batch()
    assert tokens.student is not None
    assert tokens.teacher is not None
    whole = torch.log_softmax(logits(tokens.teacher) / TEMPERATURE, -1)
    everything = whole.topk(WIDER)
    assert int((everything.indices >= VOCAB).sum()) > 0
    told = batch(teacher=False, teacher_ids=everything.indices.int(), teacher_logprobs=everything.values)
    found = DistillLoss(beta=beta, topk_mode=mode)(told)
    values = generalized_jsd(
        logits(tokens.student)[:, :VOCAB], logits(tokens.teacher)[:, :VOCAB], beta=beta, temperature=TEMPERATURE
    )
    expected = (values * tokens.mask).sum() / tokens.totals.tokens
    torch.testing.assert_close(found.loss, expected, rtol=1e-3, atol=1e-5)


def test_ids_of_both_are_compared_as_they_are() -> None:
    tokens = batch()
    assert tokens.teacher is not None
    assert tokens.student is not None
    best = torch.log_softmax(logits(tokens.teacher)[:, :VOCAB] / TEMPERATURE, -1).topk(5)
    ids, logprobs = in_vocabulary(best.indices.int(), best.values, VOCAB)
    assert torch.equal(ids, best.indices)
    assert torch.equal(logprobs, best.values)
    told = batch(teacher=False, teacher_ids=best.indices.int(), teacher_logprobs=best.values)
    found = DistillLoss(beta=0.3, topk_mode="tail")(told)
    student = logits(tokens.student)[:, :VOCAB]
    values = topk_divergence(
        student, ids, logprobs, beta=0.3, temperature=TEMPERATURE, mode="tail", teacher_temperature=TEMPERATURE
    )
    torch.testing.assert_close(found.loss, (values * tokens.mask).sum() / tokens.totals.tokens)


def test_a_position_at_which_no_id_of_the_teacher_is_the_students_teaches_nothing() -> None:
    ids = torch.full((TOKENS, 2), VOCAB, dtype=torch.int32)
    ids[:, 1] += 1
    logprobs = torch.full((TOKENS, 2), -0.6931472)
    told = batch(teacher=False, teacher_ids=ids, teacher_logprobs=logprobs)
    output = DistillLoss(beta=0.5, topk_mode="renormalize")(told)
    assert float(output.loss) == 0.0
    assert all(torch.isfinite(stat.value) for stat in output.stats.values())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (DistillLoss(), "the rows have no teacher_hidden: the teacher has to score them with hidden=true first"),
        (DistillLoss(topk_mode="tail"), "the rows have no column teacher_ids: the teacher has to score them with topk"),
    ],
)
def test_what_the_teacher_did_not_give_is_named(loss: DistillLoss, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(batch(teacher=False))
