"""Files as they are found in the wild, and the errors when they are not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolegraph.data.config import DataConfig
from rolegraph.data.report import BadRowError
from rolegraph.data.sources import rows_of
from rolegraph.errors import DataError


def _rows(**config: Any) -> list[Any]:
    return list(rows_of(DataConfig(**config)))


def test_jsonl_with_everything_that_goes_wrong(jsonl: Callable[..., str]) -> None:
    path = jsonl(
        b'\xef\xbb\xbf{"prompt": "bom"}\r',
        b"",
        b'{"prompt": "broken',
        b"[1]",
        b'{"prompt": "\xff"}',
        b'{"prompt": "line\xe2\x80\xa8separator"}',
        b"[" * 100_000,
        b'{"prompt": "lone \\ud83d"}',
        b'{"prompt": "last, without a newline"}',
    )
    found = _rows(source="jsonl", path=path)
    places = {where.removeprefix(f"{path}:"): row for where, row in found}
    assert list(places) == ["1", "3", "4", "5", "6", "7", "8", "9"]
    assert places["1"] == {"prompt": "bom"}
    assert places["6"] == {"prompt": "line\u2028separator"}
    reasons = {place: row.reason for place, row in places.items() if isinstance(row, BadRowError)}
    assert reasons == {"3": "broken JSON", "4": "not a JSON object", "5": "not UTF-8", "7": "broken JSON"}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_byte_order_mark_says_how_a_file_is_written(tmp_path: Path, encoding: str, ending: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    text = mark + '{"prompt": "é\u2028"}\r\n{"prompt": "bro\n\n{"prompt": "b"}'
    data = text.encode(encoding)
    path = tmp_path / f"rows{ending}"
    path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    found = _rows(source="jsonl", path=str(path))
    assert [where.rpartition(":")[2] for where, _ in found] == ["1", "2", "4"]
    assert [row.reason if isinstance(row, BadRowError) else row for _, row in found] == [
        {"prompt": "é\u2028"},
        "broken JSON",
        {"prompt": "b"},
    ]


def test_an_array_of_rows_is_named(jsonl: Callable[..., str]) -> None:
    array = jsonl(b"[", b'  {"prompt": "hi"}', b"]")
    assert "one object a line" in str(_rows(source="jsonl", path=array)[0][1])


def test_paths_files_folders_patterns_and_gzip(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "c"}))
    (tmp_path / "readme.md").write_text("no data")

    damaged = bytearray((tmp_path / "c.jsonl.gz").read_bytes())
    damaged[-20:-8] = b"\xff" * 12
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "d.jsonl.gz").write_bytes(damaged)

    def prompts(path: Any) -> list[str]:
        return [row["prompt"] for _, row in _rows(source="jsonl", path=path)]

    with pytest.raises(DataError, match=r"d.jsonl.gz cannot be read"):
        prompts(str(tmp_path / "damaged"))

    assert prompts(str(tmp_path)) == ["a", "b", "c"]
    assert prompts(f"{tmp_path}/*.jsonl") == ["a", "b"]
    assert prompts((f"{tmp_path}/b.jsonl", f"{tmp_path}/*.jsonl")) == ["b", "a"]
    with pytest.raises(DataError, match=r"nothing.jsonl' is not there"):
        prompts(f"{tmp_path}/nothing.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="a folder without"):
        prompts(str(tmp_path / "empty"))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "solution": [1, None]}), path)
    assert _rows(source="parquet", path=str(path)) == [
        (f"{path}:1", {"prompt": "a", "solution": 1}),
        (f"{path}:2", {"prompt": "b", "solution": None}),
    ]
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match=r"rows.parquet cannot be read as Parquet"):
        _rows(source="parquet", path=str(path))


def test_a_parquet_row_that_python_cannot_hold_is_bad_and_the_others_are_read(tmp_path: Path) -> None:
    bytes_ = pa.array([b"a", b"\xff", b"c"])
    prompts = pa.Array.from_buffers(pa.string(), 3, bytes_.buffers())  # unchecked, as careless writers do it
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "rows.parquet")
    found = _rows(source="parquet", path=str(tmp_path / "rows.parquet"))
    assert [where.rpartition(":")[2] for where, _ in found] == ["1", "2", "3"]
    assert [row.reason if isinstance(row, BadRowError) else row["prompt"] for _, row in found] == [
        "a",
        "not UTF-8",
        "c",
    ]


def test_huggingface_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": data, "test": data.select([2])}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.jsonl").write_text('{"prompt": "d"}\n{"prompt": "e"}\n')

    def prompts(folder: str, split: str = "train") -> list[str]:
        found = _rows(source="huggingface", path=str(tmp_path / folder), split=split)
        return [row["prompt"] for _, row in found]

    assert prompts("saved") == ["a", "b", "c"]
    assert prompts("splits", "test") == ["c"]
    assert prompts("plain", "train[:1]") == ["d"]
    with pytest.raises(DataError, match="which has train, test"):
        prompts("splits", "dev")
    with pytest.raises(DataError, match=r"data\.revision is for a dataset on the hub"):
        _rows(source="huggingface", path=str(tmp_path / "saved"), revision="main")


def test_a_hub_name_without_a_network_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"data.path='nobody/nothing'.*no network.*no folder here"):
        _rows(source="huggingface", path="nobody/nothing")


def test_reasoning_gym_rows_and_its_errors() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = {"source": "reasoning_gym", "task": "chain_sum", "task_config": settings, "size": 5, "seed": 3}
    found = _rows(**config, question_format="Think. {question}", answer_format="<answer>{answer}</answer>")
    again = reasoning_gym.create_dataset("chain_sum", seed=3, size=5, **settings)
    for (where, row), entry in zip(found, again, strict=True):
        assert where.startswith("chain_sum:")
        assert row["messages"] == [{"role": "user", "content": f"Think. {entry['question']}"}]
        assert row["response"] == f"<answer>{entry['answer']}</answer>"
        assert again.score_answer(row["answer"], json.loads(row["entry"])) == 1.0
    with pytest.raises(DataError, match="near it: chain_sum"):
        _rows(source="reasoning_gym", task="chain_sums")
    with pytest.raises(DataError, match="did you mean max_terms"):
        _rows(**{**config, "task_config": {"max_term": 2}})
    with pytest.raises(DataError, match="does not suit chain_sum"):
        _rows(**{**config, "task_config": {"min_terms": 5, "max_terms": 2}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "data.source is not set"),
        ({"source": "jsonl"}, "needs data.path"),
        ({"source": "reasoning_gym"}, "needs data.task"),
        ({"source": "jsonl", "path": "x", "task": "chain_sum"}, "data.task is for data.source=reasoning_gym"),
        ({"source": "reasoning_gym", "task": "chain_sum", "path": "x"}, "data.path is not for"),
        ({"source": "reasoning_gym", "task": "chain_sum", "question_format": "?"}, "lacks {question}"),
        ({"source": "huggingface", "path": ("a", "b")}, "not a list"),
        ({"source": "jsonl", "path": "x", "max_length": 0}, "data.max_length=0"),
        ({"source": "jsonl", "path": "x", "limit": 0}, "data.limit=0"),
        ({"source": "jsonl", "path": "x", "preprocessors": ("f",)}, "'f' is no import path"),
        (
            {"source": "jsonl", "path": "x", "size": 9},
            "data.size is for data.source=reasoning_gym, and data.source is jsonl",
        ),
        ({"source": "jsonl", "path": "x", "split": "test"}, "data.split is for data.source=huggingface"),
        ({"source": "parquet", "path": "x", "answer_format": "<{answer}>"}, "data.answer_format is for"),
    ],
)
def test_settings_that_cannot_go_together(config: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in DataConfig(**config).problems())
    with pytest.raises(DataError):
        _rows(**config)
