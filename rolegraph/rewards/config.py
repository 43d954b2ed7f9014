"""What `reward:` in a config may say. Light: checking it imports neither a user's module nor a verifier's libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rolegraph.rewards import lookup
from rolegraph.rewards.step_functions import STEP_FUNCTIONS

TARGET, NAME = "_target_", "name"
_WRONG_PLACE = {
    True: "scores whole responses: name it in reward.reward_funcs, for orm=functions",
    False: "scores steps: name it in prm.reward_funcs, for prm=functions",
}


@dataclass(frozen=True)
class FunctionSpec:
    """One reward function of a run: what to call, with which settings, under which column name, at which weight."""

    target: str
    """A registered name, or an import path."""
    kwargs: Mapping[str, Any]
    name: str
    """The column is `rewards/NAME`."""
    weight: float


@dataclass(frozen=True)
class RewardConfig:
    """Which functions score a response, and how long they may take.

    Example:
        reward_funcs: [exact_match, my_rewards.brevity, {_target_: soft_overlong, max_length: 256, cache: 64}]
        reward_weights: [1, 0.5, 1]
    """

    node: ClassVar[str] = "reward"
    """Where these settings stand in a config, for messages."""
    scores_steps: ClassVar[bool] = False
    """Whether the functions take the steps of a response and give a score for each."""

    reward_funcs: list[Any] = field(default_factory=list)
    """Each a name, an import path (`my_rewards.brevity`), or a node `{_target_: name or path, setting: value, ...}`.

    The column is called after the function; `name:` in a node calls it otherwise (two of one function need that).
    """
    reward_weights: list[float] | None = None
    """One number a function; null weighs each by 1."""
    external_plugins: list[str] = field(default_factory=list)
    """Python files or modules that are imported first; they may add names by `@reward("name")`."""
    timeout_s: float = 20.0
    """Seconds of a worker's time that one function may spend on one call's rows; rows it did not reach are null.

    Half of it is for all rows in one call. When that call fails or hangs, each row is tried alone, so that one bad row
    spoils no other: a row gets up to a quarter of what is left, and at least an equal share.
    """
    rows_per_call: int = 16
    """Rows a function sees at once."""
    workers: int | None = None
    """Processes a replica for plain functions. Null: the cores of the replica."""
    async_workers: int = 8
    """Processes a replica for async functions, which wait for others more than they compute."""
    start_timeout_s: float = 120.0
    """Seconds the functions' modules may take to import."""

    def __post_init__(self) -> None:
        # Actors have a working directory of their own.
        plugins = [str(Path(p).expanduser().resolve()) if lookup.is_file(p) else p for p in self.external_plugins]
        object.__setattr__(self, "external_plugins", plugins)

    def functions(self) -> tuple[FunctionSpec, ...]:
        """The functions, in order. Raises ValueError with all `problems` when there are any."""
        if found := self.problems():
            raise ValueError("\n".join(found))
        weights = self.reward_weights or [1.0] * len(self.reward_funcs)
        return tuple(
            FunctionSpec(*_parts(entry), weight=float(weight))
            for entry, weight in zip(self.reward_funcs, weights, strict=True)
        )

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        found = [*self._plugin_problems(), *self._number_problems()]
        if not self.reward_funcs:
            names = ", ".join(sorted(name for name in lookup.builtin() if self._is_ours(name)))
            found.append(f"{self.node}.reward_funcs is empty: name at least one function (built in: {names})")
        called: list[str] = []
        for index, entry in enumerate(self.reward_funcs):
            key = f"{self.node}.reward_funcs[{index}]"
            if problem := _form_problem(entry):
                found.append(f"{key}: {problem}")
                continue
            target, kwargs, name = _parts(entry)
            called.append(name)
            if target in lookup.builtin() and not self._is_ours(target):
                found.append(f"{key}: {target} {_WRONG_PLACE[self.scores_steps]}")
                continue
            found += [f"{key}: {text}" for text in lookup.problems(target, kwargs, self.external_plugins)]
        for name in sorted({name for name in called if called.count(name) > 1}):
            found.append(f"{self.node}.reward_funcs: two functions are called {name!r}: add `name: ...` to one of them")
        return found

    def _is_ours(self, builtin: str) -> bool:
        return (builtin in STEP_FUNCTIONS) == self.scores_steps

    def _plugin_problems(self) -> list[str]:
        return [
            f"{self.node}.external_plugins[{index}]: {problem}"
            for index, plugin in enumerate(self.external_plugins)
            if (problem := lookup.plugin_problem(plugin))
        ]

    def _number_problems(self) -> list[str]:
        found = []
        weights = self.reward_weights
        if weights is not None and len(weights) != len(self.reward_funcs):
            found.append(
                f"{self.node}.reward_weights has {len(weights)} numbers for {len(self.reward_funcs)} reward_funcs: "
                "give one each, or null to weigh each by 1"
            )
        for key in ("timeout_s", "start_timeout_s"):
            if not getattr(self, key) > 0:
                found.append(f"{self.node}.{key}={getattr(self, key)} must be more than 0 seconds")
        for key in ("rows_per_call", "workers", "async_workers"):
            value = getattr(self, key)
            if value is not None and value < 1:
                found.append(f"{self.node}.{key}={value} must be at least 1")
        return found


def _form_problem(entry: object) -> str | None:
    """What is wrong with the form of one entry of `reward_funcs`."""
    if isinstance(entry, str) and entry:
        return None
    if isinstance(entry, Mapping):
        if not isinstance(entry.get(TARGET), str) or not entry[TARGET]:
            hint = f" (keys: {', '.join(map(str, entry))})" if entry else ""
            return f"a node needs `_target_`, the function's name or import path{hint}"
        if not isinstance(entry.get(NAME, ""), str):
            return f"`name` must be a string, not {entry[NAME]!r}"
        return None
    return f"{entry!r} is neither a name, an import path nor a node {{_target_: ..., setting: ...}}"


def _parts(entry: str | Mapping[str, Any]) -> tuple[str, dict[str, Any], str]:
    """Target, settings and column name of a well-formed entry."""
    if isinstance(entry, str):
        return entry, {}, entry.rpartition(".")[2]
    target = str(entry[TARGET])
    kwargs = {str(key): _plain(value) for key, value in entry.items() if key not in (TARGET, NAME)}
    return target, kwargs, str(entry.get(NAME) or target.rpartition(".")[2])


def _plain(value: Any) -> Any:
    """Plain containers: settings travel to other processes and to libraries that test for dict."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
