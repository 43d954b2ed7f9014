"""The transformers teacher against the model's own log-softmax, a row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph.batch import Batch
from rolegraph.columns import from_fixed_size_rows
from rolegraph.models import ModelConfig, ensure
from rolegraph.role import RoleContext
from roles.teacher.config import HuggingFaceTeacherConfig
from roles.teacher.huggingface import HuggingFaceTeacher

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def teacher() -> Iterator[HuggingFaceTeacher]:
    model = ensure(ModelConfig(maker="rolegraph.models.tiny.make"))
    role = HuggingFaceTeacher(
        HuggingFaceTeacherConfig(model=model, max_tokens_per_micro_batch=40), RoleContext(role="teacher", threads=1)
    )
    role.setup()
    yield role
    role.teardown()


def rows(**columns: Any) -> Batch:
    rng = np.random.default_rng(0)
    sizes = [(3, 5), (9, 1), (1, 12), (6, 0), (4, 7)]
    return Batch.from_columns(
        {
            "uid": [f"r{n}" for n in range(len(sizes))],
            "prompt_ids": [rng.integers(5, 200, prompt).astype(np.int32) for prompt, _ in sizes],
            "response_ids": [rng.integers(5, 200, response).astype(np.int32) for _, response in sizes],
            **columns,
        }
    )


def expected(teacher: HuggingFaceTeacher, prompt: Any, response: Any, temperature: float = 1.0) -> torch.Tensor:
    """[response tokens, vocabulary] natural log."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = teacher._model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1) if len(response) else logits[:0]


def test_every_row_has_the_scores_it_has_alone(teacher: HuggingFaceTeacher) -> None:
    batch = rows()
    scored = HuggingFaceTeacher.score(teacher, batch, topk=4, hidden=True, temperature=0.8)
    weight, info = HuggingFaceTeacher.head(teacher)
    head = torch.from_numpy(from_fixed_size_rows(weight["weight"]).copy())
    assert head.shape == (info.vocab_size, info.hidden_size)
    columns = [scored.lists(f"teacher_{name}") for name in ("token_logprobs", "ids", "logprobs", "hidden")]
    for prompt, response, *found in zip(batch.lists("prompt_ids"), batch.lists("response_ids"), *columns, strict=True):
        tokens, ids, values, hidden = (torch.from_numpy(np.array(one)) for one in found)
        truth = expected(teacher, prompt, response, 0.8)
        assert len(tokens) == len(ids) == len(hidden) == len(response)
        labels = torch.tensor(response, dtype=torch.long)[:, None]
        torch.testing.assert_close(tokens, truth.gather(1, labels)[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(values, truth.topk(4).values, rtol=0, atol=1e-5)
        assert torch.equal(ids.long(), truth.topk(4).indices)
        whole = torch.log_softmax(hidden @ head.T * info.scale / 0.8, -1)
        torch.testing.assert_close(whole, truth, rtol=0, atol=1e-5)


def test_the_teacher_reads_its_own_prompt_where_a_row_has_one(teacher: HuggingFaceTeacher) -> None:
    own = [[7, 8, 9, 10, 11, 12, 13], None, [6], None, [9] * 20]
    batch = rows(teacher_prompt_ids=own)
    scored = HuggingFaceTeacher.score(teacher, batch)
    assert scored.column_names == ["teacher_token_logprobs"]
    for prompt, other, response, tokens in zip(
        batch.lists("prompt_ids"), own, batch.lists("response_ids"), scored.lists("teacher_token_logprobs"), strict=True
    ):
        truth = expected(teacher, other or prompt, response)
        labels = torch.tensor(response, dtype=torch.long)[:, None]
        torch.testing.assert_close(torch.tensor(tokens), truth.gather(1, labels)[:, 0], rtol=0, atol=1e-5)
