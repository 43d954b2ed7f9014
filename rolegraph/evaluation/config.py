"""What `eval:` may say. Light imports only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from rolegraph.data.config import DataConfig
from rolegraph.rewards.config import RewardConfig

Kind = Literal["pass", "mean"]


@dataclass(frozen=True)
class Measure:
    """One of a set's `metrics`: `pass@4` or `mean@8`."""

    kind: Kind
    k: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.k}"


def measure(text: str) -> Measure | None:
    """The measure that a word names; null where it names none.

    >>> measure("pass@4"), measure("best@4")
    (Measure(kind='pass', k=4), None)
    """
    found = re.fullmatch(r"(pass|mean)@([1-9]\d*)", text)
    return None if found is None else Measure("pass" if found[1] == "pass" else "mean", int(found[2]))


@dataclass(frozen=True, kw_only=True)
class EvalSetConfig:
    """Prompts, how they are answered, and what the answers are measured by.

    `data` changes keys of the run's own `data`: what it does not say is as there, but that another `source` or `task`
    takes nothing of that one's (path, task_config, ...), and that a `limit` is a set's own.
    """

    node: ClassVar[str] = "eval.sets.NAME"

    data: DataConfig = field(default_factory=DataConfig)
    n: Annotated[int, Ge(0)] | None = None
    """Responses drawn to each prompt; 0 draws none. Null: 1, or 0 where `loss` is true."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """0 takes the likeliest token each time (greedy)."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Annotated[int, Ge(0)] = 0
    """Most likely tokens to draw from; 0: all."""
    max_completion_length: Annotated[int, Ge(1)] | None = None
    """Tokens a response may have; null: the algorithm's."""
    seed: Annotated[int, Ge(0)] = 0
    """Of the draws: every evaluation of every run draws by the same seeds, which no training does."""
    metrics: tuple[str, ...] | None = None
    """pass@K: how likely one of K responses passes, estimated without bias from all n (arXiv:2107.03374). mean@K: the
    share of a prompt's first K responses that pass. Null: pass@1, and pass@n where n is more."""
    pass_threshold: float = 1.0
    """A response passes where its reward is at least this."""
    reward: RewardConfig | None = None
    """Reward functions of the set's own; null: the run's reward roles, or else the run's `reward`."""
    loss: bool = False
    """Measure the mean negative logprob (nats) of the dataset's responses, a token, by the train role."""

    @property
    def samples(self) -> int:
        """`n` with its default filled in."""
        return (0 if self.loss else 1) if self.n is None else self.n

    @property
    def measures(self) -> tuple[Measure, ...]:
        """`metrics` with their default filled in, without words that are none."""
        if not self.samples:
            return ()
        words = dict.fromkeys(("pass@1", f"pass@{self.samples}")) if self.metrics is None else self.metrics
        return tuple(found for word in words if (found := measure(word)) is not None)

    def problems(self) -> Iterator[str]:
        """What is wrong with these values taken together, one sentence each."""
        if not self.data.shuffle:
            yield f"{self.node}.data.shuffle=false has no effect, for a set is read whole: remove it"
        if not self.samples and not self.loss:
            yield f"{self.node}.n=0 measures nothing: set it to 1 or more, or {self.node}.loss=true"
        if not self.samples:
            yield from self._without_effect("where no responses are drawn", "n", 1)
            return
        if not self.temperature:
            if self.samples > 1:
                yield (
                    f"{self.node}.n={self.samples} at temperature=0 draws the same response {self.samples} times: set "
                    f"{self.node}.n=1, or {self.node}.temperature=1"
                )
            for key in ("top_p", "top_k"):
                if getattr(self, key) != _DEFAULTS[key]:
                    yield f"{self.node}.{key} has no effect at temperature=0: remove it, or set {self.node}.temperature"
        yield from self._metric_problems()

    def _without_effect(self, where: str, key: str, value: int) -> Iterator[str]:
        for name in ("temperature", "top_p", "top_k", "max_completion_length", "seed", "metrics", "pass_threshold"):
            if getattr(self, name) != _DEFAULTS[name]:
                yield f"{self.node}.{name} has no effect {where}: remove it, or set {self.node}.{key}={value}"
        if self.reward is not None:
            yield f"{self.node}.reward has no effect {where}: remove it, or set {self.node}.{key}={value}"

    def _metric_problems(self) -> Iterator[str]:
        for index, word in enumerate(self.metrics or ()):
            key, found = f"{self.node}.metrics[{index}]", measure(word)
            if found is None:
                hint = f"set {self.node}.loss=true" if word == "loss" else "write pass@K or mean@K"
                yield f"{key}: {word!r} is no metric: {hint}" + (
                    "" if word == "loss" else f", as in pass@{self.samples}"
                )
            elif found.k > self.samples:
                yield (
                    f"{key}: {word} needs {found.k} responses a prompt, and {self.node}.n={self.samples}: set "
                    f"{self.node}.n={found.k}, or {found.kind}@{self.samples}"
                )
            elif word in (self.metrics or ())[:index]:
                yield f"{key}: {word} is there twice: remove one"
        if self.metrics is not None and not self.metrics:
            yield f"{self.node}.metrics is empty: name some, as in [pass@1], or set it to null"


_DEFAULTS = {each.name: each.default for each in fields(EvalSetConfig)}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When the policy is evaluated, and on what."""

    every: Annotated[int, Ge(1)] | None = None
    """Optimizer steps between two evaluations, a warm start's aside; there is one before the first step, and one after
    the last. Null evaluates never."""
    sets: Mapping[str, EvalSetConfig] = field(default_factory=dict)
    """By name; metrics are called eval/NAME/.... Null in place of a set leaves it out."""

    @property
    def drawing(self) -> dict[str, EvalSetConfig]:
        """The sets for which responses are drawn."""
        return {name: each for name, each in self.sets.items() if each.samples}
