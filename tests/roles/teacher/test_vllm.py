"""VLLMTeacher on a tiny model: one engine for the whole module, in a process of its own, beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolegraph.batch import Batch
from rolegraph.errors import BatchError, ConfigError, TurnError
from rolegraph.role import RoleContext
from roles.teacher.config import HuggingFaceTeacherConfig, VLLMTeacherConfig
from roles.teacher.huggingface import HuggingFaceTeacher
from tests.models import add_tokenizer, make_checkpoint
from tests.roles.teacher.engine_process import engine_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

VOCABULARY, TOKENIZER = 400, 300
TOPK = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose vocabulary is wider than its tokenizer's."""
    path = tmp_path_factory.mktemp("teacher")
    made = make_checkpoint(path, "qwen3", vocab_size=VOCABULARY, initializer_range=0.1)
    add_tokenizer(path, TOKENIZER)
    return made


@pytest.fixture(scope="module")
def teacher(folder: str) -> Iterator[Any]:
    with engine_process(model=folder) as running:
        yield running


@pytest.fixture(scope="module")
def peer(folder: str) -> HuggingFaceTeacher:
    role = HuggingFaceTeacher(HuggingFaceTeacherConfig(model=folder), RoleContext(role="teacher", threads=1))
    role.setup()
    return role


def rows(**columns: Any) -> Batch:
    """Of many lengths; r4 and r6 are the same pair, r5 has r4's tokens cut elsewhere, r3 and r7 have no response."""
    rng = np.random.default_rng(0)
    sizes = [(3, 5), (40, 30), (1, 12), (6, 0), (4, 7), (5, 6), (4, 7), (1, 0)]
    prompts = [rng.integers(5, VOCABULARY, prompt).astype(np.int32) for prompt, _ in sizes]
    responses = [rng.integers(5, VOCABULARY, response).astype(np.int32) for _, response in sizes]
    prompts[6], responses[6] = prompts[4], responses[4]
    prompts[5], responses[5] = np.append(prompts[4], responses[4][0]), responses[4][1:]
    return Batch.from_columns(
        {"uid": [f"r{n}" for n in range(len(sizes))], "prompt_ids": prompts, "response_ids": responses, **columns}
    )


def agree(found: Batch, truth: Batch, responses: Batch) -> None:
    """Logprobs to 1e-4 wherever they stand, and ids but for those whose logprobs are as close as that."""
    found.merge(responses.select(["uid", "response_ids"])).check_alignment()
    for name in ("teacher_token_logprobs", "teacher_logprobs"):
        ours, theirs = found.ragged(name), truth.ragged(name)
        np.testing.assert_array_equal(ours.offsets, theirs.offsets)
        np.testing.assert_allclose(ours.values, theirs.values, rtol=0, atol=1e-4)
    differ = found.ragged("teacher_ids").values != truth.ragged("teacher_ids").values
    values = truth.ragged("teacher_logprobs").values
    near = np.zeros(differ.shape, bool)
    close = np.abs(np.diff(values, axis=1)) < 1e-4
    near[:, 1:] |= close
    near[:, :-1] |= close
    near[:, -1] = True  # the tie may be with the token after the last
    assert not (differ & ~near).any()
    assert differ.mean() < 0.05


def test_it_agrees_with_transformers_on_the_same_weights(teacher: Any, peer: HuggingFaceTeacher) -> None:
    batch = rows()
    found = teacher.score(batch, topk=TOPK)
    assert found.column_names == ["teacher_token_logprobs", "teacher_ids", "teacher_logprobs"]
    agree(found, HuggingFaceTeacher.score(peer, batch, topk=TOPK), batch)
    assert found.ragged("teacher_ids").values.max() >= TOKENIZER, "ids beyond the tokenizer's are the model's too"


def test_the_teacher_reads_its_own_prompt_where_a_row_has_one(teacher: Any, peer: HuggingFaceTeacher) -> None:
    batch = rows(teacher_prompt_ids=[[7] * 9, None, [6], [5], None, [9] * 20, [8], None])
    found = teacher.score(batch, topk=TOPK)
    agree(found, HuggingFaceTeacher.score(peer, batch, topk=TOPK), batch)
    tokens = found.lists("teacher_token_logprobs")
    assert np.abs(tokens[4] - tokens[6]).max() > 1e-3, "the same row but for the prompt of the teacher's own"


def test_only_token_logprobs_and_nothing_at_all(teacher: Any) -> None:
    batch = rows()
    found = teacher.score(batch)
    assert found.column_names == ["teacher_token_logprobs"]
    whole = teacher.score(batch, topk=TOPK).ragged("teacher_token_logprobs").values
    np.testing.assert_allclose(found.ragged("teacher_token_logprobs").values, whole, rtol=0, atol=1e-5)
    empty = teacher.score(batch.take([3, 7]), topk=3)
    assert [len(each) for each in empty.lists("teacher_logprobs")] == [0, 0]
    assert len(teacher.score(batch.take([]), topk=3)) == 0


def test_the_same_pair_is_scored_once(teacher: Any) -> None:
    batch = rows()
    before = teacher.requests()
    found = teacher.score(batch, topk=3)
    assert teacher.requests() - before == 5, "r0, r1, r2, r4 and r5"
    ids, logprobs = found.lists("teacher_ids"), found.lists("teacher_logprobs")
    assert (ids[4] == ids[6]).all()
    assert (logprobs[4] == logprobs[6]).all()
    np.testing.assert_allclose(logprobs[5], logprobs[4][1:], rtol=0, atol=1e-5)


def test_more_tokens_than_there_are(teacher: Any) -> None:
    batch = rows().take([0, 3])
    found = teacher.score(batch, topk=VOCABULARY + 3)
    ids, logprobs = found.lists("teacher_ids")[0], found.lists("teacher_logprobs")[0]
    assert ids.shape == (5, VOCABULARY + 3)
    assert (np.sort(ids[:, :VOCABULARY], axis=1) == np.arange(VOCABULARY)).all(), "each once"
    assert (ids[:, VOCABULARY:] == -1).all()
    assert np.isneginf(logprobs[:, VOCABULARY:]).all()
    np.testing.assert_allclose(np.exp(logprobs[:, :VOCABULARY]).sum(axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "options", "error", "words"),
    [
        ({}, {"hidden": True}, ConfigError, ["teacher is a vLLM engine", "gkd_logits_topk=64", "teacher=huggingface"]),
        ({}, {"temperature": 0.7}, ConfigError, ["temperature 0.7", "algorithm.temperature=1"]),
        ({"prompt_ids": [[]]}, {}, BatchError, ["row a", "prompt is empty"]),
        ({"response_ids": [[5] * 94]}, {}, BatchError, ["row a", "max_model_len=96", "raise teacher.max_model_len"]),
        ({"response_ids": [[5, VOCABULARY]]}, {}, BatchError, ["row a", "response has token id 400"]),
        ({"prompt_ids": [[-1]]}, {}, BatchError, ["row a", "prompt has token id -1"]),
    ],
)
def test_what_it_cannot_score_is_named(
    teacher: Any, changes: dict[str, Any], options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    columns: dict[str, Any] = {"uid": ["a"], "prompt_ids": [[5, 6]], "response_ids": [[7]]}
    with pytest.raises(error) as caught:
        teacher.score(Batch.from_columns(columns | changes), topk=2, **options)
    assert all(word in str(caught.value) for word in words), caught.value
    fits = Batch.from_columns({**columns, "response_ids": [[5] * 93]})
    assert len(teacher.score(fits, topk=2)) == 1, "it goes on"


def test_it_has_no_head_and_steps_aside(teacher: Any) -> None:
    with pytest.raises(ConfigError, match="neither hidden states nor its output head"):
        teacher.head()
    teacher.offload()
    with pytest.raises(TurnError, match=r"call onload\(\) before score"):
        teacher.score(rows(), topk=2)
    teacher.onload()
    teacher.score(rows(), topk=2)


def test_two_tensor_parallel_workers(folder: str, peer: HuggingFaceTeacher) -> None:
    with engine_process(model=folder, tensor_parallel_size=2) as running:
        batch = rows()
        agree(running.score(batch, topk=TOPK), HuggingFaceTeacher.score(peer, batch, topk=TOPK), batch)


def test_a_limit_on_tokens_a_position(tmp_path: Path) -> None:
    from roles.teacher.vllm import VLLMTeacher

    role = VLLMTeacher(VLLMTeacherConfig(model=str(tmp_path), max_logprobs=4), RoleContext(role="teacher_math"))
    with pytest.raises(ConfigError, match=r"asked for 5 tokens a position, and teacher_math\.max_logprobs=4"):
        VLLMTeacher.score(role, rows(), topk=5)
