"""Candidates from a service that misbehaves: every one is accounted for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolegraph.batch import Batch
from rolegraph.data import DataConfig, load
from rolegraph.errors import BatchError, ConfigError
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.host import RoleSpec
from rolegraph.interfaces import SamplingParams
from rolegraph.placement import Plan, Slot
from rolegraph.role import Mesh, RoleContext
from rolegraph.services import service as service_module
from rolegraph.services.config import ServiceConfig
from roles.rollout.drawing import sample_seed
from roles.sampler.config import OpenAISamplerConfig
from roles.sampler.openai import OpenAISampler
from tests.rolegraph.samplers import run_sampling
from tests.stub_openai import Action, Request, StubOpenAI, cut, hang_up, raw, say, stall, status


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FIRST_WAIT_S", 0.01)


@contextmanager
def sampler(url: str, model: str = "stub", **settings: Any) -> Iterator[Any]:
    service = ServiceConfig(base_url=url, model=model, **{"api_key_env": None, "timeout_s": 20} | settings)
    role = OpenAISampler(OpenAISamplerConfig(service=service), RoleContext(role="sampler"))
    role.setup()
    try:
        yield role
    finally:
        role.teardown()


def questions(count: int = 3) -> Batch:
    return Batch.from_columns(
        {
            "uid": [f"row-{i}" for i in range(count)],
            "messages": [[{"role": "user", "content": f"question {i}", "name": None}] for i in range(count)],
            "answer": list(range(count)),
        }
    )


SAMPLING = SamplingParams(n=2, temperature=0.7, top_p=0.9, max_tokens=32, seed=5)


def test_the_columns_and_the_requests() -> None:
    script = lambda request: say(f"to {request.text}", reasoning="hm", tokens=4)  # noqa: E731
    with StubOpenAI(script) as server, sampler(server.url) as role:
        batch = role.sample(questions(), replace(SAMPLING, step=6))
    assert batch["uid"].to_pylist() == [f"row-{i}" for i in (0, 0, 1, 1, 2, 2)]
    assert batch["repeat"].to_pylist() == [0, 1] * 3
    assert batch["answer"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert batch["response_text"].to_pylist()[2] == "<think>\nhm\n</think>\n\nto question 1"
    assert set(batch["finish_reason"].to_pylist()) == {"stop"}
    assert batch["response_length"].to_pylist() == [4] * 6
    assert batch["sample_fault"].to_pylist() == [None] * 6
    assert batch["step"].to_pylist() == [6] * 6
    bodies = {request.body["seed"]: request.body for request in server.requests}
    body = bodies[sample_seed(5, "row-1", 0, 1) & (2**31 - 1)]
    assert body["messages"] == [{"role": "user", "content": "question 1"}]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 32)
    assert not {"top_k", "min_p", "stop_token_ids", "ignore_eos", "n"} & body.keys()


def test_what_only_some_services_know_is_sent_where_it_asks_for_something() -> None:
    odd = SamplingParams(temperature=0.0, top_k=5, min_p=0.1, stop_token_ids=(3,), ignore_eos=True)
    with StubOpenAI([say("x")]) as server, sampler(server.url) as role:
        role.sample(questions(1), odd)
    [request] = server.requests
    wanted = {"temperature": 0.0, "top_k": 5, "min_p": 0.1, "stop_token_ids": [3], "ignore_eos": True}
    assert wanted.items() <= request.body.items()
    assert "seed" not in request.body


def test_a_resumed_run_asks_for_what_is_missing_with_the_same_seeds() -> None:
    with StubOpenAI(lambda request: say(str(request.body["seed"]))) as server, sampler(server.url) as role:
        whole = role.sample(questions(2), SamplingParams(n=3, seed=1))["response_text"].to_pylist()
        rest = role.sample(questions(2).with_columns({"repeats": [[2], [0, 1]]}), SamplingParams(n=3, seed=1))
    assert rest["response_text"].to_pylist() == [whole[2], whole[3], whole[4]]
    assert rest["repeat"].to_pylist() == [2, 0, 1]
    assert "repeats" not in rest


def test_a_prompt_is_sent_and_a_row_without_any_is_named() -> None:
    with StubOpenAI([say("x")]) as server, sampler(server.url) as role:
        role.sample(Batch.from_columns({"uid": ["a"], "prompt": ["say x"]}), SamplingParams())
        with pytest.raises(BatchError, match="row b: there are neither messages nor a prompt"):
            role.sample(Batch.from_columns({"uid": ["b"], "prompt_ids": [[1]]}), SamplingParams())
    assert server.requests[0].body["messages"] == [{"role": "user", "content": "say x"}]


def call(**arguments: Any) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


ASKED = {"role": "user", "content": "Where?"}
ANSWERED = {"role": "tool", "content": "there", "tool_call_id": "c1"}
CHATS: dict[str, list[list[dict[str, Any]]]] = {
    "other keys": [[ASKED, call(city="Ulm"), ANSWERED], [ASKED, call(zip=[1]), ANSWERED], [ASKED]],
    "other shapes": [[ASKED, call(at="Ulm"), ANSWERED], [ASKED, call(at=[1]), ANSWERED], [{**ASKED, "name": "me"}]],
}


@pytest.mark.parametrize(
    ("shapes", "source"), [("other keys", "jsonl"), ("other shapes", "jsonl"), ("other keys", "parquet")]
)
async def test_chats_with_tools_reach_the_service_as_the_data_had_them(
    shapes: str, source: str, tmp_path: Path
) -> None:
    chats, path = CHATS[shapes], tmp_path / f"data.{source}"
    if source == "jsonl":
        path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    else:  # every object gets the keys of all
        pq.write_table(pa.table({"messages": chats}), path)
    data = load(DataConfig(source=source, path=str(path)), "none", "chat", keep_exact=True)
    with StubOpenAI([say("x")]) as server:
        service = ServiceConfig(base_url=server.url, model="stub", api_key_env=None)
        settings = {"sampler": OpenAISamplerConfig(service=service)}
        await run_sampling(tmp_path / "run", data=data, roles={"sampler": OpenAISampler}, settings=settings)
    sent = [request.body["messages"] for request in server.requests]
    assert len(sent) == 4 * len(chats)
    assert all(sent.count(chat) == 4 for chat in chats)


def test_every_candidate_of_a_bad_day_is_accounted_for() -> None:
    lasting: list[Action] = [status(429), status(500), cut(), hang_up, raw("{")]
    bad = [*lasting, status(429, retry_after=0.05), stall(30)]
    seen: dict[str, int] = {}

    def script(request: Request) -> Action:
        number = int(request.text.split()[-1])
        seen[request.key] = seen.get(request.key, 0) + 1
        if number % 4 == 0:
            return status(400, message="as long as a book")
        if number % 4 == 1:
            return lasting[number % 5]
        return bad[number % 7] if seen[request.key] == 1 else say(request.text)

    with StubOpenAI(script) as server, sampler(server.url, concurrency=12, timeout_s=4, max_retries=1) as role:
        batch = role.sample(questions(28), SamplingParams(n=2, seed=0))
    keys = list(zip(batch["uid"].to_pylist(), batch["repeat"].to_pylist(), strict=True))
    assert keys == [(f"row-{i}", repeat) for i in range(28) for repeat in range(2)]
    columns = (batch["answer"], batch["response_text"], batch["sample_fault"], batch["finish_reason"])
    for number, text, fault, reason in zip(*(column.to_pylist() for column in columns), strict=True):
        if number % 4 == 0:
            assert (text, fault, reason) == (None, "HTTP 400: as long as a book", "error")
        elif number % 4 == 1:
            assert (text, reason) == (None, "error")
            assert "after 2 attempts" in fault
        else:
            assert (text, fault, reason) == (f"question {number}", None, "stop")
    assert max(server.attempts().values()) == 2
    assert server.most_at_once <= 12


async def test_a_replica_has_as_many_requests_in_flight_as_its_service_takes() -> None:
    most = 3 * OpenAISampler.queue_in_flight
    with StubOpenAI(lambda request: say("x", delay_s=0.5)) as server:
        service = ServiceConfig(base_url=server.url, model="stub", api_key_env=None, concurrency=most)
        slot = Slot("sampler", 0, "this machine", "cpu", (), 0.0, 1, Mesh(dp=1).at(0))
        plan = Plan({"sampler": (slot,)}, (("sampler",),), "cpu")
        specs = {"sampler": RoleSpec(OpenAISampler, OpenAISamplerConfig(service=service))}
        async with RoleGraph(plan, specs, GraphOptions(use_ray=False)) as graph:
            handle: Any = graph.groups["sampler"].handle
            batch = await handle.sample(questions(2 * most), SamplingParams(n=1))
    assert batch["sample_fault"].to_pylist() == [None] * 2 * most
    assert server.most_at_once == most


def test_a_key_that_is_refused_ends_the_run_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with (
        StubOpenAI([say("x")], models=status(401)) as server,
        pytest.raises(ConfigError, match=r"HTTP 401.* MY_KEY .* is not set"),
        sampler(server.url, api_key_env="MY_KEY"),
    ):
        pass


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_vllms_own_server_samples(vllm_url: str) -> None:
    with sampler(vllm_url, "tiny", timeout_s=120) as role:
        sampling = SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=3)
        first = role.sample(questions(), sampling)
        assert first["sample_fault"].to_pylist() == [None] * 9
        assert set(first["finish_reason"].to_pylist()) <= {"stop", "length"}
        assert all(1 <= tokens <= 12 for tokens in first["response_length"].to_pylist())
        texts = first["response_text"].to_pylist()
        assert len(set(texts)) > 3
        again = role.sample(questions().with_columns({"repeats": [[1], [], [2]]}), sampling)
        assert again["response_text"].to_pylist() == [texts[1], texts[8]]
        greedy = role.sample(questions(1), SamplingParams(n=2, temperature=0.0, max_tokens=8))
        assert len(set(greedy["response_text"].to_pylist())) == 1
        long = Batch.from_columns({"uid": ["a", "b"], "prompt": ["x" * 900, "short"]})
        faults = role.sample(long, SamplingParams(max_tokens=8))["sample_fault"].to_pylist()
        assert "HTTP 400" in faults[0]
        assert faults[1] is None
    with sampler(vllm_url, "another", timeout_s=120) as role, pytest.raises(ConfigError, match="model='another'"):
        role.sample(questions(1), sampling)
