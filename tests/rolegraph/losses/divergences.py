"""Double-precision references of the divergences, as the formulas stand, and random cases for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rolegraph.losses.divergence import Head

BETAS = [0.0, 0.001, 0.3, 0.5, 1.0]


def reference(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """[tokens] from log-probabilities [tokens, n] in float64; entries of probability 0 on both sides count nothing."""
    assert student.dtype == teacher.dtype == torch.float64
    beta_log, rest_log = torch.tensor([beta, 1 - beta], dtype=torch.float64).log()
    mixture = torch.logaddexp(teacher + beta_log, student + rest_log)

    def kl(left: Tensor, right: Tensor) -> Tensor:
        return torch.where(left > -torch.inf, left.exp() * (left - right), 0.0).sum(-1)

    if beta in (0.0, 1.0):
        return kl(teacher, student) if beta == 0.0 else kl(student, teacher)
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def full(student_logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float, vocab: int) -> Tensor:
    """[tokens] over the first `vocab` ids of logits, in float64."""
    sides = (torch.log_softmax(x.double()[:, :vocab] / temperature, -1) for x in (student_logits, teacher_logits))
    return reference(*sides, beta)


def apply(head: Head, hidden: Tensor) -> Tensor:
    """The logits of a head as documented, in float64."""
    logits = hidden.double() @ head.weight.double().t()
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * head.scale
    return logits if head.soft_cap is None else head.soft_cap * torch.tanh(logits / head.soft_cap)


@dataclass
class Case:
    """Student and teacher of different widths and paddings."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    weights: Tensor
    """Of the tokens, some of them 0."""

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight


def make_case(
    tokens: int = 37,
    rows: int = 310,
    teacher_rows: int = 320,
    *,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    case = Case(
        draw(tokens, width).to(dtype).requires_grad_(),
        (draw(rows, width) * 0.4).to(dtype).requires_grad_(),
        draw(rows).to(dtype).requires_grad_(),
        draw(tokens, width + 8).to(dtype),
        (draw(teacher_rows, width + 8) * 0.4).to(dtype),
        torch.rand(tokens, generator=generator),
    )
    case.weights[1::5] = 0.0
    return case


def teacher_topk(
    logits: Tensor, k: int, temperature: float = 1.0, *, shuffle: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Ids and logprobs [tokens, k] of the teacher, in random order."""
    logprobs, ids = torch.log_softmax(logits / temperature, -1).topk(k)
    if shuffle:
        order = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)
        ids, logprobs = ids.gather(1, order), logprobs.gather(1, order)
    return ids, logprobs


def topk_reference(
    logits: Tensor, ids: Tensor, logprobs: Tensor, beta: float, temperature: float, mode: str, vocab: int
) -> Tensor:
    """[tokens] from student logits; teacher logprobs of temperature 1 (renormalize) or `temperature` (tail)."""
    student = torch.log_softmax(logits.double()[:, :vocab] / temperature, -1)
    picked, given = student.gather(1, ids), logprobs.double()
    if mode == "renormalize":
        return reference(torch.log_softmax(picked, -1), torch.log_softmax(given / temperature, -1), beta)
    outside = torch.logsumexp(student.scatter(1, ids, -torch.inf), -1, keepdim=True)
    rest = torch.log1p(-given.exp().sum(-1, keepdim=True))
    return reference(torch.cat([picked, outside], -1), torch.cat([given, rest], -1), beta)
