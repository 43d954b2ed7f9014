"""The classifier's scores are those of the model alone, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rolegraph.batch import Batch
from rolegraph.config import load
from rolegraph.errors import ConfigError, TurnError
from rolegraph.interfaces import FAULT_REASONS
from rolegraph.role import RoleContext
from roles.orm.classifier import ClassifierORM
from roles.orm.config import ClassifierORMConfig
from tests.models import make_reward_model

pytestmark = pytest.mark.engine

TEXTS = ["4", "It is 4, I think.", "no", "x" * 60, "<answer>4</answer>"]


@pytest.fixture(scope="module")
def scalar(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_reward_model(tmp_path_factory.mktemp("scalar"), "SequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> str:
    names = {0: "bad", 1: "fair", 2: "good"}
    return make_reward_model(tmp_path_factory.mktemp("labelled"), "SequenceClassification", id2label=names)


def role_of(folder: str, **settings: Any) -> ClassifierORM:
    role = ClassifierORM(ClassifierORMConfig(model=folder, policy=folder, **settings), RoleContext(role="orm"))
    role.setup()
    return role


def rows(**columns: Any) -> Batch:
    messages = [[{"role": "user", "content": f"What is {row} + 2?"}] for row in range(len(TEXTS))]
    uids = [f"r{row}" for row in range(len(TEXTS))]
    return Batch.from_columns({"uid": uids, "messages": messages, "response_text": TEXTS, **columns})


def logits_alone(folder: str, texts: list[str], **options: Any) -> torch.Tensor:
    """[rows, labels] of transformers, a row at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt", **options)).logits for text in texts])


def chats() -> list[str]:
    return [
        f"<|user|>What is {row} + 2?<|end|><|assistant|>{text}<|end|>" for row, text in enumerate(TEXTS)
    ]  # fmt: skip


def scored(role: ClassifierORM, batch: Batch) -> dict[str, list[Any]]:
    return ClassifierORM.score(role, batch).table.to_pydict()


@pytest.mark.parametrize("tokens", [1, 60, 4096])
def test_a_head_with_one_number(scalar: str, tokens: int) -> None:
    role = role_of(scalar, max_tokens_per_micro_batch=tokens)
    found = scored(role, rows())
    truth = logits_alone(scalar, chats())[:, 0].tolist()
    assert found["reward"] == found["rewards/classifier"] == pytest.approx(truth, abs=1e-5)
    assert max(truth) - min(truth) > 0.1, "the rows differ"
    assert found["reward_faults"] == [0] * 5
    assert found["reward_reasons"] == [None] * 5
    assert ClassifierORM.metrics(role) == {"rows": 5.0}


def test_probabilities_labels_and_names(scalar: str, labelled: str) -> None:
    found = scored(role_of(scalar, value="probability", name="rm"), rows())
    assert found["rewards/rm"] == pytest.approx(torch.sigmoid(logits_alone(scalar, chats())[:, 0]).tolist(), abs=1e-5)
    logits = logits_alone(labelled, chats())
    for label, index in (("good", 2), (0, 0)):
        assert scored(role_of(labelled, label=label), rows())["reward"] == pytest.approx(
            logits[:, index].tolist(), abs=1e-5
        )
    share = scored(role_of(labelled, label="fair", value="probability"), rows())["reward"]
    assert share == pytest.approx(logits.softmax(-1)[:, 1].tolist(), abs=1e-5)


def test_a_form_in_place_of_the_chat_template(scalar: str) -> None:
    found = scored(role_of(scalar, form="Q: {prompt} A: {response}"), rows())
    plain = [f"Q: What is {row} + 2? A: {text}" for row, text in enumerate(TEXTS)]
    assert found["reward"] == pytest.approx(logits_alone(scalar, plain)[:, 0].tolist(), abs=1e-5)
    # A text that names a mark is a text.
    odd = Batch.from_columns({"uid": ["a"], "prompt": ["{response}"], "response_text": ["{prompt}"]})
    truth = logits_alone(scalar, ["Q: {response} A: {prompt}"])[0, 0].item()
    assert scored(role_of(scalar, form="Q: {prompt} A: {response}"), odd)["reward"] == pytest.approx([truth], abs=1e-5)


def test_a_model_without_a_template_reads_a_pair(scalar: str, tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, num_labels=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789?+"]
    words += [f"##{word}" for word in words[5:]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = transformers.BertTokenizerFast(vocab=vocabulary, model_max_length=64)
    tokenizer.save_pretrained(tmp_path)
    role = ClassifierORM(ClassifierORMConfig(model=str(tmp_path), policy=scalar), RoleContext(role="orm"))
    role.setup()
    found = scored(role, rows())
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    for row, text in enumerate(TEXTS):
        inputs = tokenizer(f"What is {row} + 2?", text, return_tensors="pt")
        assert inputs["token_type_ids"].max() == 1
        with torch.no_grad():
            if inputs["input_ids"].shape[1] > 64:
                assert found["reward"][row] is None
                assert found["reward_reasons"][row].startswith("classifier: too_long: ")
            else:
                assert found["reward"][row] == pytest.approx(model(**inputs).logits.item(), abs=1e-5)
    assert found["reward"].count(None) == 1


def test_what_is_too_long_or_was_never_drawn_has_no_score(scalar: str) -> None:
    role = role_of(scalar, max_length=30)
    found = scored(role, rows(response_text=["4", None, "5", "x" * 60, ""]))
    assert [value is None for value in found["reward"]] == [False, True, False, True, False]
    assert found["reward_reasons"][1] == "classifier: no_response"
    assert found["reward_reasons"][3].startswith("classifier: too_long: ")
    assert found["reward_reasons"][3].endswith("and the model reads 30")
    assert found["reward_faults/classifier"] == [
        0, 1 + FAULT_REASONS.index("no_response"), 0, 1 + FAULT_REASONS.index("too_long"), 0,
    ]  # fmt: skip
    assert ClassifierORM.metrics(role) == {
        "rows": 5.0, "faults/classifier/no_response": 1.0, "faults/classifier/too_long": 1.0,
    }  # fmt: skip
    whole = scored(role_of(scalar), rows(response_text=["x" * 300] * 5))
    assert whole["reward"] == [None] * 5, "the model has 256 positions"


def test_responses_are_decoded_where_there_is_no_text(scalar: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{scalar}/tokenizer.json")
    ids = [tokenizer.encode(f"{text}<|end|>", add_special_tokens=False).ids for text in TEXTS]
    role = role_of(scalar)
    found = scored(role, rows(response_ids=ids).drop(["response_text"]))
    assert found["response_text"] == TEXTS
    assert found["reward"] == scored(role, rows())["reward"]
    assert len(ClassifierORM.score(role, rows().slice(0, 0))) == 0


def test_it_steps_aside(scalar: str) -> None:
    role = role_of(scalar)
    before = scored(role, rows())["reward"]
    ClassifierORM.offload(role)
    with pytest.raises(TurnError, match=r"orm has given its device away: call onload\(\)"):
        scored(role, rows())
    ClassifierORM.onload(role)
    assert scored(role, rows())["reward"] == before


def test_a_model_that_is_none_is_refused(scalar: str, labelled: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"orm.label is not set.*choose one of 0 \(bad\), 1 \(fair\), 2 \(good\)"):
        role_of(labelled)
    with pytest.raises(ConfigError, match=r"orm.label='best' is no label of the model"):
        role_of(labelled, label="best")
    with pytest.raises(ConfigError, match="head has one number: set it to null"):
        role_of(scalar, label=1)
    folder = make_reward_model(tmp_path, "CausalLM")
    with pytest.raises(ConfigError, match=r"has no weights for score\.weight: it is no model for AutoModelForSeq"):
        role_of(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "orm.model is not set"),
        ({"name": "a/b"}, "orm.name='a/b' names the column"),
        ({"form": "{prompt}"}, "must have {prompt} and {response} once each"),
        ({"max_length": 0}, "orm.max_length=0 must be at least 1"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    found = list(ClassifierORMConfig(**{"model": "m", **options}).problems())
    assert any(message in problem for problem in found), found


def test_a_run_with_a_classifier_alone_needs_no_functions() -> None:
    with pytest.raises(ConfigError, match=r"no role runs reward functions: set reward=null, or add orm=functions \(or"):
        load(["algorithm=grpo", "orm=classifier", "orm.model=/somewhere"])
    run = load(["algorithm=grpo", "orm=classifier", "orm.model=/somewhere", "reward=null"]).run
    config = run.with_model_path("/policy").roles["orm"].config
    assert (config.model, config.policy) == ("/somewhere", "/policy")
