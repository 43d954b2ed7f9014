"""How samples divide over prompts, replicas, ranks and micro-batches: numbers, and sentences about them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rolegraph.algorithms.selection import data_part
from rolegraph.config.eval_sets import completion_length
from rolegraph.config.schema import RunConfig
from rolegraph.evaluation.config import EvalSetConfig
from rolegraph.placement import Plan


@dataclass(frozen=True)
class Batches:
    """The numbers of one run; null where a run has no such thing."""

    rows_per_step: int
    """Samples, or dataset rows, of an optimizer step."""
    steps: int | None
    """Optimizer steps of the run; null: one pass over the dataset."""
    samples_per_prompt: int | None = None
    prompts_per_generation: int | None = None
    samples_per_generation: int | None = None
    steps_per_generation: int | None = None
    times_gone_over: int | None = None
    max_staleness: int | None = None
    """Weight versions that generation may be ahead of training; 0: strictly in turn."""
    samples_per_replica: float | None = None
    """Of a generation, on average."""
    data_parallel: int | None = None
    rows_per_rank: tuple[int, int] | None = None
    """Fewest and most rows of a data-parallel rank in a step."""
    rows_per_micro_batch: int | None = None
    tokens_per_micro_batch: int | None = None
    micro_batches: int | None = None
    """Of a rank and step, where rows alone decide."""
    bounded_by_memory: bool = False
    """Neither rows nor tokens are given: a micro-batch is as large as the memory meant for it allows."""


def batches(run: RunConfig, placed: Plan) -> Batches | None:
    """The batch arithmetic of a run; null for an algorithm without a global batch."""
    options = run.algorithm.config
    size = getattr(options, "global_batch_size", None)
    if size is None:
        return None
    found: dict[str, object] = {"rows_per_step": size, "steps": run.max_steps}
    if (group := getattr(options, "num_generations", None)) is not None:
        steps = getattr(options, "steps_per_generation", 1)
        samples = size * steps
        found |= {
            "samples_per_prompt": group,
            "prompts_per_generation": samples // group,
            "samples_per_generation": samples,
            "steps_per_generation": steps,
            "times_gone_over": getattr(options, "num_iterations", 1),
            "max_staleness": getattr(options, "max_staleness", 0),
        }
        if replicas := len(placed.roles.get("rollout", ())):
            found["samples_per_replica"] = samples / replicas
    if train := placed.roles.get("train"):
        ranks = train[0].mesh.dp
        low, rest = divmod(size, ranks)
        config = run.roles["train"].config
        most = getattr(config, "micro_batch_size", None)
        tokens = getattr(config, "max_tokens_per_micro_batch", None)
        found |= {
            "data_parallel": ranks,
            "rows_per_rank": (low, low + (rest > 0)),
            "rows_per_micro_batch": most,
            "tokens_per_micro_batch": tokens,
            "micro_batches": math.ceil((low + (rest > 0)) / most) if most else None,
            "bounded_by_memory": getattr(config, "micro_batch_size", 0) is None and tokens is None,
        }
    return Batches(**found)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Candidates:
    """The numbers of a sampling run; null where only the data tells."""

    candidates_per_row: int | None
    """Null where an earlier run drew them."""
    rows_per_batch: int
    rows: int | None
    """Rows of this run; the most there can be where some may be left out."""
    candidates: int | None = None
    batches: int | None = None
    candidates_per_replica: float | None = None
    """Of a batch, on average."""


def candidates(run: RunConfig, placed: Plan) -> Candidates | None:
    """The arithmetic of a sampling run; null for other algorithms."""
    options = run.algorithm.config
    size = getattr(options, "num_sampling_batch_size", None)
    if size is None:
        return None
    each = options.num_return_sequences if options.candidates is None else None
    known = [run.data.size if run.data.source == "reasoning_gym" else None, run.data.limit]
    rows = min((number for number in known if number is not None), default=None)
    if rows is not None and options.data_range is not None:
        rows = len(data_part(rows, options.data_range))
    replicas = len(placed.roles.get("sampler", ()))
    return Candidates(
        candidates_per_row=each,
        rows_per_batch=size,
        rows=rows,
        candidates=rows * each if rows is not None and each is not None else None,
        batches=math.ceil(rows / size) if rows is not None else None,
        candidates_per_replica=size * each / replicas if each is not None and replicas else None,
    )


def _of_candidates(run: RunConfig, found: Candidates) -> Iterator[tuple[str, str]]:
    size, each = found.rows_per_batch, found.candidates_per_row
    if each is None:
        yield "a batch", f"{size} rows with the candidates they have in {run.algorithm.config.candidates}"
    else:
        yield "a batch", f"{size} rows x {each} candidates = {size * each} candidates"
    if found.candidates_per_replica is not None:
        yield "a sampler replica", f"draws about {found.candidates_per_replica:g} of them"
    part = run.algorithm.config.data_range
    of = "of the data" if part is None else f"of part {part[0]} of {part[1]} of the data"
    if found.rows is None:
        yield "in all", f"every row {of}, once"
        return
    several = f"{found.batches} batch{'' if found.batches == 1 else 'es'}"
    what = f"{found.rows} rows" + (f", {found.candidates} candidates" if found.candidates is not None else "")
    yield "in all", f"{what}, in {several}" + (f" ({of})" if part is not None else "")


def sentences(run: RunConfig, placed: Plan) -> Iterator[tuple[str, str]]:
    """The same for people: names and sentences."""
    if (sampled := candidates(run, placed)) is not None:
        yield from _of_candidates(run, sampled)
    found = batches(run, placed)
    if found is not None:
        yield from _of_steps(found)
    for name, each in run.eval.sets.items():
        yield f"eval set {name}", _of_set(run, each)


def _of_set(run: RunConfig, each: EvalSetConfig) -> str:
    known = [each.data.size if each.data.source == "reasoning_gym" else None, each.data.limit]
    rows = min((number for number in known if number is not None), default=None)
    what = "every row" if rows is None else f"{rows} rows"
    responses = f"response{'s' if each.samples > 1 else ''} of at most {completion_length(run, each)} tokens"
    drawn = f" x {each.samples} {responses}" if each.samples else ""
    when = f", every {run.eval.every} steps" if run.eval.every and "train" in run.roles else ""
    return f"{what}{drawn}" + (" with their loss" if each.loss else "") + when


def _of_steps(found: Batches) -> Iterator[tuple[str, str]]:
    if found.samples_per_prompt is not None:
        prompts, group, samples = found.prompts_per_generation, found.samples_per_prompt, found.samples_per_generation
        yield "a generation", f"{prompts} prompts x {group} samples = {samples} samples"
        steps, rounds = found.steps_per_generation or 1, found.times_gone_over or 1
        over = f", gone over {rounds} times" if rounds > 1 else ""
        yield (
            "is trained on in",
            f"{steps} optimizer step{'s' if steps > 1 else ''} of {found.rows_per_step} samples{over}",
        )
        if ahead := found.max_staleness:
            versions = f"{ahead} weight version{'s' if ahead > 1 else ''}"
            yield "meanwhile", f"the next ones are drawn, from weights at most {versions} behind (max_staleness)"
        if found.samples_per_replica is not None:
            yield "a rollout replica", f"samples about {found.samples_per_replica:g} of them"
    else:
        yield "a step", f"{found.rows_per_step} rows"
    yield from _of_a_rank(found)
    if found.steps is None:
        yield "in all", "one pass over the dataset (max_steps=null)"
    else:
        what = "rows" if found.samples_per_prompt is None else "samples"
        yield "in all", f"{found.steps} steps, {found.steps * found.rows_per_step} {what}"


def _of_a_rank(found: Batches) -> Iterator[tuple[str, str]]:
    if found.rows_per_rank is None:
        return
    (low, most), ranks = found.rows_per_rank, found.data_parallel
    rows = f"{low} rows" if low == most else f"{low} or {most} rows ({found.rows_per_step} does not divide by {ranks})"
    yield "a data-parallel rank", f"of {ranks}, trains {rows} a step"
    count, tokens = found.micro_batches, found.tokens_per_micro_batch
    if count:
        text = f"{count} micro-batch{'es' if count > 1 else ''} a rank of at most {found.rows_per_micro_batch} rows"
        yield "in", text + (f" and {tokens} tokens, more where rows are long" if tokens else "")
    elif tokens:
        yield "in", f"micro-batches of at most {tokens} tokens, {most} at most"
    elif found.bounded_by_memory:
        yield "in", "micro-batches by memory, of 4 rows or more"
