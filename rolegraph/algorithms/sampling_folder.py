"""The folder of a sampling run: what is in it, what of it an earlier run left, and whether this run may go on there.

samples.jsonl     the journal of what was drawn: uid, repeat, response_text, finish_reason, response_length (tokens),
                  sample_fault
candidates.jsonl  the journal of what was scored: the same with the scores of every role
kept.jsonl        the results (pairs.jsonl for pairs): added to as rows are complete, ordered as the data at the end
kept.parquet      the same, in the end
summary.json      what became of the rows
settings.json     what the results depend on; a run goes on under the same settings only
finished.json     there once all is done
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.algorithms.options import Needs
from rolegraph.errors import ConfigError, DataError
from rolegraph.journal import Journal
from rolegraph.json_rows import encode
from rolegraph.results import replacing, write_json
from rolegraph.role import is_scorer

if TYPE_CHECKING:
    from rolegraph.batch import Batch
    from rolegraph.config.schema import RunConfig

JOURNALS = ("samples.jsonl", "candidates.jsonl")
OURS = (
    *JOURNALS,
    *("kept.jsonl", "kept.parquet", "pairs.jsonl", "pairs.parquet"),
    *("summary.json", "settings.json", "finished.json", "config.yaml", "metrics.jsonl", "report.html"),
)
"""What a run leaves, the timelines and the folders `samples` and `logs` aside."""

NO_RESULT = frozenset(
    {
        *("replicas", "ranks", "gpus", "cpus", "tensor_parallel_size", "data_parallel_size"),
        *("num_sampling_batch_size", "overwrite", "redraw_faults", "shuffle"),
        *("concurrency", "timeout_s", "deadline_s", "max_retries", "api_key_env"),
        *("max_num_seqs", "kv_cache_bytes", "gpu_memory_utilization", "enable_sleep_mode", "enforce_eager"),
        *("async_workers", "rows_per_call", "workers"),
    }
)
"""Keys that say how fast or where, not what: a run may go on with others. Another service may have another model."""
_CHUNK = 1024
"""Rows of the dataset that are looked at together."""


def begin(config: RunConfig, run_dir: Path) -> str | None:
    """Make the folder ready for the run, and keep its settings there; a sentence where nothing is left to do.

    Raises:
        ConfigError: the folder holds a run, and neither `resume` nor `overwrite` says what becomes of it; or it was
            made under other settings; or the run would read its candidates from the folder it writes.
    """
    options = config.algorithm.config
    settings = settings_of(config)
    if options.candidates is not None and source_of(options.candidates).parent.resolve() == run_dir.resolve():
        raise ConfigError(
            f"algorithm.candidates={options.candidates} lies in output_dir={run_dir}: choose another folder for the "
            "scores"
        )
    if options.overwrite:
        remove(run_dir)
    elif any((run_dir / name).exists() for name in OURS):
        if not config.resume:
            raise ConfigError(_holds_a_run(run_dir))
        _refuse_others(run_dir, settings)
        if options.redraw_faults:
            forget_faults(run_dir)
        if (run_dir / "finished.json").exists():
            done = json.loads((run_dir / "finished.json").read_text(encoding="utf-8"))
            return f"finished already: {done['rows']} rows, {done['results']} in {run_dir / done['file']}"
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "settings.json").exists():
        write_json(run_dir / "settings.json", {"settings": settings, "needs": config.data_needs})
    return None


def remove(run_dir: Path) -> None:
    """Remove what a run left; what lies beside it stays. Raises ConfigError where no sampling run made it."""
    folders = [run_dir / name for name in ("samples", "logs")]
    files = [*(run_dir / name for name in OURS), *run_dir.glob("timeline*.json")]
    found = [path.name for path in (*files, *folders) if path.exists()]
    if found and _begun_with(run_dir) is None:
        raise ConfigError(
            f"algorithm.overwrite=true: output_dir={run_dir} holds {found[0]}, and is the folder of no sampling run "
            "(it has no settings.json of one): choose another folder, or remove that one"
        )
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    # The settings go last: without them the rest would be taken for somebody else's.
    for path in sorted(files, key=lambda path: path.name == "settings.json"):
        path.unlink(missing_ok=True)


def _begun_with(run_dir: Path) -> dict[str, Any] | None:
    """The settings that a sampling run began with in this folder; null where none did."""
    try:
        kept = json.loads((run_dir / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    settings = kept.get("settings") if isinstance(kept, dict) else None
    return settings if isinstance(settings, dict) else None


def forget_faults(run_dir: Path) -> None:
    """Take the candidates that could not be drawn out of the journals, so that they are drawn; others stay.

    A run of which there are some is not finished any more.
    """
    # Scores first: whenever this is killed, what is left is a run that goes on, and knows of the faults.
    for name in ("candidates.jsonl", "samples.jsonl"):
        if not (path := run_dir / name).exists():
            continue
        with contextlib.closing(Journal(path)) as journal:
            if all(row.get("sample_fault") is None for row in journal.read()):
                continue
            (run_dir / "finished.json").unlink(missing_ok=True)
            with replacing(path) as part, part.open("wb") as file:
                file.writelines(encode(row) + b"\n" for row in journal.read() if row.get("sample_fault") is None)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """What the results depend on, by key, as JSON has it."""
    roles = [role for role in config.roles if role == "sampler" or is_scorer(role)]
    tree = {key: config.tree.get(key) for key in ("seed", "data", "model", "reward", "algorithm", *roles)}
    return dict(sorted(_leaves(json.loads(json.dumps(tree, default=str)))))


def check_data(run_dir: Path, rows: Batch) -> None:
    """The rows are those that the folder's run began with, with the same contents; the first time, that is noted.

    Raises DataError where they are others.
    """
    path = run_dir / "settings.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    uids, contents = hashlib.sha256(), hashlib.sha256()
    for start in range(0, len(rows), _CHUNK):
        chunk = rows.take(range(start, min(start + _CHUNK, len(rows)))).fetch_sync()
        uids.update("".join(f"{uid}\n" for uid in chunk["uid"].to_pylist()).encode())
        for row in chunk.table.to_pylist():
            contents.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    now = {"rows": len(rows), "uids": uids.hexdigest(), "contents": contents.hexdigest()}
    if (before := kept.get("data", now)) != now:
        same = "uids" if before["uids"] != now["uids"] else "contents"
        raise DataError(
            f"{run_dir} was begun with other data: {before['rows']} rows then, {now['rows']} now"
            + (f", with other {same}" if before["rows"] == now["rows"] else "")
            + ". Give it the same data, or begin anew with algorithm.overwrite=true"
        )
    if "data" not in kept:
        write_json(path, {**kept, "data": now})


def source_of(candidates: str) -> Path:
    """The file that holds the candidates of an earlier run: the one named, or `samples.jsonl` in the folder named."""
    path = Path(candidates).expanduser()
    return path / "samples.jsonl" if path.is_dir() else path


def needs_of(candidates: str) -> Needs:
    """How the run that drew these candidates read its rows: in tokens, without those that are too long, or as text.

    As text where nothing says it: that leaves out no row that candidates may be of.
    """
    try:
        kept = json.loads((source_of(candidates).parent / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "chat"
    return "prompt" if isinstance(kept, dict) and kept.get("needs") == "prompt" else "chat"


def _holds_a_run(run_dir: Path) -> str:
    state = "a finished run" if (run_dir / "finished.json").exists() else "a run that was not finished"
    return (
        f"output_dir={run_dir} holds {state}: go on with resume=true, begin anew with algorithm.overwrite=true, or "
        "choose another folder"
    )


def _refuse_others(run_dir: Path, settings: Mapping[str, Any]) -> None:
    before = _begun_with(run_dir)
    if before is None:
        raise ConfigError(
            f"resume=true: {run_dir / 'settings.json'} is missing, so nothing says how {run_dir} was made (or it is "
            "that of no sampling run): choose another folder, or remove that one"
        )
    changed = [key for key in sorted({*before, *settings}) if before.get(key) != settings.get(key)]
    if changed:
        lines = [f"  {key}: {_shown(before, key)} then, {_shown(settings, key)} now" for key in changed]
        raise ConfigError(
            f"resume=true: {run_dir} was made with other settings, and its results would be of two kinds:\n"
            + "\n".join(lines)
            + "\nGive it the same, or begin anew with algorithm.overwrite=true"
        )


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False) if key in settings else "not there"


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping) or not node:
        yield path, node
        return
    for key, value in node.items():
        if key not in NO_RESULT:
            yield from _leaves(value, f"{path}.{key}" if path else key)
