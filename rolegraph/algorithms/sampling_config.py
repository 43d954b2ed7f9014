"""What `algorithm:` of a sampling graph may say. Light imports only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from rolegraph.algorithms.options import Needs, SamplingOptions, ScoreOptions
from rolegraph.algorithms.sampling_folder import needs_of
from rolegraph.algorithms.selection import Output, Rules
from rolegraph.interfaces import StepReduce
from rolegraph.role import family, is_scorer

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SamplingOptions, ScoreOptions):
    """Candidates of every dataset row, their scores, and which of them are kept.

    A candidate passes with a reward above 0 from every outcome role (orm, orm_NAME), whatever the role's weight, and a
    process score above `prm_threshold`; what no role of the run says is not asked for. Those that pass are ranked by
    the weighted sum of their scores, each role's normalised from 0 to 1 over the row's own candidates.
    """

    passes_columns_on: ClassVar[bool] = True
    """Columns of the dataset come out as they went in, whatever Arrow makes of them in between."""

    scores_text: ClassVar[bool] = True
    """Reward roles get what candidates say, and no token ids."""

    num_return_sequences: Annotated[int, Ge(1)] = 8
    """Candidates a row."""
    num_sampling_batch_size: Annotated[int, Ge(1)] = 64
    """Rows of one call of the sampler; the next call begins while this one runs, and scoring follows behind."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """Of the candidates; 0: the likeliest token each time."""

    n_best_to_keep: Annotated[int, Ge(1)] | None = None
    """Passing candidates kept of a row, the best by their total; ties go to the lower repeat. null: all."""
    prm_threshold: float | None = None
    """The process score that a passing candidate is above; null: any."""
    prm_reward: StepReduce | None = None
    """How the scores of a response's steps become its process score; null: min."""
    easy_query_threshold: Annotated[float, Gt(0), Le(1)] | None = None
    """Rows are dropped of which this share of the candidates, or more, has outcome rewards above 0; null: none."""
    output: Output = "kept"
    """kept: a line a kept response. pairs: a line a row, the best response that passed as the end of `messages` and the
    worst of those whose scores say that they did not as `rejected_response`."""

    data_range: tuple[int, int] | None = None
    """[i, n]: the i-th, from 0, of n contiguous parts of the rows, whose sizes differ by at most one; null: all rows.
    Runs that differ in i alone share the data among them."""
    candidates: str | None = None
    """Score the candidates of an earlier run instead of drawing some: its folder, or a file of its lines (uid, repeat,
    response_text). With the same data, and sampler=null."""
    overwrite: bool = False
    """Remove what an earlier run left in the output folder."""
    redraw_faults: bool = False
    """With resume=true: draw those candidates again that could not be drawn (the faults of a service, say), also where
    the run is finished."""

    @property
    def data_needs(self) -> Needs:
        """How rows are read; those whose candidates are there already as the run read them that drew these."""
        return "prompt" if self.candidates is None else needs_of(self.candidates)

    def rules(self, roles: Mapping[str, object]) -> Rules:
        """How candidates are chosen in a run with these roles."""
        return Rules(
            weights={role: self.score_weights.get(role, 1.0) for role in roles if is_scorer(role)},
            prm_threshold=self.prm_threshold,
            easy_query_threshold=self.easy_query_threshold,
            n_best_to_keep=self.n_best_to_keep,
            output=self.output,
        )

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings taken by themselves."""
        best, count = self.n_best_to_keep, self.num_return_sequences
        if best is not None and self.candidates is None and best > count:
            yield (
                f"algorithm.n_best_to_keep={best} is more than the {count} candidates of a row: lower it, or raise "
                "algorithm.num_return_sequences"
            )
        if self.data_range is not None:
            yield from _part(*self.data_range)
        if self.output == "pairs" and best is not None:
            yield (
                f"algorithm.n_best_to_keep={best} has no effect with algorithm.output=pairs, which takes the best: "
                "remove it"
            )
        if self.output == "pairs" and self.candidates is None and count < 2:
            yield "algorithm.output=pairs needs two candidates a row: set algorithm.num_return_sequences to 2 or more"
        if self.temperature == 0:
            yield from self._greedy()
        if self.candidates is not None:
            if not Path(self.candidates).expanduser().exists():
                where = f"(looked in {Path.cwd()})"
                yield f"algorithm.candidates={self.candidates}: there is no such file or folder {where}"
            for name in (*(f.name for f in fields(SamplingOptions)), "num_return_sequences"):
                if getattr(self, name) != _default(type(self), name):
                    yield (
                        f"algorithm.{name} has no effect with algorithm.candidates: nothing is drawn. Remove it, or "
                        "set algorithm.candidates=null"
                    )

    def check(self, run: RunConfig) -> Iterator[str]:
        """What is wrong with these settings in this run."""
        scorers = [role for role in run.roles if is_scorer(role)]
        yield from self.check_weights(run.roles)
        yield from self._sampler_or_cache(run)
        if "prm" not in scorers:
            for name in ("prm_threshold", "prm_reward"):
                if getattr(self, name) is not None:
                    yield f"algorithm.{name} needs a process reward: choose one with prm=NAME, or remove it"
        if self.easy_query_threshold is not None and not any(family(role) == "orm" for role in scorers):
            yield (
                "algorithm.easy_query_threshold counts outcome rewards above 0: choose a role with orm=NAME, or remove "
                "it"
            )
        yield from self._something_to_rank_by(run, scorers)
        if self.overwrite and run.resume:
            yield ("algorithm.overwrite=true removes what resume=true would go on with: set one of them to false")
        if self.redraw_faults and not run.resume:
            yield "algorithm.redraw_faults=true is about what an earlier run could not draw: set resume=true as well"
        if self.redraw_faults and self.candidates is not None:
            yield (
                "algorithm.redraw_faults has no effect with algorithm.candidates: nothing is drawn. Set it in the run "
                "that drew them"
            )
        if run.max_steps is not None:
            yield (
                f"max_steps={run.max_steps} has no effect: {run.algorithm.name} goes over its rows once. Remove it (or "
                "set max_steps=null); for fewer rows set data.limit or algorithm.data_range"
            )

    def _sampler_or_cache(self, run: RunConfig) -> Iterator[str]:
        scorers = [role for role in run.roles if is_scorer(role)]
        if "sampler" in run.roles and self.candidates is not None:
            yield (
                "algorithm.candidates has responses already, and sampler draws others: set sampler=null, or "
                "algorithm.candidates=null"
            )
        if "sampler" not in run.roles and self.candidates is None:
            yield (
                f"{run.algorithm.name} needs a sampler, or candidates of an earlier run: choose sampler=NAME, or set "
                "algorithm.candidates=PATH"
            )
        if self.candidates is not None and not scorers:
            yield "algorithm.candidates are there to be scored: choose a role with orm=NAME or prm=NAME"

    def _something_to_rank_by(self, run: RunConfig, scorers: list[str]) -> Iterator[str]:
        rules = self.rules(run.roles)
        if self.output == "pairs" and not rules.can_fail:
            advice = "set algorithm.prm_threshold" if "prm" in scorers else "choose one with orm=NAME"
            yield f"algorithm.output=pairs needs scores by which a candidate passes or fails: {advice}"
        if self.n_best_to_keep is not None and not any(rules.weights.values()):
            why = "every weight in algorithm.score_weights is 0" if scorers else "no role gives any"
            yield (
                f"algorithm.n_best_to_keep={self.n_best_to_keep} ranks by scores, and {why}: remove it (and lower "
                "algorithm.num_return_sequences), or choose a role with orm=NAME or prm=NAME"
            )

    def _greedy(self) -> Iterator[str]:
        if self.candidates is not None:
            return
        if self.num_return_sequences > 1:
            yield (
                f"algorithm.temperature=0 draws {self.num_return_sequences} times the same response: set "
                "algorithm.num_return_sequences=1, or a temperature above 0"
            )
        for name in ("top_p", "top_k", "min_p"):
            if getattr(self, name) != _default(type(self), name):
                yield f"algorithm.{name} has no effect with algorithm.temperature=0: remove it"


def _part(index: int, parts: int) -> Iterator[str]:
    if parts < 1:
        yield f"algorithm.data_range=[{index}, {parts}]: there are no {parts} parts; the second number is 1 or more"
    elif not 0 <= index < parts:
        last = f"0 to {parts - 1}" if parts > 1 else "0"
        yield (
            f"algorithm.data_range=[{index}, {parts}] names part {index} of {parts}, and they are numbered from 0: the "
            f"first number is {last}"
        )


def _default(config: type, name: str) -> Any:
    (found,) = (field.default for field in fields(config) if field.name == name)
    return found
