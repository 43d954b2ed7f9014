"""One row in each shape it comes in, good and bad."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolegraph.data.report import BadRowError
from rolegraph.data.rows import Sample, content_id, read, repair


def _read(row: dict[str, Any], needs: Any = "prompt", **options: Any) -> Sample:
    return read(row, needs, **{"system_prompt": None, "prompt_as": "user", **options})


USER = {"role": "user", "content": "2 + 2 ="}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER]},
        {"prompt": "2 + 2 ="},
        {"prompt": [USER]},
        {"conversations": [{"from": "human", "value": "2 + 2 ="}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2 ="}]}
            ]
        },
        {"messages": [{**USER, "tool_calls": None}]},
        {"messages": [{**USER, "from": None, "value": None}]},
        {"messages": [{"role": None, "content": float("nan"), "from": "human", "value": "2 + 2 ="}]},
        {"messages": [{"role": " User", "content": "2 + 2 ="}]},
        {"messages": '[{"role": "user", "content": "2 + 2 ="}]'},
        {"messages": float("nan"), "prompt": "2 + 2 ="},
    ],
)
def test_every_shape_is_the_same_chat(row: dict[str, Any]) -> None:
    sample = _read(row)
    assert sample.messages == [USER]
    assert sample.columns["messages"] == [USER]


def test_roles_of_the_from_value_form_and_the_response() -> None:
    turns = [("system", "be brief"), ("human", "hi"), ("gpt", "yo"), ("human", "2 + 2 ="), ("gpt", "4")]
    sample = _read({"conversations": [{"from": who, "value": text} for who, text in turns]}, "response")
    assert [m["role"] for m in sample.messages or []] == ["system", "user", "assistant", "user"]
    assert sample.response == "4"
    assert sample.columns["response"] == "4"
    assert sample.columns["messages"][-1]["content"] == "2 + 2 ="


def test_a_response_column_goes_before_the_last_assistant_message() -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "5"}], "response": "4"}
    assert _read(row, "response").response == "4"
    assert _read({"prompt": [USER], "response": [{"role": "assistant", "content": "4"}]}, "response").response == "4"


@pytest.mark.parametrize("role", ["assistant", "Assistant", "gpt", "model", "chatgpt"])
def test_what_the_assistant_said_last_is_the_answer_and_no_part_of_the_prompt(role: str) -> None:
    def said(*texts: Any, **columns: Any) -> Sample:
        return _read({"messages": [USER, *({"role": role, "content": text} for text in texts)], **columns}, "chat")

    answered = said("4")
    assert (answered.messages, answered.response, answered.columns["messages"]) == ([USER], "4", [USER])
    twice = said("Well.", "4")
    assert (twice.messages, twice.response) == ([USER], "Well.\n4")
    assert twice.changes == ["several assistant messages at the end, taken for one response"]
    for missing in (None, "", float("nan")):
        unanswered = said(missing)
        assert (unanswered.messages, unanswered.response) == ([USER], None)
    assert said("5", response="4").response == "4"
    assert said(None, response="4").response == "4"


def test_numbers_among_texts_are_read_as_texts() -> None:
    sample = _read({"prompt": 17, "response": 2.5}, "response")
    assert (sample.messages, sample.response) == ([{"role": "user", "content": "17"}], "2.5")
    assert sample.changes == ["a number as `prompt`, read as its text", "a number as `response`, read as its text"]
    assert _read({"messages": [{"role": "user", "content": 17}]}).messages == [{"role": "user", "content": "17"}]
    assert _read({"prompt": "17"}).changes == []


def test_what_is_nested_too_deep_is_refused() -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(BadRowError, match="nested too deep"):
        repair({"prompt": "hi", "deep": deep})


def test_the_system_prompt_is_put_before_rows_without_one() -> None:
    assert (_read({"prompt": "hi"}, system_prompt="be brief").messages or [])[0] == {
        "role": "system",
        "content": "be brief",
    }
    own = {"role": "system", "content": "own"}
    assert (_read({"messages": [own, USER]}, system_prompt="be brief").messages or [])[0] == own


@pytest.mark.parametrize("needs", ["prompt", "chat", "response"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER]},
        {"messages": [USER, {"role": "assistant", "content": "4"}]},
        {"conversations": [{"from": "human", "value": "2 + 2 ="}]},
        {"messages": '[{"role": "user", "content": "2 + 2 ="}]'},
        {"prompt": [USER]},
        {"prompt": "2 + 2 ="},
    ],
)
def test_the_column_has_the_chat_that_the_model_sees(row: dict[str, Any], needs: str) -> None:
    sample = _read({"response": "4", **row}, needs, system_prompt="be brief")
    assert sample.messages == [{"role": "system", "content": "be brief"}, USER]
    assert sample.columns["messages"] == sample.messages


def test_a_prompt_can_be_raw_text() -> None:
    sample = _read({"prompt": "Once upon"}, prompt_as="text")
    assert sample.messages is None
    assert sample.text == "Once upon"


@pytest.mark.parametrize(
    ("row", "needs", "reason"),
    [
        ({}, "prompt", "no messages and no prompt"),
        ({"prompt": ""}, "prompt", "empty prompt"),
        ({"prompt": True}, "prompt", "`prompt` is no list"),
        ({"prompt": float("nan")}, "prompt", "no messages and no prompt"),
        ({"prompt": " \n"}, "prompt", "empty prompt"),
        ({"messages": "[{broken"}, "prompt", "no list of messages"),
        ({"messages": []}, "prompt", "empty prompt"),
        ({"messages": "hi"}, "prompt", "no list of messages"),
        ({"messages": ["hi"]}, "prompt", "no object"),
        ({"messages": [{"content": "hi"}]}, "prompt", "without a role"),
        ({"messages": [{"role": "user", "content": None}]}, "prompt", "without content"),
        ({"messages": [{"role": "user", "content": True}]}, "prompt", "neither text"),
        ({"messages": [{"role": "assistant", "content": None}, USER]}, "prompt", "without content"),
        ({"messages": [{"role": "user", "content": [" "]}]}, "prompt", "empty prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}, "prompt", "type image"),
        ({"messages": [{"role": "user", "content": ""}]}, "prompt", "empty prompt"),
        ({"messages": [{"role": "system", "content": "be brief"}]}, "prompt", "empty prompt"),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "prompt", "only an assistant"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "prompt", "only an assistant"),
        ({"prompt": "hi"}, "response", "no response"),
        ({"prompt": "hi", "response": True}, "response", "no text"),
        ({"prompt": "hi", "response": float("nan")}, "response", "no response"),
        ({"prompt": "hi", "response": ""}, "response", "empty response"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "response", "no response"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "response", "no response"),
        ({"prompt": "hi", "response": ["a", "b"]}, "response", "more or less than one"),
        ({"prompt": "hi"}, "text", "no text"),
        ({"text": ""}, "text", "empty text"),
    ],
)
def test_bad_rows_say_why(row: dict[str, Any], needs: Any, reason: str) -> None:
    with pytest.raises(BadRowError) as caught:
        _read(row, needs)
    assert reason in str(caught.value)


def test_lone_surrogates_are_replaced_and_halves_joined() -> None:
    assert repair("a\ud83d") == ("a\ufffd", True)
    assert repair("\ud83d\ude00") == ("\U0001f600", True)
    assert repair({"a": ["\udc00", 1]}) == ({"a": ["\ufffd", 1]}, True)
    row = {"a": ["é", {"b": None}]}
    assert repair(row) == (row, False)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_whatever_is_repaired_can_be_encoded(value: Any) -> None:
    import json

    json.dumps(repair(value)[0], ensure_ascii=False).encode()


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=5))
def test_any_row_is_read_or_refused(row: dict[str, Any]) -> None:
    for shape in (row, {"messages": list(row.values())}, {"prompt": row}):
        try:
            sample = _read(shape)
        except BadRowError:
            continue
        assert sample.messages


def test_the_content_id_depends_on_content_alone() -> None:
    assert content_id({"a": 1, "b": 2}) == content_id({"b": 2, "a": 1})
    assert content_id({"a": 1}) != content_id({"a": "1"})
