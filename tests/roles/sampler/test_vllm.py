"""VLLMSampler on a tiny model: one engine for the whole module, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rolegraph.errors import TurnError
from rolegraph.interfaces import SamplingParams
from tests.models import add_tokenizer, make_checkpoint
from tests.roles.rollout.replica import ids_of, logprob_error, prompts
from tests.roles.sampler.engine_process import engine_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODEL_IDS, TOKENIZER_IDS = 400, 300
ENDS = [1, *range(100, 110)]
SAMPLING = SamplingParams(n=3, temperature=0.7, max_tokens=12, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=MODEL_IDS, initializer_range=0.1)
    add_tokenizer(made, TOKENIZER_IDS, eos=ENDS)
    return made


@pytest.fixture(scope="module")
def role(folder: str) -> Iterator[Any]:
    with engine_process(model=folder) as running:
        yield running


def test_the_columns_and_the_logprobs(role: Any, folder: str) -> None:
    batch = role.sample(prompts(), replace(SAMPLING, step=7))
    batch.check_alignment()
    assert batch["uid"].to_pylist()[:4] == ["row-0", "row-0", "row-0", "row-1"]
    assert batch["repeat"].to_pylist() == [0, 1, 2] * 5
    assert batch["answer"].to_pylist()[::3] == list(range(5))
    assert set(batch.numpy("step")) == {7}
    assert "weight_version" not in batch
    assert batch["sample_fault"].to_pylist() == [None] * 15
    assert logprob_error(folder, batch, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4
    texts = batch["response_text"].to_pylist()
    assert all(isinstance(text, str) and "<|end|>" not in text for text in texts)
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(f"{folder}/tokenizer.json").decode_batch(ids_of(batch))
    assert texts == read


def test_what_is_missing_is_drawn_as_it_would_have_been(role: Any) -> None:
    whole = ids_of(role.sample(prompts(), SAMPLING))
    assert len({tuple(row) for row in whole}) == 15
    given = prompts().with_columns({"repeats": [[2], [], [1, 0], [], []]})
    rest = role.sample(given, replace(SAMPLING, step=9))
    assert ids_of(rest) == [whole[2], whole[7], whole[6]]
    assert rest["repeat"].to_pylist() == [2, 1, 0]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda i: ids_of(role.sample(prompts().slice(i, i + 1), SAMPLING)), range(5)))
    assert [row for rows in together for row in rows] == whole


def test_at_temperature_0_it_draws_what_transformers_draws(role: Any, folder: str) -> None:
    from rolegraph.role import RoleContext
    from roles.sampler.config import HuggingFaceSamplerConfig
    from roles.sampler.huggingface import HuggingFaceSampler

    sampling = replace(SAMPLING, n=1, temperature=0.0, seed=None)
    ours = role.sample(prompts(), sampling)
    other = HuggingFaceSampler(HuggingFaceSamplerConfig(model=folder), RoleContext(threads=2))
    other.setup()
    theirs: Any = other.sample(prompts(), sampling)
    assert ids_of(ours) == ids_of(theirs)
    assert ours["response_text"].to_pylist() == theirs["response_text"].to_pylist()
    assert ours["finish_reason"].to_pylist() == theirs["finish_reason"].to_pylist()
    for one, two in zip(ours.lists("rollout_logprobs"), theirs.lists("rollout_logprobs"), strict=True):
        assert np.abs(one - two).max() < 1e-4
    assert sorted(ours.column_names) == sorted(theirs.column_names)


def test_a_prompt_that_cannot_be_drawn_from_is_its_candidates_fault(role: Any) -> None:
    given = prompts(4).with_columns({"prompt_ids": [[130] * 60, [], [130], [MODEL_IDS]]})
    batch = role.sample(given, replace(SAMPLING, n=2))
    faults = batch["sample_fault"].to_pylist()[::2]
    assert "60 tokens and max_tokens=12 exceed max_model_len=64; raise sampler.max_model_len" in faults[0]
    assert faults[1:3] == ["the prompt is empty", None]
    assert f"token id {MODEL_IDS}" in faults[3]
    assert batch["finish_reason"].to_pylist()[:2] == ["error", "error"]
    assert [text is None for text in batch["response_text"].to_pylist()[::2]] == [True, True, False, True]
    alone = role.sample(prompts(4).slice(2, 3).with_columns({"prompt_ids": [[130]]}), replace(SAMPLING, n=2))
    assert ids_of(batch)[4:6] == ids_of(alone)
    nothing = role.sample(given.slice(0, 2), SAMPLING)
    assert len(nothing) == 6


def test_asleep_it_refuses(role: Any) -> None:
    whole = ids_of(role.sample(prompts(2), SAMPLING))
    role.sleep(1)
    with pytest.raises(TurnError, match="asleep"):
        role.sample(prompts(2), SAMPLING)
    with pytest.raises(TurnError, match=r"sampler\.sleep\(level=2\)"):
        role.sleep(2)
    role.wake_up(("weights", "kv_cache"))
    assert ids_of(role.sample(prompts(2), SAMPLING)) == whole
