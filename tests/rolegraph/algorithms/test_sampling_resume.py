"""Sampling runs that were interrupted, finished, or begun under other settings."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rolegraph.algorithms.sampling import Sampling
from rolegraph.algorithms.sampling_config import SamplingConfig
from rolegraph.algorithms.sampling_folder import OURS, settings_of
from rolegraph.algorithms.sampling_results import parts_of
from rolegraph.config import load
from rolegraph.errors import ConfigError, DataError, RoleError
from rolegraph.interfaces import SamplingParams
from tests.rolegraph.samplers import STUBS, StubORM, StubSampler, config_of, dataset, lines, run_sampling

CONFIG = SamplingConfig(num_return_sequences=4, num_sampling_batch_size=3, n_best_to_keep=2)
FILES = ("samples.jsonl", "candidates.jsonl", "kept.jsonl")


def keys(path: Path) -> list[tuple[str, int]]:
    return [(row["uid"], row["repeat"]) for row in lines(path)]


def changed(**values: object) -> SamplingConfig:
    return SamplingConfig(**{**vars(CONFIG), **values})


def unfinish(folder: Path) -> None:
    """Make a finished run look interrupted just before its end."""
    for name in ("finished.json", "summary.json", "kept.parquet"):
        (folder / name).unlink(missing_ok=True)


async def test_a_run_cut_anywhere_goes_on_to_the_same_result(tmp_path: Path) -> None:
    whole = await run_sampling(tmp_path / "whole", CONFIG)
    draw = random.Random(0)
    for attempt in range(8):
        folder = await run_sampling(tmp_path / str(attempt), CONFIG)
        unfinish(folder)
        drawn = (folder / "samples.jsonl").read_bytes()
        cut = draw.randrange(len(drawn))  # as a kill leaves it: the last line torn
        (folder / "samples.jsonl").write_bytes(drawn[:cut])
        left = set(keys_of_whole_lines(drawn[:cut]))
        scored = [line for line in lines(folder / "candidates.jsonl") if (line["uid"], line["repeat"]) in left]
        some = scored[: draw.randrange(len(scored) + 1)]
        (folder / "candidates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        (folder / "kept.jsonl").write_bytes((folder / "kept.jsonl").read_bytes()[: draw.randrange(200)])
        await run_sampling(folder, CONFIG, resume=True)
        for name in FILES[:2]:
            assert len(keys(folder / name)) == len(set(keys(folder / name)))
            assert set(keys(folder / name)) == set(keys(whole / name))
        assert (folder / "kept.jsonl").read_text() == (whole / "kept.jsonl").read_text()
        assert (folder / "finished.json").exists()


def keys_of_whole_lines(data: bytes) -> list[tuple[str, int]]:
    rows = [json.loads(line) for line in data.split(b"\n")[:-1]]
    return [(row["uid"], row["repeat"]) for row in rows]


class Counting(StubSampler):
    """Notes which candidates it drew."""

    drawn: list[tuple[str, int]] = []  # noqa: RUF012 - shared by all, in one process

    def say(self, uid: str, repeat: int, sampling: SamplingParams) -> str | None:
        self.drawn.append((uid, repeat))
        return super().say(uid, repeat, sampling)


async def test_nothing_that_is_drawn_is_drawn_again(tmp_path: Path) -> None:
    roles = {**STUBS, "sampler": Counting}
    folder = await run_sampling(tmp_path / "run", CONFIG, roles=roles)
    unfinish(folder)
    rows, kept_before = lines(folder / "samples.jsonl"), (folder / "kept.jsonl").read_text()
    gone = {("q2", 1), ("q2", 3), ("q7", 0)}
    for name in FILES[:2]:
        kept = [row for row in lines(folder / name) if (row["uid"], row["repeat"]) not in gone]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
    Counting.drawn.clear()
    await run_sampling(folder, CONFIG, roles=roles, resume=True)
    assert set(Counting.drawn) == gone
    assert len(Counting.drawn) == 3
    assert sorted(map(str, lines(folder / "samples.jsonl"))) == sorted(map(str, rows)), "and they say the same"
    assert (folder / "kept.jsonl").read_text() == kept_before, "in the order of the data, whatever came last"


class Failing(StubORM):
    """Fails on the last rows."""

    def score(self, batch):  # type: ignore[no-untyped-def, override]
        if "q9" in batch["uid"].to_pylist():
            raise RuntimeError("out of memory")
        return super().score(batch)


async def test_what_a_failing_run_drew_is_there_for_the_next(tmp_path: Path) -> None:
    with pytest.raises(RoleError, match="out of memory"):
        await run_sampling(tmp_path / "run", CONFIG, roles={**STUBS, "orm": Failing}, deterministic=True)
    folder = tmp_path / "run"
    assert len(keys(folder / "samples.jsonl")) == 40
    done = keys(folder / "candidates.jsonl")
    assert len(done) == 36
    assert {uid for uid, _ in keys(folder / "kept.jsonl")} <= {uid for uid, _ in done}, "results come as rows complete"
    Counting.drawn.clear()
    await run_sampling(folder, CONFIG, roles={**STUBS, "sampler": Counting}, resume=True)
    assert not Counting.drawn
    assert len(set(keys(folder / "candidates.jsonl"))) == 40


async def test_a_finished_run_does_nothing(tmp_path: Path) -> None:
    folder = await run_sampling(tmp_path / "run", CONFIG)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    await run_sampling(folder, CONFIG, resume=True)
    said = (folder / "ending.txt").read_text()
    assert said == f"finished already: 10 rows, {len(lines(folder / 'kept.jsonl'))} responses in {folder}/kept.jsonl"
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("finished", [True, False])
async def test_faults_are_drawn_again_where_that_is_asked_for(finished: bool, tmp_path: Path) -> None:
    whole = await run_sampling(tmp_path / "whole", CONFIG)
    bad = {"sampler": {"fails": ["q1", "q4"]}}
    folder = await run_sampling(tmp_path / "run", CONFIG, settings=bad)
    faults = [row for row in lines(folder / "candidates.jsonl") if row["sample_fault"]]
    assert {row["uid"] for row in faults} == {"q1", "q4"}
    if not finished:
        unfinish(folder)
    await run_sampling(folder, CONFIG, resume=True)
    assert [row for row in lines(folder / "candidates.jsonl") if row["sample_fault"]] == faults, "nobody asked for it"
    Counting.drawn.clear()
    roles = {**STUBS, "sampler": Counting}
    again = changed(redraw_faults=True)
    (folder / "ending.txt").unlink(missing_ok=True)
    await run_sampling(folder, again, resume=True, roles=roles)
    assert not (folder / "ending.txt").exists()
    assert sorted(Counting.drawn) == [(uid, repeat) for uid in ("q1", "q4") for repeat in range(4)]
    for name in FILES[:2]:
        assert len(keys(folder / name)) == len(set(keys(folder / name))) == 40
    assert (folder / "kept.jsonl").read_text() == (whole / "kept.jsonl").read_text()
    assert (folder / "finished.json").exists()
    await run_sampling(folder, again, resume=True, roles=roles)
    assert (folder / "ending.txt").read_text().startswith("finished already"), "no fault is left"


async def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    folder = await run_sampling(tmp_path / "run", CONFIG)
    with pytest.raises(ConfigError, match=r"holds a finished run: go on with resume=true, begin anew"):
        await run_sampling(folder, CONFIG)
    unfinish(folder)
    with pytest.raises(ConfigError, match=r"holds a run that was not finished"):
        await run_sampling(folder, CONFIG)
    (folder / "settings.json").unlink()
    with pytest.raises(ConfigError, match=r"settings.json is missing, so nothing says how"):
        await run_sampling(folder, CONFIG, resume=True)


async def test_other_settings_are_refused_with_the_differences(tmp_path: Path) -> None:
    folder = await run_sampling(tmp_path / "run", CONFIG)
    with pytest.raises(ConfigError) as caught:
        await run_sampling(folder, changed(temperature=0.5, score_weights={"prm": 2.0}), resume=True, seed=3)
    message = str(caught.value)
    assert "  algorithm.temperature: 1.0 then, 0.5 now" in message
    assert "  algorithm.score_weights.prm: not there then, 2.0 now" in message
    assert "  seed: 0 then, 3 now" in message
    assert "algorithm.overwrite=true" in message
    # How fast a run goes is no setting of its result.
    await run_sampling(folder, changed(num_sampling_batch_size=5), resume=True)


async def test_other_data_is_refused(tmp_path: Path) -> None:
    folder = await run_sampling(tmp_path / "run", CONFIG)
    unfinish(folder)
    with pytest.raises(DataError, match="was begun with other data: 10 rows then, 12 now"):
        await run_sampling(folder, CONFIG, rows=12, resume=True)
    others = dataset(10, {"uid": [f"x{i}" for i in range(10)]})
    with pytest.raises(DataError, match="10 rows then, 10 now, with other uids"):
        await run_sampling(folder, CONFIG, data=others, resume=True)
    for name, values in (
        ("messages", [[{"role": "user", "content": f"What is {i}?"}] for i in range(10)]),
        ("answer", ["7", *map(str, range(1, 10))]),
        ("nested", [{"tags": ["a"] * (i % 3), "level": 0} for i in range(10)]),
        ("new", list(range(10))),
    ):
        with pytest.raises(DataError, match="10 rows then, 10 now, with other contents"):
            await run_sampling(folder, CONFIG, data=dataset(10, {name: values}), resume=True)
    tokens = dataset(10, {"prompt_ids": [[2, i] for i in range(10)]})
    await run_sampling(folder, CONFIG, data=tokens, resume=True)
    assert (folder / "finished.json").exists(), "how the text is tokenised belongs to the settings"


def test_another_service_is_another_setting(tmp_path: Path) -> None:
    def settings(service: str, *more: str) -> dict[str, object]:
        words = ("algorithm=sampling", "data=arithmetic", "sampler=openai", "sampler.service.model=some", *more)
        return settings_of(load([*words, f"sampler.service.base_url={service}"]).run)

    here = settings("http://here:1/v1")
    changed = {key for key, value in settings("http://there:1/v1").items() if here[key] != value}
    assert changed == {"sampler.service.base_url"}
    assert settings("http://here:1/v1", "sampler.service.concurrency=3", "sampler.service.timeout_s=5") == here


async def test_overwrite_begins_anew(tmp_path: Path) -> None:
    folder = await run_sampling(tmp_path / "run", CONFIG)
    (folder / "notes.txt").write_text("mine")
    first = (folder / "kept.jsonl").read_text()
    await run_sampling(folder, changed(overwrite=True), seed=3)
    assert (folder / "kept.jsonl").read_text() != first
    assert len(lines(folder / "samples.jsonl")) == 40
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("settings", [None, "{", "[]", '{"editor.tabSize": 4}', '{"settings": [1]}'])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "kept.parquet", "timeline.json", "timeline-2.json", "samples/a.wav", "logs/day/1.log"]
)
def test_overwrite_leaves_what_no_sampling_run_made(tmp_path: Path, name: str, settings: str | None) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    if settings is not None:
        (tmp_path / "settings.json").write_text(settings)
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="is the folder of no sampling run"):
        Sampling.begin(config_of(changed(overwrite=True), STUBS), tmp_path)
    if name in OURS or settings is not None:
        with pytest.raises(ConfigError, match=r"nothing says how"):
            Sampling.begin(config_of(CONFIG, STUBS, resume=True), tmp_path)
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before


async def test_overwrite_killed_on_its_way_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = await run_sampling(tmp_path / "run", CONFIG)
    (folder / "logs").mkdir()
    unlink, gone = Path.unlink, []

    def some(path: Path, missing_ok: bool = False) -> None:
        gone.append(path.name)
        if len(gone) > 3:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", some)
        Sampling.begin(config_of(changed(overwrite=True), STUBS), folder)
    await run_sampling(folder, changed(overwrite=True))
    assert (folder / "finished.json").exists()


async def test_resume_in_a_new_folder_begins(tmp_path: Path) -> None:
    folder = await run_sampling(tmp_path / "run", CONFIG, resume=True)
    assert (folder / "finished.json").exists()


def test_parts_hold_what_is_missing_and_no_more() -> None:
    rows = [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    drawn = {("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1)}
    scored = {("a", 0), ("a", 1), ("c", 0)}
    first, second = parts_of(rows, 2, 2, drawn, scored)
    assert (first.rows, first.draw, first.drawn) == ((1, 2), ((1,), ()), (("b", 0), ("c", 1)))
    assert (second.rows, second.draw, second.drawn) == ((3,), ((0, 1),), ())
    assert list(parts_of(rows, 2, 2, drawn, {(uid, r) for uid in "abcd" for r in (0, 1)})) == []
    (cached,) = parts_of(rows, {"a": [5], "c": [0, 2]}, 9, {("a", 5), ("c", 0), ("c", 2)}, {("c", 0)})
    assert (cached.rows, cached.drawn, cached.to_draw) == ((0, 2), (("a", 5), ("c", 2)), 0)
