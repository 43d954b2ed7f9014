"""From rows to tokens: what is kept, what is left out and why, and what the columns hold."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolegraph import json_rows
from rolegraph.data import DataConfig, Dataset, load, loading, privileged
from rolegraph.data import tokenizer as tokenizers
from rolegraph.errors import BatchError, DataError

Write = Callable[..., str]
END = 257


def _load(path: str, folder: str, needs: Any = "prompt", **config: Any) -> Dataset:
    return load(DataConfig(source="jsonl", path=path, **config), folder, needs)


def _column(data: Dataset, name: str) -> list[Any]:
    return data.rows[name].to_pylist()


def test_prompts_in_tokens_and_columns_untouched(jsonl: Write, tiny_folder: str) -> None:
    rows = [
        {"prompt": "1 + 1 =", "solution": "2", "level": 1, "extra": {"a": [1]}},
        {"prompt": "1 + 2 =", "solution": "3", "level": None, "tags": ["x"]},
    ]
    data = _load(jsonl(*rows), tiny_folder)
    model = tokenizers.load(tiny_folder)
    texts = [f"<|user|>{row['prompt']}<|end|><|assistant|>" for row in rows]
    assert _column(data, "prompt_ids") == model.encode(texts, False)
    assert _column(data, "prompt_length") == [len(ids) for ids in model.encode(texts, False)]
    assert _column(data, "solution") == ["2", "3"]
    assert _column(data, "level") == [1, None]
    assert _column(data, "extra") == [{"a": [1]}, None]
    assert _column(data, "tags") == [None, ["x"]]
    assert "response_ids" not in data.rows
    assert (data.report.rows, data.report.kept) == (2, 2)


def test_rows_are_known_by_all_they_hold_and_not_by_their_ids_alone(jsonl: Write, tiny_folder: str) -> None:
    def content(**changes: Any) -> str:
        row = {"id": "1", "prompt": "1 + 1 =", "solution": "2", "tags": ["x"], **changes}
        return _load(jsonl(row), tiny_folder, id_column="id").report.content

    assert content() == content() != ""
    assert content(prompt="1 + 2 =") != content(), "as long as before"
    assert content(solution="3") != content()
    assert content(tags=["y"]) != content()


def test_sft_responses_end_with_the_end_token(jsonl: Write, tiny_folder: str) -> None:
    turn = {"role": "assistant", "content": "12"}
    data = _load(
        jsonl({"prompt": "q", "response": "12"}, {"messages": [{"role": "user", "content": "q"}, turn]}),
        tiny_folder,
        "response",
    )
    answer = [*tokenizers.load(tiny_folder).encode(["12"], False)[0], END]
    assert _column(data, "response_ids") == [answer, answer]
    assert _column(data, "response_length") == [3, 3]
    assert _column(data, "response_mask") == [[1, 1, 1]] * 2
    assert _column(data, "length") == [length + 3 for length in _column(data, "prompt_length")]
    assert _column(data, "prompt_ids")[0] == _column(data, "prompt_ids")[1]
    data.rows.check_alignment()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # A newline after the end token, as many templates write.
        ("{% for m in messages %}<|{{m.role}}|>{{m.content}}<|end|>\n{% endfor %}", "12<|end|>"),
        # An assistant turn that the template itself begins with a thought.
        (
            "{% for m in messages %}<|{{m.role}}|>{% if m.role == 'assistant' %}<think></think>{% endif %}"
            "{{m.content}}<|end|>{% endfor %}",
            "<think></think>12<|end|>",
        ),
        # One that does not begin with the prompt: the bare text then.
        ("{{ messages | length }}{% for m in messages %}{{m.content}}<|end|>{% endfor %}", "12<|end|>"),
    ],
)
def test_the_response_is_what_the_template_writes(jsonl: Write, tiny_folder: str, template: str, expected: str) -> None:
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    data = _load(jsonl({"prompt": "q", "response": "12"}), tiny_folder, "response", chat_template=template)
    assert _column(data, "response_ids") == tokenizers.load(tiny_folder).encode([expected], False)


def test_pt_trains_on_every_token_after_the_first(jsonl: Write, tiny_folder: str) -> None:
    data = _load(jsonl({"text": "abc", "source": "web"}), tiny_folder, "text")
    ids = tokenizers.load(tiny_folder).encode(["abc"], True)[0]
    assert _column(data, "prompt_ids") == [ids[:1]]
    assert _column(data, "response_ids") == [[*ids[1:], END]]
    assert _column(data, "source") == ["web"]
    assert "text" not in data.rows


def test_raw_prompts_skip_the_template(jsonl: Write, tiny_folder: str) -> None:
    data = _load(jsonl({"prompt": "Once", "response": "upon"}), tiny_folder, "response", prompt_as="text")
    model = tokenizers.load(tiny_folder)
    assert _column(data, "prompt_ids") == model.encode(["Once"], True)
    assert _column(data, "response_ids") == [[*model.encode(["upon"], False)[0], END]]


def test_long_rows_are_dropped_or_cut_on_the_left(jsonl: Write, tiny_folder: str) -> None:
    path = jsonl({"prompt": "x" * 50}, {"prompt": "short"})
    whole = _column(_load(path, tiny_folder), "prompt_ids")[0]
    dropped = _load(path, tiny_folder, max_length=20)
    assert len(dropped) == 1
    assert dropped.report.dropped == {"longer than max_length=20": 1}
    cut = _load(path, tiny_folder, max_length=20, truncation_strategy="left")
    assert _column(cut, "prompt_ids")[0] == whole[-20:]
    assert _column(cut, "prompt_length")[0] == 20
    assert "1 changed: cut on the left to max_length=20" in "\n".join(cut.report.lines())


def test_a_response_is_never_cut(jsonl: Write, tiny_folder: str) -> None:
    path = jsonl({"prompt": "x" * 50, "response": "12"}, {"prompt": "x", "response": "y" * 50})
    data = _load(path, tiny_folder, "response", max_length=20, truncation_strategy="left")
    assert _column(data, "length") == [20]
    assert _column(data, "response_length") == [3]
    assert data.report.dropped == {"response alone longer than max_length=20": 1}


def test_bad_rows_are_counted_with_their_places(jsonl: Write, tiny_folder: str) -> None:
    bad = [b"{", {"prompt": ""}, {"prompt": ""}, {"prompt": ""}, {"prompt": ""}]
    path = jsonl({"prompt": "good"}, *bad, {"prompt": "lone \ud83d"})
    report = _load(path, tiny_folder).report
    assert (report.rows, report.kept) == (7, 2)
    text = "\n".join(report.lines())
    assert "data: 2 of 7 rows kept" in text
    assert f"4 left out: empty prompt, at {path}:3; {path}:4; {path}:5 and 1 more" in text
    assert f"1 left out: broken JSON, at {path}:2 (column 2: " in text
    assert "1 changed: broken surrogates" in text
    with pytest.raises(DataError, match=re.escape(f"{path}:2: broken JSON")):
        _load(path, tiny_folder, on_bad_row="fail")


def test_messages_the_template_refuses_are_bad_rows(jsonl: Write, tiny_folder: str) -> None:
    template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}{{ messages[0].content }}"
    )
    path = jsonl({"prompt": "yes"}, {"prompt": "no"})
    report = _load(path, tiny_folder, chat_template=template).report
    assert "the chat template refuses the messages, at" in "\n".join(report.lines())
    assert "(not that)" in "\n".join(report.lines())
    with pytest.raises(DataError, match="not that"):
        _load(path, tiny_folder, chat_template=template, on_bad_row="fail")


def test_an_empty_result_says_what_dropped_the_rows(jsonl: Write, tiny_folder: str) -> None:
    path = jsonl({"prompt": ""}, {"prompt": "too long for that"})
    with pytest.raises(DataError, match="all 2 rows were left out") as caught:
        _load(path, tiny_folder, max_length=5)
    assert "1 left out: empty prompt" in str(caught.value)
    assert "1 left out: longer than max_length=5" in str(caught.value)
    with pytest.raises(DataError, match="it has no rows at all"):
        _load(jsonl(name="empty.jsonl"), tiny_folder)


def test_uids_come_from_the_content_or_a_column(jsonl: Write, tiny_folder: str) -> None:
    path = jsonl({"prompt": "a", "key": 7}, {"prompt": "b", "key": None})
    first, second = _column(_load(path, tiny_folder), "uid")
    assert first != second
    turned = jsonl({"prompt": "b", "key": None}, {"key": 7, "prompt": "a"}, name="turned.jsonl")
    assert _column(_load(turned, tiny_folder), "uid") == [second, first]
    named = _load(path, tiny_folder, id_column="key")
    assert _column(named, "uid") == ["7"]
    assert named.report.dropped == {"no id in column 'key'": 1}


def test_duplicates(jsonl: Write, tiny_folder: str) -> None:
    path = jsonl(*[{"prompt": "a", "key": key} for key in ("x", "x#2", "x", "x")])
    kept = _load(path, tiny_folder, id_column="key")
    assert _column(kept, "uid") == ["x", "x#2", "x#3", "x#4"]
    assert "  2 changed: a uid that an earlier row has, made another one by #2, #3, ..." in "\n".join(
        kept.report.lines()
    )
    dropped = _load(path, tiny_folder, id_column="key", on_duplicate="drop")
    assert _column(dropped, "uid") == ["x", "x#2"]
    assert f"uid x was at {path}:1" in "\n".join(dropped.report.lines())
    with pytest.raises(DataError, match=re.escape(f"{path}:3: duplicate row")):
        _load(path, tiny_folder, id_column="key", on_duplicate="fail")


def test_columns_are_renamed_and_rows_limited(jsonl: Write, tiny_folder: str) -> None:
    rows = [{"question": f"q{i}", "prompt": "not this", "length": i} for i in range(5)]
    path = jsonl(*rows)
    with pytest.raises(DataError, match=r"column 'length'.*data.columns=\{dataset_length: length\}"):
        _load(path, tiny_folder)
    data = _load(path, tiny_folder, columns={"prompt": "question", "size": "length"}, limit=3)
    assert _column(data, "prompt") == ["q0", "q1", "q2"]
    assert _column(data, "size") == [0, 1, 2]
    assert "question" not in data.rows


@pytest.mark.parametrize("name", ["ref_kl", "reward_reasons", "rewards/judge", "reward_faults/judge"])
def test_columns_that_a_run_writes_are_refused(jsonl: Write, tiny_folder: str, name: str) -> None:
    """The trainer's `ref_kl` is taken off the rewards: a dataset's column of that name would be taken for it."""
    with pytest.raises(DataError, match=f"column '{name}'.*rename it"):
        _load(jsonl({"prompt": "a", name: 1.0}), tiny_folder)


def test_preprocessors(jsonl: Write, tiny_folder: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text(
        "def double(row):\n"
        "    if row['prompt'] == 'none':\n        return None\n"
        "    return {'prompt': row['prompt'] * 2, 'times': 2 // (len(row['prompt']) - 3)}\n"
        "def wrong(row):\n    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = jsonl({"prompt": "a"}, {"prompt": "none"}, {"prompt": "bad"})
    data = _load(path, tiny_folder, preprocessors=("my_rows.double",))
    assert _column(data, "prompt") == ["aa"]
    assert data.report.dropped == {
        "preprocessor my_rows.double returned null": 1,
        "preprocessor my_rows.double raised ZeroDivisionError": 1,
    }
    with pytest.raises(DataError, match=re.escape(f"{path}:3: preprocessor my_rows.double raised")):
        _load(path, tiny_folder, preprocessors=("my_rows.double",), on_bad_row="fail")
    with pytest.raises(DataError, match="returned no row"):
        _load(path, tiny_folder, preprocessors=("my_rows.wrong",))
    with pytest.raises(DataError, match=r"'my_rows.missing' cannot be imported"):
        _load(path, tiny_folder, preprocessors=("my_rows.missing",))


def test_mixed_schemas_get_one_type_a_column(jsonl: Write, tiny_folder: str) -> None:
    rows = [
        {"prompt": "a", "number": 1, "mixed": 1, "nested": {"a": 1}, "big": 2**70, "empty": None},
        {"prompt": "b", "number": 1.5, "mixed": "one", "nested": [1], "big": 1, "empty": None},
    ]
    data = _load(jsonl(*rows), tiny_folder)
    assert _column(data, "number") == [1.0, 1.5]
    assert _column(data, "mixed") == ["1", "one"]
    assert _column(data, "nested") == ['{"a": 1}', "[1]"]
    assert _column(data, "big") == [str(2**70), "1"]
    assert _column(data, "empty") == [None, None]
    assert str(data.rows["empty"].type) == "string"  # a type that every reader can use
    assert "note: column 'mixed' holds int, str: carried as text" in "\n".join(data.report.lines())


def test_a_missing_answer_among_texts_is_null_and_stays_nan_among_numbers(jsonl: Write, tiny_folder: str) -> None:
    rows = [b'{"prompt": "a", "answer": "four", "level": NaN}', b'{"prompt": "b", "answer": NaN, "level": 1.5}']
    data = _load(jsonl(*rows), tiny_folder)
    assert _column(data, "answer") == ["four", None]
    assert str(_column(data, "level")) == "[nan, 1.5]"


def test_columns_that_arrow_cannot_hold_are_json_and_every_row_comes_back_as_it_was(
    jsonl: Write, tiny_folder: str, tmp_path: Path
) -> None:
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "nested": {"b": [1, [2]], "a": 1}, "keys": {"x": 1}, "mixed": 1, "none": {}, "deep": deep},
        {"prompt": "b", "nested": {"a": 1.5}, "keys": {"y": [[], ["z"]]}, "mixed": "one", "none": {}, "deep": [deep]},
        {"prompt": "c", "nested": None, "keys": {"x": 2, "y": []}, "mixed": 1.5, "ragged": [[1.0], [], [2.0, 3.0]]},
        {"prompt": "d"},
    ]
    plain = _load(jsonl(*rows), tiny_folder)
    assert "exact_columns" not in plain.rows
    assert [str(plain.rows[name].type) for name in ("nested", "mixed", "none", "deep")] == ["string"] * 4
    path = tmp_path / "rows.parquet"
    plain.rows.write_parquet(str(path))  # a struct without a field cannot be written
    exact = load(DataConfig(source="jsonl", path=jsonl(*rows)), tiny_folder, keep_exact=True)
    again = [
        {**{name: exact.rows[name].to_pylist()[index] for name in row}, **json_rows.decode((kept or "{}").encode())}
        for index, (row, kept) in enumerate(zip(rows, _column(exact, "exact_columns"), strict=True))
    ]
    assert again == rows
    assert _column(exact, "exact_columns")[3] is None
    assert _column(exact, "ragged")[2] == rows[2]["ragged"]
    assert (
        "exact_columns" not in load(DataConfig(source="jsonl", path=jsonl(rows[3])), tiny_folder, keep_exact=True).rows
    )


def test_messages_stay_messages_whatever_else_they_hold(jsonl: Write, tiny_folder: str) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi", "weight": weight}]} for weight in (1, "one", [1])]
    data = load(DataConfig(source="jsonl", path=jsonl(*rows)), tiny_folder, keep_exact=True)
    assert [chat[0]["content"] for chat in _column(data, "messages")] == ["hi"] * 3
    assert [chat[0]["weight"] for chat in _column(data, "messages")] == ["1", '"one"', "[1]"]
    assert [json_rows.decode(kept.encode()) for kept in _column(data, "exact_columns")] == rows


def test_rows_that_go_to_a_service_are_not_tokenised_and_have_no_limit(jsonl: Write) -> None:
    rows = [{"prompt": "x" * 10_000, "response": "y"}, {"prompt": " "}, {"messages": [{"role": "robot"}]}]
    data = _load(jsonl(*rows), "no such folder", "chat", system_prompt="Be brief.")
    assert data.rows.column_names == ["uid", "prompt", "response", "messages"]
    assert [turn["role"] for turn in _column(data, "messages")[0]] == ["system", "user"]
    assert data.report.dropped == {"empty prompt": 1, "a message without content": 1}
    asked: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": "hi", "n": n}]} for n in (1, [1])]
    data = load(
        DataConfig(source="jsonl", path=jsonl(*asked), system_prompt="Be brief."), "none", "chat", keep_exact=True
    )
    kept = [json_rows.decode(text.encode())["messages"] for text in _column(data, "exact_columns")]
    for chat, exact, row in zip(_column(data, "messages"), kept, asked, strict=True):
        assert exact == [{"role": "system", "content": "Be brief."}, *row["messages"]]
        assert [turn["content"] for turn in chat] == ["Be brief.", "hi"]
    raw = _load(jsonl({"prompt": "Once"}), "no such folder", "chat", prompt_as="text")
    assert raw.rows.column_names == ["uid", "prompt"]


def test_rows_that_a_sampling_run_wrote_are_named_by_it(jsonl: Write, tiny_folder: str) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "response": "b", "uid": "u", "repeat": repeat} for repeat in (2, 0)]
    data = _load(jsonl(*rows, {"prompt": "c", "response": "d"}, {"prompt": "e", "uid": ["u"]}), tiny_folder)
    assert _column(data, "uid")[:2] == ["u/2", "u/0"]
    assert len(_column(data, "uid")[2]) == 16
    assert data.report.dropped == {"the id in column 'uid' is neither text nor a number": 1}
    assert "repeat" not in data.rows


def test_every_kind_of_bad_row_is_counted_with_its_line(jsonl: Write, tiny_folder: str) -> None:
    deep = b'{"prompt": "deep", "x": ' + b"[" * 400 + b"]" * 400 + b"}"
    rows = [
        b'\xef\xbb\xbf{"prompt": "1"}', b'\xef\xbb\xbf{"prompt": "2"}',
        b'{"prompt": "bro', b"[]", b'{"prompt": "\xff"}',
        {"conversations": [{"from": "human", "value": "6"}, {"from": "gpt", "value": "six"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "7"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"prompt": 9, "answer": 9}, {"prompt": "10", "answer": "ten"}, {"prompt": "11", "answer": None},
        b'{"prompt": "12\\ud83d"}', {"prompt": "x" * 5000}, {"prompt": ""}, {"prompt": None}, deep, {"prompt": "2"},
    ]  # fmt: skip
    path = jsonl(*rows)
    data = _load(path, tiny_folder)
    report = data.report
    assert len(data) + sum(report.dropped.values()) == report.rows == len(rows)
    lines = {
        reason: [int(place.split(" ")[0].rpartition(":")[2]) for place in p] for reason, p in report.places.items()
    }
    assert lines == {
        "broken JSON": [3], "not a JSON object": [4], "not UTF-8": [5], "message content other than text": [8],
        "longer than max_length=1024": [13], "empty prompt": [14], "no messages and no prompt": [15],
        "nested too deep": [16],
    }  # fmt: skip
    assert report.repaired == {
        "a number as `prompt`, read as its text": 1,
        "broken surrogates in the text, replaced by U+FFFD": 1,
        "a uid that an earlier row has, made another one by #2, #3, ... at its end": 1,
    }
    assert [chat[-1]["content"] for chat in _column(data, "messages")] == [
        "1", "2", "6", "7", "9", "10", "11", "12\ufffd", "2",
    ]  # fmt: skip
    limited = _load(path, tiny_folder, limit=2)
    assert "changed" not in "\n".join(limited.report.lines())  # nothing was


def test_the_chat_template_takes_variables(jsonl: Write, tiny_folder: str) -> None:
    template = "{{ messages[0].content }}{% if think %}<think>{% endif %}"
    path = jsonl({"prompt": "a"})
    plain = _column(_load(path, tiny_folder, chat_template=template), "prompt_length")
    more = _load(path, tiny_folder, chat_template=template, chat_template_kwargs={"think": True})
    assert _column(more, "prompt_length") == [plain[0] + 1]


def test_loading_imports_no_torch(jsonl: Write, tiny_folder: str) -> None:
    code = (
        "import sys; from rolegraph.data import DataConfig, load; "
        f"load(DataConfig(source='jsonl', path={jsonl({'prompt': 'a'})!r}), {tiny_folder!r}); "
        "sys.exit(', '.join({'torch', 'transformers', 'ray'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.ray
def test_a_ray_task_loads_the_same_rows(jsonl: Write, tiny_folder: str, ray_cluster: None) -> None:
    path = jsonl(*[{"prompt": f"q{i}", "level": i, "solution": "x" * i} for i in range(150)], b"broken")
    config = DataConfig(source="jsonl", path=path)
    here = load(config, tiny_folder)
    there = load(config, tiny_folder, use_ray=True)
    assert not there.rows.is_local
    with pytest.raises(BatchError, match="fetch"):
        there.rows["prompt_ids"]
    assert there.rows.numpy("level").tolist() == list(range(150))
    assert there.rows.fetch_sync().table.to_pydict() == {
        name: here.rows[name].to_pylist() for name in there.rows.fetch_sync().column_names
    }
    assert there.report.lines() == here.report.lines()
    picked = there.rows.take([149, 0]).fetch_sync(["solution"])
    assert picked["solution"].to_pylist() == ["x" * 149, ""]
    with pytest.raises(DataError, match="broken JSON"):
        load(DataConfig(source="jsonl", path=path, on_bad_row="fail"), tiny_folder, use_ray=True)


def test_a_teacher_prompt_is_tokenised_as_the_prompt_would_be(jsonl: Write, tiny_folder: str) -> None:
    asked = [{"role": "user", "content": "1 + 1 = (it is 2)"}]
    rows = [
        {"prompt": "1 + 1 =", "teacher_prompt": "1 + 1 = (it is 2)"},
        {"prompt": "1 + 2 ="},
        {"prompt": "1 + 1 =", "teacher_prompt": asked, "id": "messages"},
        {"prompt": "1 + 3 =", "teacher_prompt": None},
    ]
    data = _load(jsonl(*rows), tiny_folder, system_prompt="Add.")
    (whole,) = tokenizers.load(tiny_folder).encode(
        ["<|system|>Add.<|end|><|user|>1 + 1 = (it is 2)<|end|><|assistant|>"], False
    )
    assert _column(data, "teacher_prompt_ids") == [whole, None, whole, None]
    assert _column(data, "teacher_prompt_length") == [len(whole), 0, len(whole), 0]
    raw = _load(jsonl(*rows[:2]), tiny_folder, prompt_as="text")
    assert _column(raw, "teacher_prompt_ids")[0] == tokenizers.load(tiny_folder).encode(["1 + 1 = (it is 2)"], True)[0]
    assert "teacher_prompt_ids" not in _load(jsonl(rows[1]), tiny_folder).rows


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (7, "`teacher_prompt` is neither text nor messages"),
        ("", "empty teacher_prompt"),
        ([{"role": "assistant", "content": "2"}], "`teacher_prompt` ends with an assistant message"),
        ([{"role": "user", "content": ""}], "empty prompt"),
    ],
)
def test_a_teacher_prompt_that_is_none_drops_its_row(value: Any, reason: str, jsonl: Write, tiny_folder: str) -> None:
    data = _load(jsonl({"prompt": "1 + 1 ="}, {"prompt": "1 + 2 =", "teacher_prompt": value}), tiny_folder)
    assert len(data) == 1
    assert any(reason in line for line in data.report.lines()), data.report.lines()


def test_a_long_teacher_prompt_is_dropped_or_cut_and_counted(jsonl: Write, tiny_folder: str) -> None:
    path = jsonl({"prompt": "1 + 1 =", "teacher_prompt": "9" * 60}, {"prompt": "1 + 2 ="})
    limits: dict[str, Any] = {"max_length": 40, "max_teacher_prompt_length": 50}
    dropped = _load(path, tiny_folder, **limits)
    assert len(dropped) == 1
    assert any("teacher_prompt longer than 50 tokens" in line for line in dropped.report.lines())
    cut = _load(path, tiny_folder, truncation_strategy="left", **limits)
    assert _column(cut, "teacher_prompt_length") == [50, 0]
    assert any("teacher_prompt cut on the left to 50 tokens" in line for line in cut.report.lines())


@pytest.mark.ray
def test_a_killed_task_says_how_to_load_less(
    jsonl: Write, tiny_folder: str, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(*arguments: Any) -> Iterator[str]:
        yield "a report"
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(loading, "_build_task", dying)
    path = jsonl({"prompt": "a"})
    with pytest.raises(DataError, match=rf"loads data.source=jsonl data.path={path} died.*: set data.limit=10000, or"):
        load(DataConfig(source="jsonl", path=path), tiny_folder, use_ray=True)


def test_a_task_that_ray_killed_for_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def killed(ref: object) -> None:
        raise ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")

    monkeypatch.setattr(ray, "get", killed)
    pending = loading.Pending(iter(["report"]), DataConfig(source="reasoning_gym", task="chain_sum"))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"killed because memory ran out: set data.size below 1000.*\nTask was killed"):
        pending.result()


def test_preprocessors_of_ones_own_come_from_a_file(jsonl: Write, tiny_folder: str, tmp_path: Path) -> None:
    plugin = tmp_path / "my_prompts.py"
    plugin.write_text("def peek(row):\n    return {**row, 'teacher_prompt': row['prompt'] + ' ' + row['answer']}\n")
    path = jsonl({"prompt": "1 + 1 =", "answer": "2"})
    data = _load(path, tiny_folder, preprocessors=("my_prompts.peek",), external_plugins=(str(plugin),))
    assert _column(data, "teacher_prompt") == ["1 + 1 = 2"]
    assert _column(data, "teacher_prompt_length")[0] > _column(data, "prompt_length")[0]
    plugin.write_text("raise RuntimeError('not today')")
    with pytest.raises(DataError, match=r"data.external_plugins: .*my_prompts.py: RuntimeError: not today"):
        _load(path, tiny_folder, preprocessors=("my_prompts.peek",), external_plugins=(str(plugin),))


def test_plugins_that_are_not_there_or_do_nothing_are_named() -> None:
    found = DataConfig(source="jsonl", path="x", external_plugins=("no/such.py",)).problems()
    assert any("data.external_plugins: there is no file 'no/such.py'" in problem for problem in found)
    assert any("has no effect without data.preprocessors" in problem for problem in found)


def test_a_teacher_is_shown_the_answer_and_half_of_the_students_are() -> None:
    chat = {"messages": [{"role": "user", "content": "1 + 1 ="}], "answer": "2"}
    shown = [{"role": "user", "content": "1 + 1 =\nThe answer is 2."}]
    assert privileged.reveal_answer(chat)["teacher_prompt"] == shown
    assert privileged.reveal_answer(chat)["messages"] == chat["messages"]
    assert privileged.reveal_answer({"prompt": "x"}) == {"prompt": "x"}
    own = {"prompt": "x", "answer": "2", "teacher_prompt": "mine"}
    assert privileged.reveal_answer(own) == own
    rows = [privileged.reveal_half({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(400)]
    told = [row["prompt"].endswith(f"The answer is {row['answer']}.") for row in rows]
    assert 150 < sum(told) < 250
    assert all(("teacher_prompt" in row) != seen for row, seen in zip(rows, told, strict=True))
    assert rows == [privileged.reveal_half({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(400)]
