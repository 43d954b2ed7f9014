"""Whole runs of algorithm=distill against a service that answers, and fails in every way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolegraph.cli import dispatch
from tests.rolegraph.samplers import lines
from tests.stub_openai import Action, Request, StubOpenAI, cut, hang_up, raw, say, stall, status


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    rows = [
        {"prompt": f"question {i}", "meta": {"tags": ["x"] * i, **({"odd": True} if i % 2 else {})}} for i in range(12)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"prompt": ""}\n{broken\n')
    return file


@pytest.fixture
def troubled() -> Iterator[StubOpenAI]:
    """Answers most; the others fail for a while, or for good."""
    seen: dict[str, int] = {}

    def script(request: Request) -> Action:
        number = int(request.text.split()[-1])
        attempt = seen[request.key] = seen.get(request.key, 0) + 1
        passing = {
            1: status(429, retry_after=0.05),
            2: status(503),
            3: stall(3.0),
            4: cut(),
            5: hang_up,
            6: raw("{bad"),
        }
        if number in passing and attempt == 1:
            return passing[number]
        if number == 7:
            return status(400, message="prompt refused")
        if number == 8:
            return say("", tokens=0)
        if number == 9:
            return say("9", reasoning="three threes")
        return say(f"answer {number}")

    with StubOpenAI(script) as server:
        yield server


def distill(*overrides: str, questions: Path, server: StubOpenAI, folder: Path) -> Path:
    service = f"sampler.service={{base_url: '{server.url}', model: stub, timeout_s: 1, deadline_s: 20, max_retries: 4}}"
    words = ["run", "algorithm=distill", "sampler=openai", service, "data=jsonl", f"data.path={questions}"]
    code = dispatch([*words, "use_ray=false", "model=tiny", f"output_dir={folder}", *overrides])
    assert code == 0
    return folder


def test_every_row_is_accounted_for_whatever_the_service_does(
    questions: Path, troubled: StubOpenAI, tmp_path: Path
) -> None:
    folder = distill(
        "algorithm.num_sampling_batch_size=5", questions=questions, server=troubled, folder=tmp_path / "run"
    )
    candidates = lines(folder / "candidates.jsonl")
    assert len({(row["uid"], row["repeat"]) for row in candidates}) == len(candidates) == 12
    kept = {row["messages"][0]["content"]: row for row in lines(folder / "kept.jsonl")}
    assert set(kept) == {f"question {i}" for i in range(12) if i not in (7, 8)}
    for i in (0, 1, 2, 3, 4, 5, 6):
        assert kept[f"question {i}"]["messages"][-1] == {"role": "assistant", "content": f"answer {i}"}
        assert kept[f"question {i}"]["meta"] == {"tags": ["x"] * i, **({"odd": True} if i % 2 else {})}, "as given"
    assert kept["question 9"]["messages"][-1]["content"] == "<think>\nthree threes\n</think>\n\n9"
    (refused,) = [row for row in candidates if row["sample_fault"] and "prompt refused" in row["sample_fault"]]
    assert refused["response_text"] is None
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rows"] == 12
    assert summary["kept"] == 10
    assert summary["rows_dropped"] == {"no response": 2}
    assert summary["source"]["rows"] == 14


def test_a_finished_run_asks_the_service_nothing(questions: Path, troubled: StubOpenAI, tmp_path: Path) -> None:
    folder = distill(questions=questions, server=troubled, folder=tmp_path / "run")
    asked = len(troubled.requests)
    distill("resume=true", questions=questions, server=troubled, folder=folder)
    assert len(troubled.requests) == asked
