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
    assert _column(_load(path, tiny_folder, id_column="key"), "uid") == ["x", "x#2", "x#3", "x#4"]
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
