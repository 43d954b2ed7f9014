"""Rows as they are found in the wild, sampled from a service: every one is answered, or left out with its line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rolegraph.json_rows import decode
from tests.stub_openai import Request, StubOpenAI, say, status

ROOT = Path(__file__).parents[2]
ROWS = (
    b'\xef\xbb\xbf{"prompt": "1"}',
    b'{"prompt": "bro',
    b'{"conversations": [{"from": "human", "value": "3"}, {"from": "gpt", "value": "three"}], "nested": {"a": 1}}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "4"}]}], "nested": [[1], [2, "x"]]}',
    b'{"prompt": 5, "answer": 5}',
    b'{"prompt": "' + b"6" * 30_000 + b'", "answer": "six"}',
    b'{"prompt": " "}',
    b'{"prompt": "8\\ud83d", "answer": null}',
    b'{"prompt": "9 fails"}',
    b'{"prompt": "1"}',
)


def answer(request: Request):  # type: ignore[no-untyped-def]
    if "fails" in request.text:
        return status(400, message="not this one")
    return say(f"{request.body['messages'][-1]['content'][:5]} it is \ud83d")


def test_every_row_is_answered_or_accounted_for(tmp_path: Path) -> None:
    data, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_bytes(b"\n".join(ROWS))
    with StubOpenAI(answer) as server:
        words = (
            *("algorithm=sampling", "sampler=openai", "sampler.service.model=stub", "use_ray=false"),
            *(f"sampler.service.base_url={server.url}", "sampler.service.api_key_env=null", "data=jsonl"),
            *(f"data.path={data}", f"output_dir={folder}", "algorithm.num_return_sequences=2", "data.shuffle=false"),
        )
        command = [sys.executable, "-m", "rolegraph.cli", "run", *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert {request.text[:2] for request in server.requests} == {"1", "3", "4", "5", "66", "8\ufffd", "9 "}
    summary = json.loads((folder / "summary.json").read_text())
    source = summary["source"]
    assert source["left_out"] == {"broken JSON": 1, "empty prompt": 1}
    assert source["left_out_at"]["broken JSON"][0].startswith(f"{data}:2 (column 12")
    assert source["left_out_at"]["empty prompt"] == [f"{data}:7"]
    assert (source["rows"], summary["rows"], summary["candidates"], summary["kept"]) == (10, 8, 16, 14)
    assert sum(summary["faults"].values()) == 2
    failed = [row for line in (folder / "samples.jsonl").open("rb") if (row := decode(line))["sample_fault"]]
    assert [(row["response_text"], row["finish_reason"]) for row in failed] == [(None, "error")] * 2
    assert "not this one" in failed[0]["sample_fault"]
    kept = [json.loads(line) for line in (folder / "kept.jsonl").open("rb")]
    assert [row["messages"][0]["content"][:2] for row in kept[::2]] == ["1", "3", "4", "5", "66", "8\ufffd", "1"]
    assert [row["nested"] for row in kept[2:6]] == [{"a": 1}] * 2 + [[[1], [2, "x"]]] * 2
    assert [row["answer"] for row in kept[6:10]] == [5, 5, "six", "six"]
    assert kept[2]["dataset_response"] == "three"
    assert kept[0]["uid"] + "#2" == kept[-1]["uid"]
    assert kept[0]["messages"][-1] == {"role": "assistant", "content": "1 it is \ufffd"}
