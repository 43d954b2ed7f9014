"""Functions as process rewards: steps in, a score a step out, and every row accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rolegraph.batch import Batch
from rolegraph.config import load
from rolegraph.errors import AlignmentError, ConfigError, RewardError
from rolegraph.models.tiny import END, write_tokenizer
from rolegraph.role import RoleContext
from roles.prm.config import FunctionPRMConfig
from roles.prm.functions import FunctionPRM

PLUGIN = """
from rolegraph.rewards import reward

@reward
def lengths(steps, *, scale=1.0):
    return [[scale * len(step) for step in response] for response in steps]

@reward
def fragile(steps, *, completions, prompts):
    for text in completions:
        if "crash" in text:
            import os
            os._exit(1)
        if "hang" in text:
            import time
            time.sleep(600)
    return [None if "none" in text else [None if "hole" in step else 1.0 for step in response]
            for text, response in zip(completions, steps)]

@reward
def short(steps, *, uid):
    return [[1.0] * (len(response) - (name == "row1")) for name, response in zip(uid, steps)]

@reward
def odd(steps):
    return ["abc" for _ in steps]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plugins") / "my_steps.py"
    file.write_text(PLUGIN)
    return str(file)


class Running:
    """A role that is set up, and torn down at the end."""

    def __init__(self, model: Path, plugin: str, functions: list[Any], **options: Any) -> None:
        options = {"timeout_s": 2.0, **options}
        config = FunctionPRMConfig(
            reward_funcs=functions, external_plugins=[plugin], policy=str(model), **options
        )  # fmt: skip
        self.role = FunctionPRM(config, RoleContext(role="prm", threads=2))

    def __enter__(self) -> FunctionPRM:
        self.role.setup()
        return self.role

    def __exit__(self, *error: object) -> None:
        self.role.teardown()


def rows(texts: Sequence[str | None], **columns: Any) -> Batch:
    uids = [f"row{row}" for row in range(len(texts))]
    return Batch.from_columns({"uid": uids, "prompt": ["?"] * len(texts), "response_text": texts, **columns})


def scored(role: FunctionPRM, batch: Batch, **options: Any) -> dict[str, list[Any]]:
    return FunctionPRM.score(role, batch, **options).table.to_pydict()


def test_each_step_has_a_score_and_they_are_reduced(model: Path, plugin: str) -> None:
    functions = ["arithmetic_steps", {"_target_": "lengths", "scale": 0.5}]
    with Running(model, plugin, functions, reward_weights=[10, 1]) as role:
        batch = rows(["1 + 1 = 2\n\n1 + 1 = 3", "ok", "", " \n\n", None], answer=[1] * 5)
        found = scored(role, batch)
        assert found["step_scores"] == [[14.5, 4.5], [11.0], [], [], []]
        assert found["prm_score"] == [4.5, 11.0, None, None, None]
        assert found["prm_fault"] == [None, None, "no steps", "no steps", "no response"]
        assert "step_ends" not in found
        assert found["answer"] == [1] * 5
        assert scored(role, batch, reduce="mean")["prm_score"][0] == 9.5
        assert scored(role, batch, reduce="last")["prm_score"][:2] == [4.5, 11.0]
        assert FunctionPRM.metrics(role) == {"rows": 15.0, "faults": 9.0}


def test_tokens_of_steps_where_there_are_tokens(model: Path, plugin: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = ["abc\n\nde", "\u00e9", ""]
    ids = [tokenizer.encode(text + END, add_special_tokens=False).ids for text in texts]
    with Running(model, plugin, ["lengths"]) as role:
        found = scored(role, Batch.from_columns({"uid": ["a", "b", "c"], "response_ids": ids}))
        assert found["response_text"] == texts
        assert found["step_ends"] == [[5, 8], [3], []], "letters and separators are tokens of their own"
        assert found["step_scores"] == [[3.0, 2.0], [1.0], []]
        with pytest.raises(AlignmentError, match="row b: response_text is not what"):
            scored(role, Batch.from_columns({"uid": ["b"], "response_ids": ids[:1], "response_text": ["abd\n\nde"]}))


def test_a_candidate_that_was_never_drawn_has_neither_steps_nor_tokens(model: Path, plugin: str) -> None:
    with Running(model, plugin, ["lengths"]) as role:
        found = scored(role, rows([None, "a"], response_ids=[[], decoded_as(model, "a")]))
    assert found["prm_fault"] == ["no response", None]
    assert found["step_ends"] == [[], [1]]


def decoded_as(model: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids


def test_the_separator_is_a_setting(model: Path, plugin: str) -> None:
    with Running(model, plugin, ["lengths"], step_separator="\n") as role:
        assert scored(role, rows(["a\nbc\n\nd"]))["step_scores"] == [[1.0, 2.0, 1.0]]


def test_faults_are_nulls_with_reasons(model: Path, plugin: str) -> None:
    with Running(model, plugin, ["fragile", "lengths"], reward_weights=[1.0, 0.0]) as role:
        texts = ["a\n\nb", "crash\n\nb", "none", "hang", "a\n\nhole"]
        found = scored(role, rows(texts))
        assert found["step_scores"] == [[1.0, 1.0], [None, None], [None], [None], [1.0, None]]
        assert found["prm_score"] == [1.0, None, None, None, None]
        why = ["crash", "none", "timeout", "none"]
        assert found["prm_fault"] == [None, *(f"fragile: {reason}" for reason in why)]
        metrics = FunctionPRM.metrics(role)
        assert metrics["faults/fragile/crash"] == metrics["faults/fragile/timeout"] == 1.0


def test_another_number_of_scores_is_an_error_with_the_uid(model: Path, plugin: str) -> None:
    with Running(model, plugin, ["short"]) as role:
        assert scored(role, rows(["a\n\nb"]))["prm_score"] == [1.0]
        with pytest.raises(AlignmentError, match=r"row row1: prm function short gave 1 scores for 2 steps \(.* 'c'"):
            scored(role, rows(["a\n\nb", "c\n\nd"]))


def test_something_else_than_lists_is_a_fault(model: Path, plugin: str) -> None:
    with Running(model, plugin, ["odd"]) as role:
        assert scored(role, rows(["a"]))["prm_fault"] == ["odd: not_a_list"]


def test_a_missing_column_is_named(model: Path, plugin: str) -> None:
    with Running(model, plugin, ["short"]) as role, pytest.raises(RewardError, match="'short' wants the column 'uid'"):
        FunctionPRM.score(role, Batch.from_columns({"response_text": ["a"]}))


def test_empty_batches(model: Path, plugin: str) -> None:
    with Running(model, plugin, ["lengths"]) as role:
        empty = FunctionPRM.score(role, rows(["a"]).slice(0, 0))
        assert len(empty) == 0
        assert str(empty["prm_score"].type) == "double"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_funcs": []}, "prm.reward_funcs is empty: name at least one function (built in: arithmetic_steps)"),
        ({"reward_funcs": ["exact_match"]}, "exact_match scores whole responses: name it in reward.reward_funcs"),
        ({"step_separator": ""}, "prm.step_separator is empty"),
        ({"gpus": 1}, "prm.gpus=1: functions run on CPU cores"),
        ({"reward_weights": [1, 2]}, "prm.reward_weights has 2 numbers for 1"),
        ({"timeout_s": 0}, "prm.timeout_s=0 must be more"),
        ({"external_plugins": ["nowhere.py"]}, "prm.external_plugins[0]: there is no file"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    found = FunctionPRMConfig(**{"reward_funcs": ["arithmetic_steps"], **options}).problems()
    assert any(message in problem for problem in found), found


def test_step_functions_are_no_reward_functions() -> None:
    with pytest.raises(ConfigError, match=r"arithmetic_steps scores steps: name it in prm\.reward_funcs"):
        load(["algorithm=grpo", "reward.reward_funcs=[arithmetic_steps]"])
