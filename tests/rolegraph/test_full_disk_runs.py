"""A whole run whose every checkpoint fills the disk: it takes all its steps, and its log has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolegraph.checkpoints import folder as checkpoints
from tests.disks import small_disk
from tests.rolegraph.lasting.runs import GRPO, figures, finish, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_run_on_a_full_disk_equals_one_on_an_empty_one(tmp_path: Path) -> None:
    words = (*GRPO, f"data.path={rows(tmp_path / 'rows.jsonl')}", "max_steps=12", "train.seconds=0.02")
    code, output = finish(tmp_path / "whole", *words)
    assert code == 0, output[-3000:]
    run = tmp_path / "run"
    with small_disk(run, free=1_000_000) as is_mounted:
        # The disk stays full while as many steps are taken as fill the last page of each file.
        saves = ("train.save_bytes=1100000", "train.save_seconds=1", "checkpoint.every=8")
        code, output = finish(run, *words, *saves, file_bytes=None if is_mounted else 200_000)
        assert code == 0, output[-3000:]
        assert "Traceback" not in output
        assert "the checkpoint of step 8 was not written" in output
        for name in ("timeline.json", "metrics.jsonl"):
            assert (f"{name} cannot be written for now" in output) == is_mounted
        assert figures(run) == figures(tmp_path / "whole")
        assert checkpoints.listed(run) == []
        assert checkpoints.partial(run) == []
