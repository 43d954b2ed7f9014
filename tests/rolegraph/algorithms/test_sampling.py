"""The driver program of sampling graphs, over roles without models in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolegraph.algorithms.sampling import IN_FLIGHT
from rolegraph.algorithms.sampling_config import SamplingConfig
from rolegraph.algorithms.sampling_results import candidate_of
from rolegraph.algorithms.sampling_summary import Tally
from rolegraph.algorithms.selection import Rules, select
from rolegraph.data import column_types
from rolegraph.errors import ConfigError, DataError
from rolegraph.interfaces import FAULT_REASONS
from rolegraph.json_rows import EXACT
from rolegraph.telemetry import Telemetry
from tests.rolegraph.samplers import STUBS, StubORM, StubSampler, dataset, lines, number, run_sampling

EIGHT = SamplingConfig(num_return_sequences=8, num_sampling_batch_size=3, n_best_to_keep=2, prm_threshold=0.1)


async def test_what_passes_is_kept_in_the_order_of_the_data(tmp_path: Path) -> None:
    folder = await run_sampling(tmp_path / "run", EIGHT)
    kept = lines(folder / "kept.jsonl")
    assert kept
    assert [int(row["uid"][1:]) for row in kept] == sorted(int(row["uid"][1:]) for row in kept)
    for row in kept:
        said = number(0, row["uid"], row["repeat"])
        assert row["messages"] == [
            {"role": "user", "content": f"How much is {row['uid'][1:]}?"},
            {"role": "assistant", "content": str(said)},
        ]
        assert said % 2 == 0
        assert said % 7
        assert row["scores"] == {"orm": 1.0, "prm": min(int(digit) for digit in str(said)) / 10}
        assert row["scores"]["prm"] > 0.1
    best = max(row["scores"]["prm"] for row in kept if row["uid"] == kept[0]["uid"])
    assert kept[0]["scores"]["prm"] == best, "the best first"


async def test_every_candidate_is_written_with_every_score(tmp_path: Path) -> None:
    folder = await run_sampling(tmp_path / "run", settings={"sampler": {"fails": ["q3"], "empty": ["q4"]}})
    rows = {(row["uid"], row["repeat"]): row for row in lines(folder / "candidates.jsonl")}
    assert set(rows) == {(f"q{i}", repeat) for i in range(10) for repeat in range(4)}
    assert len(lines(folder / "candidates.jsonl")) == len(rows) == len(lines(folder / "samples.jsonl"))
    for (uid, repeat), row in rows.items():
        if uid in ("q3", "q4"):
            assert "scores/orm" not in row, "what has no response is not scored"
            continue
        said = number(0, uid, repeat)
        assert row["response_text"] == str(said)
        assert row["step_scores"] == [int(digit) / 10 for digit in str(said)]
        assert row["rewards/even"] == row["scores/orm"] == (None if said % 7 == 0 else float(said % 2 == 0))
        assert (row["reward_reasons"] is None) == (said % 7 != 0)
        assert (row["prm_fault"] == "one step") == (said < 10) == (row["scores/prm"] is None)
    assert rows["q3", 0]["sample_fault"] == "the service said no"
    assert rows["q3", 0]["finish_reason"] == "error"


async def test_the_summary_accounts_for_every_row_and_candidate(tmp_path: Path) -> None:
    settings = {"sampler": {"fails": ["q3"], "empty": ["q4"]}}
    folder = await run_sampling(tmp_path / "run", EIGHT, settings=settings)
    found = json.loads((folder / "summary.json").read_text())
    source = found["source"]
    assert (source["rows"], source["left_out"]) == (11, {"no prompt": 1})
    assert set(source) == {"rows", "left_out", "left_out_at", "changed", "notes"}
    assert (found["rows"], found["candidates"]) == (10, 80)
    assert found["kept"] == len(lines(folder / "kept.jsonl"))
    assert found["passed"] + sum(found["candidates_failed"].values()) == 80
    kept_rows = {row["uid"] for row in lines(folder / "kept.jsonl")}
    assert len(kept_rows) + sum(found["rows_dropped"].values()) == 10
    assert found["rows_dropped"]["no response"] == 2
    assert found["candidates_failed"]["no response"] == 16
    assert found["faults"]["sampler: the service said no"] == 8
    scores = [row.get("scores/prm") for row in lines(folder / "candidates.jsonl")]
    told = [score for score in scores if score is not None]
    assert found["scores"]["prm"]["count"] == len(told)
    assert found["scores"]["prm"]["null"] == 80 - len(told)
    assert (found["scores"]["prm"]["min"], found["scores"]["prm"]["max"]) == (min(told), max(told))
    assert found["tokens"] == sum(row["response_length"] or 0 for row in lines(folder / "samples.jsonl"))
    assert found["this_part"]["drawn"] == 80


def test_faults_are_counted_by_their_kind_not_by_what_each_one_says() -> None:
    tally = Tally()
    for tokens in range(50):
        too_long = f"too_long: {tokens + 9000} tokens"
        row: dict[str, Any] = {"uid": "a", "repeat": tokens, "response_text": None}
        row |= {"sample_fault": f"HTTP 400: {tokens} tokens are too many: shorten", "prm_fault": too_long}
        row |= {
            "reward_faults/math": FAULT_REASONS.index("too_long") + 1,
            "reward_reasons": f"math: {too_long}",
            "reward_faults/fine": 0,
        }
        row |= {"reward_faults/orm_judge/judge": FAULT_REASONS.index("unparsable") + 1, "reward_faults/orm_x/y": None}
        row |= {"reward_reasons/orm_judge": f"judge: unparsable: {tokens}"}
        tally.add([row], select([candidate_of(row, ())], Rules()))
    kinds = ("sampler: HTTP 400", "prm: too_long", "orm: math: too_long", "orm_judge: judge: unparsable")
    assert tally.faults == dict.fromkeys(kinds, 50)
    assert tally.fault_examples["sampler: HTTP 400"] == "HTTP 400: 0 tokens are too many: shorten"
    assert tally.fault_examples["orm_judge: judge: unparsable"] == "judge: unparsable: 0"


async def test_results_are_kept_as_parquet_with_their_nested_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_types, "CHUNK", 3)
    folder = await run_sampling(tmp_path / "run", EIGHT)
    kept = lines(folder / "kept.jsonl")
    assert pq.read_table(folder / "kept.parquet").to_pylist() == kept
    assert pq.ParquetFile(folder / "kept.parquet").num_row_groups == -(-len(kept) // 3) > 1, "few rows at a time"


async def test_columns_come_out_as_the_dataset_had_them(tmp_path: Path) -> None:
    exact = ['{"answer": 7, "nested": {"level": [1, "x"]}}', None]
    data = dataset(2, {EXACT: exact})
    folder = await run_sampling(tmp_path / "run", data=data, roles={"sampler": StubSampler})
    rows = {row["uid"]: row for row in lines(folder / "kept.jsonl")}
    assert (rows["q0"]["answer"], rows["q0"]["nested"]) == (7, {"level": [1, "x"]})
    assert (rows["q1"]["answer"], rows["q1"]["nested"]) == ("1", {"tags": ["a"], "level": 1})
    assert EXACT not in rows["q0"]


async def test_pairs_are_the_best_against_the_worst(tmp_path: Path) -> None:
    config = SamplingConfig(num_return_sequences=6, num_sampling_batch_size=4, output="pairs")
    folder = await run_sampling(tmp_path / "run", config)
    pairs = lines(folder / "pairs.jsonl")
    assert pairs
    assert len({row["uid"] for row in pairs}) == len(pairs)
    assert not (folder / "kept.jsonl").exists()
    for row in pairs:
        good, bad = int(row["messages"][-1]["content"]), int(row["rejected_response"])
        assert good % 2 == 0
        assert bad % 2 == 1
        assert bad == number(0, row["uid"], row["rejected_repeat"])
        assert row["score"] > row["rejected_score"]
        assert row["rejected_scores"]["orm"] == 0.0
    assert pq.read_table(folder / "pairs.parquet").num_rows == len(pairs)


async def test_a_prompt_of_raw_text_keeps_its_form(tmp_path: Path) -> None:
    data = dataset(3)
    data = type(data)(data.rows.drop(["messages"]).with_columns({"prompt": ["a", "b", "c"]}), data.report)
    folder = await run_sampling(tmp_path / "run", data=data, roles={"sampler": STUBS["sampler"]})
    for row in lines(folder / "kept.jsonl"):
        assert row["response"] == str(number(0, row["uid"], row["repeat"]))
        assert row["prompt"] in "abc"
        assert "messages" not in row


async def test_columns_of_the_dataset_never_pass_for_those_of_the_run(tmp_path: Path) -> None:
    data = dataset(2, {"response": ["from the book"] * 2, "score": [7, 8], "scores": ["x", "y"]})
    folder = await run_sampling(tmp_path / "run", data=data)
    for row in lines(folder / "kept.jsonl"):
        assert row["dataset_response"] == "from the book"
        assert row["dataset_score"] in (7, 8)
        assert isinstance(row["scores"], dict)


async def test_values_that_columns_change_are_written_as_they_were(tmp_path: Path) -> None:
    exact = ['{"meta": {"only": [1, {"deep": null}]}, "mixed": 3}', None, '{"meta": {"other": 2}}']
    meta = [{"only": [1], "other": None}, None, {"only": None, "other": 2}]
    data = dataset(3, {"exact_columns": exact, "meta": meta, "mixed": ["3", "x", "y"]})
    folder = await run_sampling(tmp_path / "run", data=data, roles={"sampler": STUBS["sampler"]})
    found = {row["uid"]: row for row in lines(folder / "kept.jsonl")}
    assert found["q0"]["meta"] == {"only": [1, {"deep": None}]}
    assert (found["q0"]["mixed"], found["q1"]["mixed"]) == (3, "x")
    assert found["q1"]["meta"] is None
    assert found["q2"]["meta"] == {"other": 2}
    assert "exact_columns" not in found["q0"]


async def test_without_reward_roles_all_that_is_answered_is_kept(tmp_path: Path) -> None:
    folder = await run_sampling(
        tmp_path / "run", roles={"sampler": STUBS["sampler"]}, settings={"sampler": {"fails": ["q3"]}}
    )
    rows = lines(folder / "kept.jsonl")
    assert len(rows) == 36
    assert "score" not in rows[0]


async def test_the_last_batch_may_be_small_and_the_size_of_batches_changes_nothing(tmp_path: Path) -> None:
    texts = {}
    for size in (3, 7, 100):
        config = SamplingConfig(num_return_sequences=4, num_sampling_batch_size=size)
        folder = await run_sampling(tmp_path / f"by {size}", config, rows=31)
        texts[size] = (folder / "kept.jsonl").read_text()
        assert len(lines(folder / "metrics.jsonl")) == -(-31 // size)
    assert texts[3] == texts[7] == texts[100] != ""


async def test_parts_of_the_data_make_up_the_whole(tmp_path: Path) -> None:
    whole = lines(await run_sampling(tmp_path / "whole", EIGHT) / "kept.jsonl")
    parts = []
    for index in range(3):
        config = SamplingConfig(**{**vars(EIGHT), "data_range": (index, 3)})
        folder = await run_sampling(tmp_path / f"part {index}", config)
        parts += lines(folder / "kept.jsonl")
        assert len({row["uid"] for row in lines(folder / "samples.jsonl")}) == (4, 3, 3)[index]
    assert parts == whole
    with pytest.raises(DataError, match=r"data_range=\[11, 12\] is empty: the data has 10 rows"):
        await run_sampling(tmp_path / "none", SamplingConfig(data_range=(11, 12)))


async def test_further_outcome_roles_have_their_say(tmp_path: Path) -> None:
    class Small(StubORM):
        """Above 0 for numbers below 500."""

        def score(self, batch):  # type: ignore[no-untyped-def, override]
            rewards = [float(int(text) < 500) for text in batch["response_text"].to_pylist()]
            return batch.with_columns({"rewards/small": rewards, "reward": rewards, "reward_faults": [0] * len(batch)})

    folder = await run_sampling(tmp_path / "run", EIGHT, roles={**STUBS, "orm_small": Small})
    kept = lines(folder / "kept.jsonl")
    assert kept
    assert all(int(row["messages"][-1]["content"]) < 500 for row in kept)
    assert all(set(row["scores"]) == {"orm", "orm_small", "prm"} for row in kept)
    assert "rewards/orm_small/small" in lines(folder / "candidates.jsonl")[0]


async def test_how_steps_become_a_score(tmp_path: Path) -> None:
    for how, of in (("mean", lambda d: sum(d) / len(d)), ("last", lambda d: d[-1]), (None, min)):
        folder = await run_sampling(tmp_path / str(how), SamplingConfig(num_return_sequences=2, prm_reward=how))
        row = next(row for row in lines(folder / "candidates.jsonl") if row["prm_fault"] is None)
        assert row["scores/prm"] == row["prm_score"] == of(row["step_scores"])


# ----- two stages -----


async def test_candidates_of_an_earlier_run_are_scored_later(tmp_path: Path) -> None:
    at_once = await run_sampling(tmp_path / "at once", EIGHT)
    sampled = SamplingConfig(num_return_sequences=8, num_sampling_batch_size=3)
    first = await run_sampling(tmp_path / "first", sampled, roles={"sampler": STUBS["sampler"]})
    scorers = {role: kind for role, kind in STUBS.items() if role != "sampler"}
    for name, source in (("folder", first), ("file", first / "candidates.jsonl")):
        second = SamplingConfig(num_sampling_batch_size=3, n_best_to_keep=2, prm_threshold=0.1, candidates=str(source))
        folder = await run_sampling(tmp_path / name, second, roles=scorers)
        assert (folder / "kept.jsonl").read_text() == (at_once / "kept.jsonl").read_text()
        assert not (folder / "samples.jsonl").exists()


async def test_candidates_that_belong_to_other_data_are_refused(tmp_path: Path) -> None:
    first = await run_sampling(tmp_path / "first", roles={"sampler": STUBS["sampler"]})
    data = dataset(2, {"uid": ["x", "y"]})
    config = SamplingConfig(candidates=str(first))
    with pytest.raises(DataError, match=r"no candidate of any row of this data \(40 candidates"):
        await run_sampling(tmp_path / "second", config, data=data, roles={"orm": STUBS["orm"]})


async def test_candidates_of_rows_that_are_not_there_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await run_sampling(tmp_path / "first", rows=6, roles={"sampler": STUBS["sampler"]})
    told: list[str] = []
    monkeypatch.setattr(Telemetry, "event", lambda _, text: told.append(text))
    where = f"of 24 candidates in {first}/samples.jsonl are of rows that are not in this"
    for rows, data_range, expected in ((4, (0, 2), f"16 {where} part of the data"), (4, None, f"8 {where} data")):
        config = SamplingConfig(candidates=str(first), data_range=data_range)
        await run_sampling(tmp_path / str(data_range), config, rows=rows, roles={"orm": STUBS["orm"]})
        assert expected in told
    told.clear()
    await run_sampling(tmp_path / "all", SamplingConfig(candidates=str(first)), rows=6, roles={"orm": STUBS["orm"]})
    assert not [text for text in told if "not in this" in text]


async def test_rows_without_candidates_are_counted(tmp_path: Path) -> None:
    first = await run_sampling(tmp_path / "first", rows=4, roles={"sampler": STUBS["sampler"]})
    config = SamplingConfig(candidates=str(first))
    folder = await run_sampling(tmp_path / "second", config, rows=6, roles={"orm": STUBS["orm"]})
    assert json.loads((folder / "summary.json").read_text())["rows_dropped"]["no candidates"] == 2


async def test_scores_are_not_written_beside_the_candidates_they_are_of(tmp_path: Path) -> None:
    first = await run_sampling(tmp_path / "first", roles={"sampler": STUBS["sampler"]})
    config = SamplingConfig(candidates=str(first / "samples.jsonl"), overwrite=True)
    with pytest.raises(ConfigError, match="choose another folder for the scores"):
        await run_sampling(first, config, roles={"orm": STUBS["orm"]})
    assert (first / "samples.jsonl").exists()


class Losing(STUBS["sampler"]):  # type: ignore[name-defined, misc]
    """Forgets the last candidate of a call."""

    def sample(self, batch, sampling):  # type: ignore[no-untyped-def, override]
        return super().sample(batch, sampling).slice(0, -1)


class Doubling(STUBS["orm"]):  # type: ignore[name-defined, misc]
    """Gives the first row twice, in place of the last."""

    def score(self, batch):  # type: ignore[no-untyped-def, override]
        return super().score(batch).take([0, *range(len(batch) - 1)])


async def test_a_role_that_gives_back_other_candidates_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"gave back 11 candidates for 12, and not the same ones \(first: \('q2', 3\)\)"
    ):
        await run_sampling(tmp_path / "lost", rows=3, roles={"sampler": Losing})
    assert not (tmp_path / "lost" / "samples.jsonl").read_text(), "nothing of it is kept"
    with pytest.raises(DataError, match="a role returns a row a candidate, with its uid and repeat"):
        await run_sampling(tmp_path / "doubled", rows=3, roles={"sampler": STUBS["sampler"], "orm": Doubling})


# ----- whose turn it is -----


class Noting(STUBS["sampler"]):  # type: ignore[name-defined, misc]
    """Notes when it draws."""

    calls: list[str] = []  # noqa: RUF012 - shared by all, in one process

    def sample(self, batch, sampling):  # type: ignore[no-untyped-def, override]
        self.calls.append("sample")
        found = super().sample(batch, sampling)
        self.calls.append("sampled")
        return found


class NotingORM(StubORM):
    """Notes when it scores."""

    def score(self, batch):  # type: ignore[no-untyped-def, override]
        Noting.calls.append("score")
        return super().score(batch)


NOTING = {"sampler": Noting, "orm": NotingORM}


async def calls_of(folder: Path, **run: object) -> list[str]:
    """What sampler and orm did, in order; what is the same as before it is told once."""
    Noting.calls.clear()
    settings = {"sampler": {"seconds": 0.02}, "orm": 0.02}
    config = SamplingConfig(num_return_sequences=4, num_sampling_batch_size=4)
    await run_sampling(folder, config, rows=12, roles=NOTING, settings=settings, **run)  # type: ignore[arg-type]
    return Noting.calls


async def test_roles_that_share_a_device_take_turns_batch_by_batch(tmp_path: Path) -> None:
    calls = await calls_of(tmp_path / "shared", colocate=[("sampler", "orm")])
    assert calls == ["sample", "sampled", "score", "score"] * 3


async def test_a_deterministic_run_makes_one_call_at_a_time(tmp_path: Path) -> None:
    calls = await calls_of(tmp_path / "strict", deterministic=True)
    assert [call for call in calls if call != "score"] == ["sample", "sampled"] * 3
    assert calls[-1] == "score"
    assert calls.index("score") == 2


async def test_drawing_goes_on_while_earlier_rows_are_scored(tmp_path: Path) -> None:
    calls = await calls_of(tmp_path / "apart")
    assert calls.index("score") < max(index for index, call in enumerate(calls) if call == "sampled")


async def test_no_more_batches_are_under_way_than_fit(tmp_path: Path) -> None:
    Noting.calls.clear()
    config = SamplingConfig(num_return_sequences=1, num_sampling_batch_size=1)
    await run_sampling(tmp_path / "run", config, rows=20, roles=NOTING, settings={"orm": 0.05})
    under_way, most = 0, 0
    for call in Noting.calls:
        under_way += {"sample": 1, "score": -1}.get(call, 0)
        most = max(most, under_way)
    assert most <= IN_FLIGHT + 1
