"""From a source to tokenised columns: the whole of loading, in one process, without Ray and without torch."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.columns import KNOWN_TYPES
from rolegraph.data import rows, sources, tokenizer
from rolegraph.data.columns import given_back_otherwise, to_columns
from rolegraph.data.config import DataConfig
from rolegraph.data.content import content_hash
from rolegraph.data.report import BadRowError, Report
from rolegraph.data.rows import Needs, Row, Sample
from rolegraph.data.tokenizer import ChatTokenizer
from rolegraph.errors import DataError
from rolegraph.json_rows import EXACT
from rolegraph.plugins import load_plugins

SHARD_ROWS = 64
"""Rows of one object in the store: a reader of a few rows does not pull the data set."""
_ENCODE_ROWS = 512

RESERVED = frozenset(KNOWN_TYPES) | {
    EXACT,
    "teacher_ids",
    "teacher_logprobs",
    "teacher_hidden",
    "teacher_prompt_length",
    "ref_kl",
    "response_text",
    "reward_reasons",
}
"""Columns that rolegraph itself writes; a data set's column of such a name has to be renamed."""


@dataclass
class Encoded:
    """One row in tokens."""

    where: str
    uid: str
    columns: Row
    prompt: list[int]
    response: list[int] | None
    teacher_prompt: list[int] | None = None


def build(config: DataConfig, model_path: str, needs: Needs, *, keep_exact: bool = False) -> tuple[list[Batch], Report]:
    """Read, tokenise and filter the rows; returns local shards of 64 rows, and what became of the others.

    With `keep_exact` there is a column `exact_columns` where Arrow's columns change some values.

    Raises:
        DataError: the source cannot be read, a row is bad and `on_bad_row` is fail, or no row is left.
    """
    report = Report(source=describe(config))
    samples = _unique(_samples(config, needs, report), config, report)
    if needs == "chat":
        fitting: Iterator[Encoded] = (Encoded(where, uid, row.columns, [], None) for where, uid, row in samples)
    else:
        model = tokenizer.load(model_path, template=config.chat_template, variables=config.chat_template_kwargs)
        fitting = _fitting(_encoded(samples, model, needs, config, report), needs, config, report)
    kept = list(islice(fitting, config.limit))
    report.kept = len(kept)
    if not kept:
        nothing = "it has no rows at all" if not report.rows else f"all {report.rows} rows were left out"
        raise DataError("\n".join([f"no data: {nothing}", *report.lines()]))
    return _shards(kept, needs, report, keep_exact=keep_exact), report


def describe(config: DataConfig) -> str:
    """The source in a few words."""
    if config.source == "reasoning_gym":
        return f"reasoning_gym task {config.task}"
    return f"{config.source} {config.path if isinstance(config.path, str) else ', '.join(config.path or ())}"


def _samples(config: DataConfig, needs: Needs, report: Report) -> Iterator[tuple[str, str, Sample]]:
    """Place, content id and sample of every row that can be understood."""
    _load_plugins(config.external_plugins)
    preprocessors = [_function(path) for path in config.preprocessors]
    for where, raw in sources.rows_of(config):
        report.rows += 1
        try:
            if isinstance(raw, BadRowError):
                raise raw
            row = _renamed(raw, config.columns)
            row, changed = rows.repair(row)
            name = rows.content_id(row)
            for path, function in zip(config.preprocessors, preprocessors, strict=True):
                row = rows.repair(_preprocess(row, path, function))[0]
            sample = rows.read(row, needs, system_prompt=config.system_prompt, prompt_as=config.prompt_as)
            name = _named(sample.columns, config.id_column) or name
        except _DroppedError as dropped:
            report.drop(where, BadRowError(str(dropped)))
            continue
        except BadRowError as bad:
            if config.on_bad_row == "fail":
                raise DataError(f"{where}: {bad} (data.on_bad_row=skip leaves such rows out)") from bad
            report.drop(where, bad)
            continue
        surrogates = ["broken surrogates in the text, replaced by U+FFFD"] if changed else []
        report.repaired.update(dict.fromkeys([*surrogates, *sample.changes], 1))
        yield where, name, sample


def _load_plugins(plugins: Sequence[str]) -> None:
    for plugin in plugins:
        try:
            load_plugins([plugin])
        except Exception as error:  # a user's module may raise anything
            raise DataError(f"data.external_plugins: {plugin}: {type(error).__name__}: {error}") from error


def _renamed(row: Row, columns: dict[str, str]) -> Row:
    if not columns:
        return row
    theirs = set(columns.values())
    out = {name: value for name, value in row.items() if name not in theirs and name not in columns}
    for ours, name in columns.items():
        if name in row:
            out[ours] = row[name]
    return out


class _DroppedError(Exception):
    """A preprocessor returned null: the row is left out as asked, which is no fault of the row."""


def _preprocess(row: Row, path: str, function: Callable[[Row], Any]) -> Row:
    try:
        result = function(dict(row))
    except Exception as error:
        raise BadRowError(f"preprocessor {path} raised {type(error).__name__}", str(error)) from error
    if result is None:
        raise _DroppedError(f"preprocessor {path} returned null")
    if not isinstance(result, dict):
        raise BadRowError(f"preprocessor {path} returned no row", f"but a {type(result).__name__}")
    return result


def _function(path: str) -> Callable[[Row], Any]:
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"data.preprocessors: {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise DataError(f"data.preprocessors: {path!r} is a {type(function).__name__}, not a function of a row")
    return function  # type: ignore[no-any-return]


def _named(columns: Row, id_column: str | None) -> str | None:
    """The name that a row's own columns give it; null where they give it none.

    Rows that a sampling run wrote are named by their `uid` and `repeat`, which are taken out: others will come there.
    """
    if id_column is not None:
        return _id(columns, id_column)
    if rows.missing(columns.get("uid")):
        return None
    name, repeat = _id(columns, "uid"), columns.pop("repeat", None)
    del columns["uid"]
    return name if repeat is None else f"{name}/{repeat}"


def _id(row: Row, column: str) -> str:
    value = row.get(column)
    if rows.missing(value) or value == "":
        raise BadRowError(f"no id in column {column!r}", f"its columns are {', '.join(map(str, row)) or 'none'}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRowError(f"the id in column {column!r} is neither text nor a number", f"but a {type(value).__name__}")
    return str(value)


def _unique(
    samples: Iterator[tuple[str, str, Sample]], config: DataConfig, report: Report
) -> Iterator[tuple[str, str, Sample]]:
    """Make uids unique, as `on_duplicate` says."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for where, name, sample in samples:
        uid = name
        while uid in first:
            counts[name] += 1
            uid = f"{name}#{counts[name] + 1}"
        if uid != name and config.on_duplicate != "keep":
            detail = f"uid {name} was at {first[name]}"
            if config.on_duplicate == "fail":
                raise DataError(f"{where}: duplicate row, {detail} (data.on_duplicate=keep or drop lets it pass)")
            report.drop(where, BadRowError("duplicate", detail))
            continue
        if uid != name:
            report.repaired["a uid that an earlier row has, made another one by #2, #3, ... at its end"] += 1
        first[uid] = where
        yield where, uid, sample


def _encoded(
    samples: Iterator[tuple[str, str, Sample]],
    model: ChatTokenizer,
    needs: Needs,
    config: DataConfig,
    report: Report,
) -> Iterator[Encoded]:
    """Tokenise, many rows in one call of the library."""
    while chunk := list(islice(samples, _ENCODE_ROWS if config.limit is None else min(_ENCODE_ROWS, config.limit))):
        rendered = []
        for where, uid, sample in chunk:
            try:
                rendered.append((where, uid, sample, *_render(sample, model, needs), _render_teacher(sample, model)))
            except BadRowError as bad:
                if config.on_bad_row == "fail":
                    raise DataError(f"{where}: {bad} (data.on_bad_row=skip leaves such rows out)") from bad
                report.drop(where, bad)
        # Raw text gets the special tokens of the tokenizer (a first token, if it has one); a template writes its own.
        chat = iter(model.encode([r[3] for r in rendered if r[2].messages is not None], False))
        raw = iter(model.encode([r[3] for r in rendered if r[2].messages is None], True))
        answers = iter(model.encode([r[4] for r in rendered if r[4] is not None], False))
        others = iter(model.encode([r[5] for r in rendered if r[5] is not None and r[2].teacher_text is None], False))
        raw_others = iter(model.encode([r[2].teacher_text for r in rendered if r[2].teacher_text is not None], True))
        for where, uid, sample, _, answer, teacher in rendered:
            prompt = next(raw if sample.messages is None else chat)
            response = None if answer is None else _ended(next(answers), model.eos_ids)
            if needs == "text":
                # The first token is given: nothing comes before it that could predict it.
                text = _ended(prompt, model.eos_ids)
                prompt, response = text[:1], text[1:]
            elif sample.messages is None:
                prompt = _open(prompt, model.eos_ids)
            other = None
            if teacher is not None:
                other = next(others) if sample.teacher_text is None else _open(next(raw_others), model.eos_ids)
            yield Encoded(where, uid, sample.columns, prompt, response, other)


def _render(sample: Sample, model: ChatTokenizer, needs: Needs) -> tuple[str, str | None]:
    """The text of the prompt, and that of the response where it is trained on.

    The two are tokenised apart, so that a prompt has the ids here that it has in a rollout. The response is what the
    template puts after the prompt for an assistant turn, where that begins with the prompt; else its bare text.
    """
    if sample.messages is None:
        return sample.text or "", sample.response if needs == "response" else None
    prompt = model.render(sample.messages, add_generation_prompt=True)
    if needs != "response" or sample.response is None:
        return prompt, None
    turn = {"role": "assistant", "content": sample.response}
    try:
        whole = model.render([*sample.messages, turn], add_generation_prompt=False)
    except BadRowError:
        whole = ""
    return prompt, whole.removeprefix(prompt) if whole.startswith(prompt) else sample.response


def _render_teacher(sample: Sample, model: ChatTokenizer) -> str | None:
    """The text of the teacher's own prompt, for a row that has one."""
    if sample.teacher_messages is None:
        return sample.teacher_text
    return model.render(sample.teacher_messages, add_generation_prompt=True)


def _open(prompt: list[int], eos: Sequence[int]) -> list[int]:
    """A prompt of raw text without the end-of-sequence that some tokenizers put behind every text."""
    return prompt[:-1] if prompt and prompt[-1] in eos else prompt


def _ended(ids: list[int], eos: Sequence[int]) -> list[int]:
    """The ids up to the end-of-sequence that closes them (templates write a newline after it), added if missing."""
    for position in range(len(ids) - 1, max(len(ids) - 4, -1), -1):
        if ids[position] in eos:
            return ids[: position + 1]
    return [*ids, eos[0]]


def _fitting(encoded: Iterator[Encoded], needs: Needs, config: DataConfig, report: Report) -> Iterator[Encoded]:
    """Leave out or cut what is longer than `max_length`."""
    for row in encoded:
        length = len(row.prompt) + (len(row.response) if row.response is not None else 0)
        if not row.prompt or row.response == [] or row.teacher_prompt == []:
            report.drop(row.where, BadRowError("no tokens"))
        elif not _fit_teacher(row, config, report):
            continue
        elif length <= config.max_length:
            yield row
        elif config.truncation_strategy == "drop":
            report.drop(row.where, BadRowError(f"longer than max_length={config.max_length}", f"{length} tokens"))
        elif (cut := _cut(row, needs, config.max_length)) is None:
            detail = f"{len(row.response or ())} tokens of response"
            report.drop(row.where, BadRowError(f"response alone longer than max_length={config.max_length}", detail))
        else:
            report.repaired[f"cut on the left to max_length={config.max_length}"] += 1
            yield cut


def _fit_teacher(row: Encoded, config: DataConfig, report: Report) -> bool:
    """Cut the teacher's prompt where it is too long and may be cut; False: the row is left out."""
    limit, length = config.teacher_prompt_limit, len(row.teacher_prompt or ())
    if row.teacher_prompt is None or length <= limit:
        return True
    if config.truncation_strategy == "drop":
        report.drop(row.where, BadRowError(f"teacher_prompt longer than {limit} tokens", f"{length} tokens"))
        return False
    row.teacher_prompt = row.teacher_prompt[-limit:]
    report.repaired[f"teacher_prompt cut on the left to {limit} tokens"] += 1
    return True


def _cut(row: Encoded, needs: Needs, limit: int) -> Encoded | None:
    """The row with its beginning cut off, so that `limit` tokens are left; null when no prompt token would be."""
    if needs == "text":
        ids = [*row.prompt, *(row.response or ())][-limit:]
        return Encoded(row.where, row.uid, row.columns, ids[:1], ids[1:]) if limit > 1 else None
    room = limit - len(row.response or ())
    return replace(row, prompt=row.prompt[-room:]) if room > 0 else None


def _shards(kept: list[Encoded], needs: Needs, report: Report, *, keep_exact: bool) -> list[Batch]:
    values = _own_columns(kept, needs)
    columns = {"uid": pa.array([row.uid for row in kept], pa.string()), **_tokens(kept, needs)}
    own = to_columns(values, report.notes)
    if keep_exact and (exact := given_back_otherwise(values, own)) is not None:
        columns[EXACT] = exact
    table = pa.table(columns | own)
    report.content = content_hash(table)
    return [Batch.from_table(table.slice(start, SHARD_ROWS)) for start in range(0, len(kept), SHARD_ROWS)]


def _own_columns(kept: list[Encoded], needs: Needs) -> dict[str, list[Any]]:
    """The data set's columns. Raises DataError where one has a name that a run writes."""
    names = dict.fromkeys(name for row in kept for name in row.columns)
    taken = [name for name in names if name in RESERVED or name.startswith(("rewards/", "reward_faults/", "scores/"))]
    if taken:
        raise DataError(
            f"the data set has a column {taken[0]!r}, a name of rolegraph's own: rename it with "
            f"data.columns={{dataset_{taken[0].replace('/', '_')}: {taken[0]}}}"
            + (" (or read it as the row's id and rename it: data.id_column=dataset_uid)" if taken[0] == "uid" else "")
        )
    hidden = {"text"} if needs == "text" else set()  # it would travel beside its own tokens
    return {name: [row.columns.get(name) for row in kept] for name in names if name not in hidden}


def _tokens(kept: list[Encoded], needs: Needs) -> dict[str, pa.Array]:
    """The columns of what was tokenised."""
    if needs == "chat":
        return {}
    columns: dict[str, pa.Array] = {
        "prompt_ids": _ids([row.prompt for row in kept]),
        "prompt_length": pa.array([len(row.prompt) for row in kept], pa.int32()),
    }
    if needs != "prompt":
        responses = [row.response or [] for row in kept]
        columns["response_ids"] = _ids(responses)
        columns["response_mask"] = pa.array([[1] * len(ids) for ids in responses], pa.list_(pa.uint8()))
        columns["response_length"] = pa.array([len(ids) for ids in responses], pa.int32())
        lengths = [len(row.prompt) + len(row.response or ()) for row in kept]
        columns["length"] = pa.array(lengths, pa.int32())
    if any(row.teacher_prompt is not None for row in kept):
        prompts = [row.teacher_prompt for row in kept]
        columns["teacher_prompt_ids"] = pa.array(prompts, pa.list_(pa.int32()))
        columns["teacher_prompt_length"] = pa.array([len(ids or ()) for ids in prompts], pa.int32())
    return columns


def _ids(lists: list[list[int]]) -> pa.Array:
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    flat = np.concatenate([np.asarray(ids, np.int32) for ids in lists])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
