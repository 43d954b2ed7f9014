"""vLLM's classifier beside transformers' on the same weights: one engine for the whole module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolegraph.batch import Batch
from rolegraph.config import load
from rolegraph.errors import ConfigError, TurnError
from rolegraph.role import RoleContext
from roles.orm.classifier import ClassifierORM
from roles.orm.config import ClassifierORMConfig, VLLMClassifierORMConfig
from tests.models import make_reward_model
from tests.roles.orm.engine_process import role_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SMALL = {"max_num_seqs": 8, "kv_cache_bytes": 64 * 2**20, "dtype": "float32"}
TARGET = "roles.orm.vllm.VLLMClassifierORM"


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> str:
    names = {0: "bad", 1: "fair", 2: "good"}
    return make_reward_model(tmp_path_factory.mktemp("labelled"), "SequenceClassification", id2label=names)


@pytest.fixture(scope="module")
def engine(labelled: str) -> Iterator[Any]:
    config = VLLMClassifierORMConfig(model=labelled, policy=labelled, label="good", name="rm", **SMALL)
    with role_process(TARGET, config) as running:
        yield running


def rows(texts: list[str | None]) -> Batch:
    messages = [[{"role": "user", "content": f"What is {row} + 2?"}] for row in range(len(texts))]
    uids = [f"r{row}" for row in range(len(texts))]
    return Batch.from_columns({"uid": uids, "messages": messages, "response_text": texts})


def peer(folder: str, batch: Batch, **settings: Any) -> dict[str, list[Any]]:
    config = ClassifierORMConfig(model=folder, policy=folder, name="rm", **settings)
    role = ClassifierORM(config, RoleContext(role="orm"))
    role.setup()
    return ClassifierORM.score(role, batch).table.to_pydict()


def test_it_agrees_with_transformers_on_the_same_weights(engine: Any, labelled: str) -> None:
    batch = rows(["4", None, "It is 4, I think.", "", "x" * 100, "x" * 300, *map(str, range(20))])
    found, truth = engine.score(batch).table.to_pydict(), peer(labelled, batch, label="good")
    assert [value is None for value in found["reward"]] == [value is None for value in truth["reward"]]
    assert [value for value in found["reward"] if value is not None] == pytest.approx(
        [value for value in truth["reward"] if value is not None], abs=1e-4
    )
    assert found["reward"].count(None) == 2
    assert found["reward_reasons"] == truth["reward_reasons"], "too long, and never drawn"
    assert found["rewards/rm"] == found["reward"]
    assert len({round(value, 3) for value in found["reward"] if value is not None}) > 20
    assert engine.metrics()["faults/rm/too_long"] == 1


def test_it_steps_aside(engine: Any) -> None:
    batch = rows(["4", "5"])
    before = engine.score(batch)
    engine.offload()
    with pytest.raises(TurnError, match=r"orm has given its device away: call onload\(\)"):
        engine.score(batch)
    engine.onload()
    assert engine.score(batch)["reward"].to_pylist() == before["reward"].to_pylist()


def test_probabilities(labelled: str) -> None:
    from roles.orm.vllm import VLLMClassifierORM

    for logits, label, value in (([0.5], 0, 0.6224593), ([1.0, 2.0, 3.0], 2, 0.6652409), ([-2000.0], 0, 0.0)):
        config = VLLMClassifierORMConfig(model=labelled, value="probability")
        role = VLLMClassifierORM(config, RoleContext(role="orm"))
        role._label = label
        assert role._value(logits) == pytest.approx(value)


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path, "CausalLM", id2label={0: "score"})
    config = VLLMClassifierORMConfig(model=folder, policy=folder, **SMALL)
    with (
        pytest.raises(ConfigError, match=r"vLLM does not serve it as a classifier \(it can do .*choose orm=classifier"),
        role_process(TARGET, config),
    ):
        pass


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("orm.model=null", "orm.model is not set"),
        ("orm.name=a/b", "orm.name='a/b' names the column"),
        ("orm.form=x", "must have {prompt} and {response} once each"),
        ("+orm.engine_kwargs.runner=generate", "orm.engine_kwargs.runner: the role needs a classifier"),
        ("orm.data_parallel_size=2", "set orm.replicas=2 instead"),
    ],
)
def test_settings_are_checked(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["algorithm=grpo", "reward=null", "orm=vllm", "orm.model=/somewhere", override])
    assert message in str(caught.value)


def test_lengths_of_the_run_are_not_its_own(labelled: str) -> None:
    run = load(["algorithm=grpo", "reward=null", "orm=vllm", f"orm.model={labelled}", "data.max_length=400"]).run
    assert run.roles["orm"].config.max_model_len is None, "256 positions, and longer rows have no score"
