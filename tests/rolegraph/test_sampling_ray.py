"""Sampling graphs on real Ray actors: the result is the same whoever draws and scores, and while both go on at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolegraph.algorithms.sampling_config import SamplingConfig
from rolegraph.batch import bytes_held
from rolegraph.telemetry.timeline import spans
from tests.rolegraph.samplers import STUBS, lines, run_sampling

pytestmark = pytest.mark.ray

CONFIG = SamplingConfig(
    num_return_sequences=4, num_sampling_batch_size=4, n_best_to_keep=2, prm_threshold=0.1, easy_query_threshold=0.9
)
SLOW = {"sampler": {"seconds": 0.1}, "prm": 0.05, "orm": 0.1}


@pytest.fixture(scope="module")
def one_of_each(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import asyncio

    folder = tmp_path_factory.mktemp("one")
    return asyncio.run(run_sampling(folder, CONFIG, rows=24, use_ray=True, settings=SLOW))


@pytest.mark.parametrize("replicas", [{"sampler": 2, "orm": 1}, {"sampler": 1, "orm": 2}, {"sampler": 3, "orm": 3}])
async def test_the_number_of_replicas_changes_no_byte(
    one_of_each: Path, tmp_path: Path, replicas: dict[str, int]
) -> None:
    folder = await run_sampling(tmp_path, CONFIG, rows=24, replicas=replicas, use_ray=True, settings=SLOW)
    assert (folder / "kept.jsonl").read_text() == (one_of_each / "kept.jsonl").read_text() != ""
    found, whole = (json.loads((path / "summary.json").read_text()) for path in (folder, one_of_each))
    assert {key: found[key] for key in found if key != "this_part"} == {
        key: whole[key] for key in whole if key != "this_part"
    }
    assert sorted(map(str, lines(folder / "candidates.jsonl"))) == sorted(
        map(str, lines(one_of_each / "candidates.jsonl"))
    )


def overlaps(folder: Path) -> int:
    """Calls of the scorer during which the sampler drew."""
    found = spans(folder / "timeline.json")
    drawn = [(span["start"], span["end"]) for span in found if span["role"].startswith("sampler")]
    scored = [(span["start"], span["end"]) for span in found if span["role"].startswith("orm")]
    assert drawn
    return sum(any(start < end2 and start2 < end for start, end in drawn) for start2, end2 in scored)


def test_later_rows_are_drawn_while_earlier_ones_are_scored(one_of_each: Path) -> None:
    assert overlaps(one_of_each) > 0, "one call at a time has none, see below"


async def test_one_call_at_a_time_where_a_run_is_deterministic(one_of_each: Path, tmp_path: Path) -> None:
    folder = await run_sampling(tmp_path, CONFIG, rows=24, use_ray=True, settings=SLOW, deterministic=True)
    assert (folder / "kept.jsonl").read_text() == (one_of_each / "kept.jsonl").read_text()
    assert overlaps(folder) == 0


async def test_the_driver_fetches_no_tokens(ray_cluster: None, tmp_path: Path) -> None:
    before = bytes_held()
    await run_sampling(tmp_path, CONFIG, rows=24, use_ray=True, roles=STUBS)
    assert bytes_held() - before < 200_000
