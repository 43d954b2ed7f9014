"""Whole sampling runs with the real engines, as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rolegraph.config import load
from tests.rolegraph.samplers import lines
from tests.runs import Finished, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TINY = (
    "algorithm=sampling",
    "model=tiny",
    "data=arithmetic",
    "data.size=24",
    "prm=functions",
    "algorithm.num_return_sequences=3",
    "algorithm.num_sampling_batch_size=10",
    "algorithm.max_completion_length=8",
    "algorithm.n_best_to_keep=1",
    "sampler.max_num_seqs=32",
)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(*TINY, folder=tmp_path_factory.mktemp("sampled") / "run")


def test_every_row_has_its_candidates(sampled: Finished) -> None:
    keys = [(row["uid"], row["repeat"]) for row in lines(sampled.folder / "candidates.jsonl")]
    assert len(keys) == len(set(keys)) == 72
    assert len({uid for uid, _ in keys}) == 24
    summary = json.loads((sampled.folder / "summary.json").read_text())
    assert (summary["rows"], summary["candidates"]) == (24, 72)
    assert len(sampled.metrics) == 3, "the last batch is a small one"
    assert "responses kept" in sampled.output
    assert sampled.output.rstrip().endswith("False"), "torch was imported in the driver"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_is_kept_is_trained_on(sampled: Finished, kind: str, tmp_path: Path) -> None:
    kept = lines(sampled.folder / "kept.jsonl")
    assert len(kept) == pq.read_table(sampled.folder / "kept.parquet").num_rows > 15
    data = (f"data={kind}", f"data.path={sampled.folder / f'kept.{kind}'}", "data.max_length=128")
    small = ("model=tiny", "max_steps=6", "algorithm.global_batch_size=8", "train.lr=3e-3", "use_ray=false")
    done = run("algorithm=sft", *small, *data, folder=tmp_path / "run")
    losses = [row["loss"] for row in done.metrics]
    assert f"data: {len(kept)} of {len(kept)} rows kept" in done.output
    assert losses[-1] < losses[0]


def test_a_kept_response_is_what_sft_learns(sampled: Finished) -> None:
    from rolegraph.data.build import build
    from rolegraph.models import ensure

    config = load(["algorithm=sft", "model=tiny", "data=jsonl", f"data.path={sampled.folder / 'kept.jsonl'}"]).run
    shards, report = build(config.data, ensure(config.model), "response")
    kept = lines(sampled.folder / "kept.jsonl")
    assert report.kept == len(kept)
    read = [row for shard in shards for row in shard.table.to_pylist()]
    assert [row["response"] for row in read] == [row["messages"][-1]["content"] for row in kept]
    assert [row["uid"] for row in read] == [f"{row['uid']}/{row['repeat']}" for row in kept]


def test_candidates_are_scored_again_from_their_files(sampled: Finished, tmp_path: Path) -> None:
    scored = ("sampler=null", f"algorithm.candidates={sampled.folder}", "orm=functions", "reward=reasoning_gym")
    done = run(
        "algorithm=sampling",
        "model=tiny",
        "data=arithmetic",
        "data.size=24",
        "prm=null",
        *scored,
        folder=tmp_path / "run",
    )
    rows = lines(done.folder / "candidates.jsonl")
    texts = {(row["uid"], row["repeat"]): row["response_text"] for row in lines(sampled.folder / "samples.jsonl")}
    assert {(row["uid"], row["repeat"]): row["response_text"] for row in rows} == texts
    assert all("rewards/reasoning_gym" in row for row in rows if row["response_text"].strip())
