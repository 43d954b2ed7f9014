"""From names to callables, and from signatures to columns."""

from __future__ import annotations

from typing import Any

import pytest

from rolegraph.rewards import registry, reward
from rolegraph.rewards.functions import exact_match, regex
from rolegraph.rewards.registry import Wants, resolve, wants


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def judge(completions: list[str], prompts: list[Any], *, answer: list[str], level: Any = None, **more: Any) -> Any:
    return [answer, level, more]


async def ask(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


class Judge:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    async def __call__(self, completions: list[str], *, answer: list[str]) -> list[float]:
        return [self.scale for _ in completions]


class Mute:
    pass


def test_a_signature_tells_columns() -> None:
    assert wants(judge) == Wants(("prompts", "answer"), ("level",), everything=True, is_async=False)
    assert wants(ask) == Wants((), (), everything=False, is_async=True)
    assert wants(Judge()) == Wants(("answer",), (), everything=False, is_async=True)
    assert wants(judge).select(["uid", "answer"]) == ["uid", "answer"]
    assert wants(judge).missing(["uid", "answer"]) == ["prompts"]


def test_settings_of_the_config_are_no_columns() -> None:
    assert wants(resolve(f"{__name__}.judge", {"answer": ["a"]})).required == ("prompts",)
    assert wants(resolve("regex", {"pattern": "a"})).required == ()
    assert wants(regex).required == ("pattern",)


def test_a_column_called_like_a_setting_of_a_built_in_function_is_not_one() -> None:
    assert wants(exact_match).select(["answer", "ignore_case", "extract_from"]) == ["answer"]


def test_completions_come_first() -> None:
    def bad(*, completions: list[str]) -> None: ...

    with pytest.raises(TypeError, match=r"bad must take the completions"):
        wants(bad)


def test_names_paths_and_classes_are_found() -> None:
    reward("mine")(judge)
    reward(ask)
    assert resolve("mine", {}) is judge
    assert resolve("ask", {}) is ask
    assert resolve(f"{__name__}.judge", {}) is judge
    assert resolve(f"{__name__}.Judge", {"scale": 2.0}).scale == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("target", "kwargs", "error", "message"),
    [
        ("exact_macth", {}, LookupError, r"did you mean 'exact_match'\?"),
        (f"{__name__}.juge", {}, LookupError, r"did you mean 'judge'\?"),
        ("no_such_module.f", {}, ImportError, "no_such_module"),
        ("exact_match", {"ignore_cas": True}, TypeError, r"no setting 'ignore_cas'; did you mean 'ignore_case'\?"),
        (f"{__name__}.Judge", {"scal": 2.0}, TypeError, "scal"),
        (f"{__name__}.Mute", {}, TypeError, "give it a __call__"),
    ],
)
def test_what_cannot_be_found_says_why(
    target: str, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve(target, kwargs)


def test_a_name_is_given_once() -> None:
    reward("mine")(judge)
    reward("mine")(judge)
    with pytest.raises(ValueError, match=r"already called 'mine'.*choose another name"):
        reward("mine")(ask)
    with pytest.raises(ValueError, match="already called 'format'"):
        reward("format")(ask)
