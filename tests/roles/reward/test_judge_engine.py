"""A judge in a vLLM engine: it says what the same model says behind vLLM's server, and what transformers draws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolegraph.batch import Batch
from rolegraph.errors import ConfigError, TurnError
from rolegraph.models import ModelConfig, ensure
from rolegraph.role import RoleContext
from rolegraph.services.config import ServiceConfig
from roles.orm.config import JudgeORMConfig
from roles.orm.judge import JudgeORM
from roles.prm.config import JudgePRMConfig
from tests.models import add_tokenizer, make_checkpoint
from tests.roles.orm.engine_process import role_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SMALL: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_bytes": 64 * 2**20, "dtype": "float32", "max_model_len": 128}
ASK: dict[str, Any] = {"prompt": "{{ response }}", "max_tokens": 10}


@pytest.fixture(scope="module")
def tiny() -> str:
    return ensure(ModelConfig(maker="rolegraph.models.tiny.make"))


@pytest.fixture(scope="module")
def engine(tiny: str) -> Iterator[Any]:
    config = JudgeORMConfig(model=tiny, policy=tiny, **SMALL, **ASK)
    with role_process("roles.orm.judge.JudgeORM", config) as running:
        yield running


def rows(texts: list[str | None]) -> Batch:
    uids = [f"r{row}" for row in range(len(texts))]
    return Batch.from_columns({"uid": uids, "prompt": ["?"] * len(texts), "response_text": texts})


def drawn(folder: str, text: str) -> str:
    """What transformers draws greedily after a user's message."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(f"<|user|>{text}<|end|><|assistant|>", return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=10, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_the_engine_says_what_the_model_says(engine: Any, tiny: str) -> None:
    texts = ["4", None, "x" * 200, "The answer is 5."]
    found = engine.score(rows(texts)).table.to_pydict()
    assert found["reward"] == [None] * 4, "an untrained model judges nothing"
    reasons = found["reward_reasons"]
    for row in (0, 3):
        from roles.reward.replies import shown

        said = shown(drawn(tiny, texts[row] or ""))
        assert reasons[row] == f"judge: unparsable: no score in {said} (it was cut off at max_tokens)"
    assert reasons[1] == "judge: no_response"
    assert reasons[2].startswith("judge: too_long: a prompt of 203 tokens and max_tokens=10 exceed max_model_len=128")


def test_the_same_model_behind_a_server_says_the_same(engine: Any, tiny: str, vllm_url: str) -> None:
    service = ServiceConfig(base_url=vllm_url, model="tiny", api_key_env=None)
    role = JudgeORM(JudgeORMConfig(service=service, policy=tiny, **ASK), RoleContext(role="orm"))
    role.setup()
    try:
        batch = rows(["4", "The answer is 5.", "no"])
        there = JudgeORM.score(role, batch)["reward_reasons"].to_pylist()
    finally:
        role.teardown()
    assert there == engine.score(batch)["reward_reasons"].to_pylist()


def test_it_steps_aside(engine: Any) -> None:
    before = engine.score(rows(["4"]))["reward_reasons"].to_pylist()
    engine.offload()
    with pytest.raises(TurnError):
        engine.score(rows(["4"]))
    engine.onload()
    assert engine.score(rows(["4"]))["reward_reasons"].to_pylist() == before


def test_a_process_judge_and_seeded_draws(tiny: str) -> None:
    # Any character but one is a score of nothing; whatever the model draws, `read` finds what the pattern says.
    config = JudgePRMConfig(model=tiny, policy=tiny, temperature=1.0, seed=1, pattern="(q{99})", **SMALL, **ASK)
    with role_process("roles.prm.judge.JudgePRM", config, "prm") as role:
        one = role.score(rows(["a\n\nb", "c"])).table.to_pydict()
        two = role.score(rows(["c"])).table.to_pydict()
    assert one["step_scores"] == [[None, None], [None]]
    assert all(fault.startswith("unparsable: no scores in ") for fault in one["prm_fault"])
    assert one["prm_fault"][1] == two["prm_fault"][0], "a draw does not depend on what is asked beside it"
    assert one["prm_fault"][0] != one["prm_fault"][1]


def test_a_model_that_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", vocab_size=300)
    add_tokenizer(tmp_path, 300)
    config = JudgeORMConfig(model=folder, policy=folder, **SMALL)
    with (
        pytest.raises(ConfigError, match="has no chat template: give a model that can be asked"),
        role_process("roles.orm.judge.JudgeORM", config),
    ):
        pass
