"""A reward model's scores of steps are its outputs at the tokens behind them, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rolegraph.batch import Batch
from rolegraph.errors import AlignmentError, ConfigError, TurnError
from rolegraph.role import RoleContext
from roles.prm.base import StepScores
from roles.prm.config import ModelPRMConfig
from roles.prm.model import ModelPRM
from tests.models import make_reward_model

pytestmark = pytest.mark.engine

TAG = "<|tool|>"
"""A token of the tiny tokenizer that nothing else here uses."""
STEPS = [["one"], ["first", "second \u00e9", "third"], ["q", "b" * 40], [f"has the {TAG} itself", "end"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    heads = ("TokenClassification", "CausalLM", "ProcessRewardModel")
    folders = {head: make_reward_model(tmp_path_factory.mktemp(head), head) for head in heads}
    folders["three"] = make_reward_model(
        tmp_path_factory.mktemp("three"), "TokenClassification", id2label={0: "bad", 1: "fair", 2: "good"}
    )
    folders["one"] = make_reward_model(tmp_path_factory.mktemp("one"), "TokenClassification", num_labels=1)
    return folders


def role_of(folder: str, kind: type[ModelPRM] = ModelPRM, **settings: Any) -> ModelPRM:
    config = ModelPRMConfig(**{"model": folder, "policy": folder, "token": TAG, **settings})
    role = kind(config, RoleContext(role="prm"))
    role.setup()
    return role


def rows() -> Batch:
    return Batch.from_columns(
        {
            "uid": [f"r{row}" for row in range(len(STEPS))],
            "messages": [[{"role": "user", "content": f"Question {row}"}] for row in range(len(STEPS))],
            "response_text": ["\n\n".join(steps) for steps in STEPS],
        }
    )


def scored(role: ModelPRM, batch: Batch, **options: Any) -> dict[str, list[Any]]:
    return ModelPRM.score(role, batch, **options).table.to_pydict()


def logits_alone(folder: str, kind: Any, form: str = f"{{step}}{TAG}", plain: str | None = None) -> list[Any]:
    """[steps, ...] of each row: the model's outputs where each step's own tag is, found piece by piece."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for row, steps in enumerate(STEPS):
        before = f"<|user|>Question {row}<|end|><|assistant|>" if plain is None else plain.format(f"Question {row}")
        ids, places = tokenizer(before, add_special_tokens=False)["input_ids"], []
        for step in steps:
            ids += tokenizer(form.format(step=step), add_special_tokens=False)["input_ids"]
            places.append(max(place for place, one in enumerate(ids) if one == tokenizer.convert_tokens_to_ids(TAG)))
        with torch.no_grad():
            found.append(model(input_ids=torch.tensor([ids])).logits[0, places])
    return found


def agree(found: dict[str, list[Any]], truth: list[list[float]]) -> None:
    assert [len(scores) for scores in found["step_scores"]] == [1, 3, 2, 2]
    for scores, true in zip(found["step_scores"], truth, strict=True):
        assert scores == pytest.approx(true, abs=1e-5)
    assert len({round(score, 4) for scores in truth for score in scores}) == 8, "no two are alike"


@pytest.mark.parametrize("tokens", [1, 100, 4096])
def test_a_token_classifier(folders: dict[str, str], tokens: int) -> None:
    from transformers import AutoModelForTokenClassification

    folder = folders["TokenClassification"]
    truth = [logits.softmax(-1)[:, 1].tolist() for logits in logits_alone(folder, AutoModelForTokenClassification)]
    role = role_of(folder, max_tokens_per_micro_batch=tokens)
    found = scored(role, rows())
    agree(found, truth)
    assert found["prm_score"] == pytest.approx([min(scores) for scores in truth], abs=1e-5)
    assert found["prm_fault"] == [None] * 4
    last = scored(role, rows(), reduce="last")
    assert last["prm_score"] == pytest.approx([scores[-1] for scores in truth], abs=1e-5)


def test_other_heads(folders: dict[str, str]) -> None:
    from transformers import AutoModelForTokenClassification

    three = logits_alone(folders["three"], AutoModelForTokenClassification)
    agree(scored(role_of(folders["three"], label="good"), rows()), [x.softmax(-1)[:, 2].tolist() for x in three])
    one = logits_alone(folders["one"], AutoModelForTokenClassification)
    agree(scored(role_of(folders["one"]), rows()), [x[:, 0].tolist() for x in one])


def test_the_architecture_of_qwen(folders: dict[str, str]) -> None:
    from roles.prm.qwen2 import Qwen2ForProcessRewardModel

    folder = folders["ProcessRewardModel"]
    truth = [logits.softmax(-1)[:, 1].tolist() for logits in logits_alone(folder, Qwen2ForProcessRewardModel)]
    agree(scored(role_of(folder), rows()), truth)


def test_a_language_model_that_says_good_or_bad(folders: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folders["CausalLM"]
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["+", "-"])
    form, whole = f"{{step}} {TAG}\n", "{prompt} {response}"
    truth = logits_alone(folder, AutoModelForCausalLM, form, "{} ")
    settings = {"good_token": "+", "bad_token": "-", "step_form": "{step} {token}\n", "form": whole}
    agree(
        scored(role_of(folder, **settings), rows()), [logits[:, ids].softmax(-1)[:, 0].tolist() for logits in truth]
    )  # fmt: skip


def test_of_a_vocabulary_only_the_answers_leave_the_device(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"good_token": "+", "bad_token": "-", "step_form": "{step} {token}\n", "form": "{prompt} {response}"}
    role = role_of(folders["CausalLM"], **settings)
    widths, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (widths.append(tensor.shape[-1]), cpu(tensor))[1])
    scored(role, rows())
    assert set(widths) == {2}


def test_a_question_that_has_the_same_text(folders: dict[str, str]) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    folder = folders["TokenClassification"]
    batch = Batch.from_columns({"uid": ["r"], "prompt": [f"say ok{TAG}"], "response_text": ["ok"]})
    found = scored(role_of(folder), batch)
    ids = AutoTokenizer.from_pretrained(folder)(
        f"<|user|>say ok{TAG}<|end|><|assistant|>ok{TAG}", return_tensors="pt", add_special_tokens=False
    )["input_ids"]
    with torch.no_grad():
        logits = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)(ids).logits
    assert found["step_scores"][0] == pytest.approx([logits[0, -1].softmax(-1)[1].item()], abs=1e-5)


def test_rows_without_steps_and_rows_too_long(folders: dict[str, str]) -> None:
    role = role_of(folders["TokenClassification"], max_length=40)
    texts = ["ok\n\nfine", "", None, "word " * 30]
    found = scored(role, rows().with_columns({"response_text": texts}))
    assert [len(scores) for scores in found["step_scores"]] == [2, 0, 0, 1]
    assert [score is None for score in found["prm_score"]] == [False, True, True, True]
    assert found["prm_fault"][1:3] == ["no steps", "no response"]
    assert found["prm_fault"][3].startswith("too_long: ")


def test_it_steps_aside(folders: dict[str, str]) -> None:
    role = role_of(folders["TokenClassification"])
    before = scored(role, rows())["step_scores"]
    ModelPRM.offload(role)
    with pytest.raises(TurnError, match=r"prm has given its device away"):
        scored(role, rows())
    ModelPRM.onload(role)
    assert scored(role, rows())["step_scores"] == before


def test_another_number_of_scores_is_an_error(folders: dict[str, str]) -> None:
    class Short(ModelPRM):
        def step_scores(self, steps: list[list[str]], batch: Batch) -> list[StepScores]:
            return [StepScores(scores.scores[:1]) for scores in super().step_scores(steps, batch)]

    with pytest.raises(AlignmentError, match="row r1: prm gave 1 scores for 3 steps"):
        scored(role_of(folders["TokenClassification"], Short), rows())


def test_what_cannot_be_read_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prm.label is not set, and the model's head has several"):
        role_of(folders["three"])
    with pytest.raises(ConfigError, match=r"has no weights for score"):
        role_of(folders["CausalLM"])
    with pytest.raises(ConfigError, match=r"prm.good_token='good' is 4 tokens"):
        role_of(folders["CausalLM"], good_token="good", bad_token="-")
    # `<answer>` is a token, so `er>` never ends one.
    inside = role_of(folders["TokenClassification"], token="<answ", step_form="{step}{token}er>")
    with pytest.raises(AlignmentError, match=r"row r0: no token of the model ends with '<answ'"):
        scored(inside, rows())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "prm.model is not set"),
        ({"token": None}, "prm.token is not set"),
        ({"step_form": "{token}{step}"}, "must have {step}, and behind it {token}"),
        ({"step_form": "{step}"}, "must have {step}, and behind it {token}"),
        ({"good_token": "+"}, "go together"),
        ({"good_token": "+", "bad_token": "-", "label": 1}, "prm.label is a token classifier's"),
        ({"step_separator": ""}, "prm.step_separator is empty"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    found = list(ModelPRMConfig(**{"model": "m", "token": "x", **options}).problems())
    assert any(message in problem for problem in found), found
