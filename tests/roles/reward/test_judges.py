"""Judges behind a service that answers, misbehaves, or says something else: every row has a score or a reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolegraph.batch import Batch
from rolegraph.config import load
from rolegraph.errors import ConfigError
from rolegraph.interfaces import FAULT_REASONS
from rolegraph.models.tiny import write_tokenizer
from rolegraph.placement import requests
from rolegraph.role import RoleContext
from rolegraph.services import service as service_module
from rolegraph.services.config import ServiceConfig
from roles.orm.config import JudgeORMConfig
from roles.orm.judge import JudgeORM
from roles.prm.config import JudgePRMConfig
from roles.prm.judge import JudgePRM
from tests.stub_openai import Request, StubOpenAI, raw, say, status


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FIRST_WAIT_S", 0.01)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    write_tokenizer(folder)
    return str(folder)


@contextmanager
def judge(kind: type[Any], url: str, policy: str, **settings: Any) -> Iterator[Any]:
    service = ServiceConfig(base_url=url, model="stub", api_key_env=None, timeout_s=20, max_retries=1)
    name = "orm" if kind is JudgeORM else "prm"
    role = kind(kind.Config(service=service, policy=policy, **settings), RoleContext(role=name))
    role.setup()
    try:
        yield role
    finally:
        role.teardown()


def rows(texts: list[str | None], **columns: Any) -> Batch:
    uids = [f"r{row}" for row in range(len(texts))]
    prompts = [[{"role": "user", "content": f"Question {row}?"}] for row in range(len(texts))]
    return Batch.from_columns({"uid": uids, "messages": prompts, "response_text": texts, **columns})


def test_an_outcome_judge_is_asked_about_question_and_response(policy: str) -> None:
    replies = {"good": "Yes.\nScore: 1", "bad": "Score: 0.25", "odd": "I cannot say.", "ten": "Score: 7"}
    script = lambda request: say(next(r for key, r in replies.items() if key in request.text))  # noqa: E731
    with StubOpenAI(script) as server, judge(JudgeORM, server.url, policy, system_prompt="Be strict.") as role:
        found = role.score(rows(["good", "bad", None, "odd", "ten"])).table.to_pydict()
        asked = [request.body for request in server.requests]
        metrics = role.metrics()
    assert found["reward"] == found["rewards/judge"] == [1.0, 0.25, None, None, None]
    assert found["reward_reasons"] == [
        None,
        None,
        "judge: no_response",
        "judge: unparsable: no score in 'I cannot say.'",
        "judge: unparsable: 7 is not between 0 and 1 in 'Score: 7'",
    ]
    codes = [0, 0, *(1 + FAULT_REASONS.index(why) for why in ("no_response", "unparsable", "unparsable"))]
    assert found["reward_faults/judge"] == codes
    assert metrics == {"rows": 5.0, "faults/judge/no_response": 1.0, "faults/judge/unparsable": 2.0}
    assert len(asked) == 4
    assert all(body["messages"][0] == {"role": "system", "content": "Be strict."} for body in asked)
    first = next(body for body in asked if "good" in body["messages"][1]["content"])
    assert "<question>\nQuestion 0?\n</question>" in first["messages"][1]["content"]
    assert (first["temperature"], first["max_tokens"], first["top_p"]) == (0.0, 1024, 1.0)
    assert "seed" not in first, "nothing is drawn"


def test_a_prompt_names_columns_and_draws_have_seeds(policy: str) -> None:
    prompt = "{{ answer }}? {{ response }} {% for step in steps %}<{{ step }}>{% endfor %}{{ {'x': 1} }}"
    options = {"prompt": prompt, "temperature": 0.5, "seed": 3, "max_tokens": 7, "name": "j"}
    with StubOpenAI([say("score: 1")]) as server, judge(JudgeORM, server.url, policy, **options) as role:
        whole = role.score(rows(["a\n\nb", "{{ c }}"], answer=[4, 5])).table.to_pydict()
        assert whole["rewards/j"] == [1.0, 1.0]
        with pytest.raises(ConfigError, match=r"orm.prompt names 'answer', which the rows do not have: it may"):
            role.score(rows(["a"]))
        asked = {request.text: request.body for request in server.requests}
        role.score(rows(["{{ c }}"], answer=[5]))
        again = server.requests[-1].body
    assert set(asked) == {"4? a\n\nb <a><b>{'x': 1}", "5? {{ c }} <{{ c }}>{'x': 1}"}
    assert {(body["temperature"], body["max_tokens"]) for body in asked.values()} == {(0.5, 7)}
    assert len({body["seed"] for body in asked.values()}) == 2
    assert again["seed"] == asked[again["messages"][-1]["content"]]["seed"], "whatever is asked beside it"


def test_a_prompt_that_fails_for_a_row_is_that_rows_fault(policy: str) -> None:
    options = {"prompt": "{{ response }} {{ 6 // answer }}"}
    with StubOpenAI([say("score: 1")]) as server, judge(JudgeORM, server.url, policy, **options) as role:
        found = role.score(rows(["a", "b"], answer=[0, 2])).table.to_pydict()
    assert found["reward"] == [None, 1.0]
    assert found["reward_reasons"][0].startswith("judge: exception: orm.prompt: ZeroDivisionError")


def test_a_service_that_misbehaves_is_a_reason_a_row(policy: str) -> None:
    def script(request: Request) -> Any:
        if "down" in request.text:
            return status(500)
        return raw("no json") if "broken" in request.text else say("Score: 0.", finish_reason="length")

    with StubOpenAI(script) as server, judge(JudgeORM, server.url, policy, pattern=r"Score: (\d\.\d)") as role:
        found = role.score(rows(["down", "broken", "cut"])).table.to_pydict()
    assert found["reward"] == [None] * 3
    reasons = found["reward_reasons"]
    assert reasons[0].startswith("judge: no_reply: ")
    assert reasons[1].startswith("judge: no_reply: ")
    assert reasons[2] == "judge: unparsable: no score in 'Score: 0.' (it was cut off at max_tokens)"
    assert found["reward_faults/judge"][:2] == [1 + FAULT_REASONS.index("no_reply")] * 2


def test_a_process_judge_scores_each_step_or_none(policy: str) -> None:
    replies = {
        "alpha": "Fine.\n[1, 0.5]",
        "lines": "Step 1: 1\nStep 2: 0\nStep 3: 1",
        "fewer": "[1]",
        "holes": "[1, null]",
        "words": "All good.",
    }
    script = lambda request: say(next(r for key, r in replies.items() if key in request.text))  # noqa: E731
    texts = ["alpha\n\ntwo", "lines\n\ntwo\n\nthree", "fewer\n\ntwo", "holes\n\ntwo", "words", "", None]
    with StubOpenAI(script) as server, judge(JudgePRM, server.url, policy) as role:
        found = role.score(rows(texts), reduce="mean").table.to_pydict()
        asked = next(request.text for request in server.requests if "alpha" in request.text)
        assert len(server.requests) == 5, "rows without steps are not asked about"
    assert found["step_scores"] == [[1.0, 0.5], [1.0, 0.0, 1.0], [None, None], [1.0, None], [None], [], []]
    assert found["prm_score"] == [0.75, pytest.approx(2 / 3), None, None, None, None, None]
    assert found["prm_fault"] == [
        None,
        None,
        "unparsable: 1 scores for 2 steps in '[1]'",
        "a step has no score",
        "unparsable: no scores in 'All good.'",
        "no steps",
        "no response",
    ]
    assert "<step_1>\nalpha\n</step_1>\n\n<step_2>\ntwo\n</step_2>" in asked
    assert "JSON list of 2 numbers" in asked


def test_a_service_that_is_not_there_is_said_at_setup(policy: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"the service at http://127.0.0.1:9/v1 does not work"),
        judge(JudgeORM, "http://127.0.0.1:9/v1", policy),
    ):
        pass


SERVICE = "{base_url: http://localhost:8000/v1, model: m}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("orm.prompt='{{ response'", "orm.prompt is no Jinja template: line 1"),
        ("orm.prompt='{{ question }}'", "orm.prompt says nothing of the response"),
        ("orm.pattern='('", "orm.pattern='(' is no regular expression"),
        ("orm.pattern='1'", "orm.pattern='1' has 0 groups"),
        ("orm.lowest=2", "orm.lowest=2 must be below orm.highest=1"),
        ("orm.temperature=3", "orm.temperature=3 must be between 0 and 2"),
        ("orm.top_p=0", "orm.top_p=0 must be above 0"),
        ("orm.max_tokens=0", "orm.max_tokens=0 must be at least 1"),
        ("orm.name=''", "orm.name='' names the column"),
        ("orm.model=/somewhere", "orm.model=/somewhere is an engine's, and orm.service is asked"),
        ("orm.max_num_seqs=4", "orm.max_num_seqs=4 is an engine's"),
        ("orm.gpus=1", "orm.gpus=1: the model is the service's"),
        ("orm.service.base_url=here", "base_url='here' is no address"),
    ],
)
def test_settings_are_checked(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["algorithm=grpo", "reward=null", "orm=judge", f"orm.service={SERVICE}", override])
    assert message in str(caught.value)


def test_a_judge_of_steps_needs_a_separator() -> None:
    assert any("prm.step_separator is empty" in text for text in JudgePRMConfig(step_separator="").problems())


def test_where_a_judge_runs() -> None:
    asked = load(["algorithm=grpo", "reward=null", "orm=judge", f"orm.service={SERVICE}", "seed=7"]).run
    config = asked.roles["orm"].config
    assert isinstance(config, JudgeORMConfig)
    assert (config.never_on_gpu, config.seed, config.max_model_len) == (True, 7, None)
    assert [request.light for request in requests({"orm": asked.roles["orm"]})] == [True]
    own = load(["algorithm=grpo", "reward=null", "orm=judge"]).run.with_model_path(str(Path("/policy")))
    assert not own.roles["orm"].config.never_on_gpu
    assert own.roles["orm"].config.model == own.roles["orm"].config.policy == "/policy"
