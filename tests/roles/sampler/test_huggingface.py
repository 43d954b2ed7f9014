"""HuggingFaceSampler on a tiny model, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rolegraph.errors import TurnError  # noqa: E402
from rolegraph.interfaces import SamplingParams  # noqa: E402
from rolegraph.role import RoleContext  # noqa: E402
from roles.sampler.config import HuggingFaceSamplerConfig  # noqa: E402
from roles.sampler.huggingface import HuggingFaceSampler  # noqa: E402
from tests.models import add_tokenizer, make_checkpoint  # noqa: E402
from tests.roles.rollout.replica import ids_of, logprob_error, prompts  # noqa: E402

pytestmark = pytest.mark.engine

MODEL_IDS, TOKENIZER_IDS = 400, 300
ENDS = [1, *range(100, 110)]
SAMPLING = SamplingParams(n=3, temperature=0.7, max_tokens=12, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose vocabulary is wider than its tokenizer's, and whose folder asks for a penalty of its own."""
    made = make_checkpoint(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        vocab_size=MODEL_IDS,
        initializer_range=0.1,
        max_position_embeddings=64,
    )
    add_tokenizer(made, TOKENIZER_IDS)
    own = {"eos_token_id": ENDS, "repetition_penalty": 5.0, "temperature": 0.01, "do_sample": True}
    Path(made, "generation_config.json").write_text(json.dumps(own))
    return made


@contextmanager
def sampler(folder: str, **settings: Any) -> Iterator[Any]:
    role = HuggingFaceSampler(
        HuggingFaceSamplerConfig(model=folder, **settings), RoleContext(role="sampler", threads=2)
    )
    role.setup()
    yield role
    role.teardown()


@pytest.fixture(scope="module")
def role(folder: str) -> Iterator[Any]:
    with sampler(folder) as running:
        yield running


def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(role: Any, folder: str) -> None:
    batch = role.sample(prompts(), SAMPLING)
    assert logprob_error(folder, batch, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4


def test_the_columns(role: Any) -> None:
    batch = role.sample(prompts(3), replace(SAMPLING, step=7))
    batch.check_alignment()
    assert batch["uid"].to_pylist() == ["row-0"] * 3 + ["row-1"] * 3 + ["row-2"] * 3
    assert batch["repeat"].to_pylist() == [0, 1, 2] * 3
    assert batch["answer"].to_pylist() == [0] * 3 + [1] * 3 + [2] * 3
    assert set(batch.numpy("step")) == {7}
    lengths = [len(row) for row in ids_of(batch)]
    assert batch["response_length"].to_pylist() == lengths
    assert batch["sample_fault"].to_pylist() == [None] * 9
    for row, reason in zip(ids_of(batch), batch["finish_reason"].to_pylist(), strict=True):
        assert not set(row[:-1]) & set(ENDS)
        assert (row[-1] in ENDS) == (reason == "stop")
        assert reason == "stop" or len(row) == 12
    assert all(isinstance(text, str) and "<|end|>" not in text for text in batch["response_text"].to_pylist())
    assert len(role.sample(prompts().slice(0, 0), SAMPLING)) == 0


@pytest.mark.parametrize("settings", [{"max_num_seqs": 4}, {"cache": "static"}])
def test_a_candidate_does_not_depend_on_its_batch(role: Any, folder: str, settings: dict[str, Any]) -> None:
    whole = role.sample(prompts(), SAMPLING)
    with sampler(folder, **settings) as other:
        assert ids_of(other.sample(prompts(), SAMPLING)) == ids_of(whole)
    missing = prompts().with_columns({"repeats": [[2], [], [0], [], []]})
    rest = role.sample(missing, replace(SAMPLING, step=9))
    assert ids_of(rest) == [ids_of(whole)[2], ids_of(whole)[6]]


def test_seeds_make_the_draws(role: Any) -> None:
    whole = ids_of(role.sample(prompts(), SAMPLING))
    assert len({tuple(row) for row in whole}) == len(whole)
    assert ids_of(role.sample(prompts(), replace(SAMPLING, seed=4))) != whole
    free = replace(SAMPLING, seed=None)
    assert ids_of(role.sample(prompts(), free)) != ids_of(role.sample(prompts(), free))


def test_temperature_0_takes_the_likeliest_token_with_the_logprob_of_temperature_1(role: Any, folder: str) -> None:
    batch = role.sample(prompts(), replace(SAMPLING, temperature=0.0, seed=None))
    rows = ids_of(batch)
    assert rows[0] == rows[1] == rows[2]
    assert logprob_error(folder, batch, temperature=1.0, ids=TOKENIZER_IDS) < 1e-4
    narrow = role.sample(prompts(), replace(SAMPLING, temperature=1.3, top_k=1))
    assert ids_of(narrow) == rows
    assert max(abs(value) for row in narrow.lists("rollout_logprobs") for value in row) < 1e-6


def test_ids_the_tokenizer_lacks_are_never_drawn(role: Any) -> None:
    hot = SamplingParams(n=8, temperature=2.0, max_tokens=24, seed=1, ignore_eos=True)
    drawn = np.concatenate(role.sample(prompts(), hot).lists("response_ids"))
    assert len(drawn) == 5 * 8 * 24
    assert 250 < drawn.max() < TOKENIZER_IDS


def test_other_ends_are_ends_too(role: Any) -> None:
    own = role.sample(prompts(), replace(SAMPLING, ignore_eos=True, stop_token_ids=tuple(range(200, 300))))
    reasons = own["finish_reason"].to_pylist()
    assert "stop" in reasons
    assert all(row[-1] >= 200 for row, why in zip(ids_of(own), reasons, strict=True) if why == "stop")


def test_a_prompt_that_cannot_be_drawn_from_is_its_candidates_fault(role: Any) -> None:
    given = prompts(4).with_columns({"prompt_ids": [[130] * 60, [], [130], [MODEL_IDS]]})
    batch = role.sample(given, replace(SAMPLING, n=1))
    faults = batch["sample_fault"].to_pylist()
    assert "60 tokens and max_tokens=12 exceed the model's 64 positions" in faults[0]
    assert faults[1:3] == ["the prompt is empty", None]
    assert f"token id {MODEL_IDS}" in faults[3]
    assert batch["finish_reason"].to_pylist()[0] == "error"
    assert [text is None for text in batch["response_text"].to_pylist()] == [True, True, False, True]


def test_asleep_it_refuses(role: Any) -> None:
    whole = ids_of(role.sample(prompts(2), SAMPLING))
    role.sleep(0)
    role.sleep(1)
    with pytest.raises(TurnError, match="asleep"):
        role.sample(prompts(2), SAMPLING)
    with pytest.raises(TurnError, match=r"level=2"):
        role.sleep(2)
    role.wake_up(("weights", "kv_cache"))
    assert ids_of(role.sample(prompts(2), SAMPLING)) == whole


@pytest.mark.parametrize("kind", ["GPT2", "Mamba"])
def test_any_causal_model_will_do(kind: str, tmp_path: Path) -> None:
    """Learned positions under another name in config.json; and no attention, keys or values at all."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": TOKENIZER_IDS, "hidden_size": 64, "num_hidden_layers": 2}
    sizes |= {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 1}
    sizes |= {"n_positions": 64, "n_head": 4} if kind == "GPT2" else {"pad_token_id": 0}
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    model(getattr(transformers, f"{kind}Config")(**sizes)).save_pretrained(tmp_path)
    add_tokenizer(tmp_path, TOKENIZER_IDS)
    with sampler(str(tmp_path)) as other:
        batch = other.sample(prompts(4), SAMPLING)
        assert logprob_error(tmp_path, batch, temperature=0.7) < 1e-4
        assert batch["sample_fault"].null_count == len(batch)
        long = prompts(1).with_columns({"prompt_ids": [[130] * 60]})
        [fault, *_] = other.sample(long, SAMPLING)["sample_fault"].to_pylist()
        assert (fault is not None) == (kind == "GPT2")
