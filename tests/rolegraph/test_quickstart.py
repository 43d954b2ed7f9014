"""The quickstart, shorter: the policy gets better, with figures to show for it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tests.runs import run


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_policy_gets_better(tmp_path: Path) -> None:
    done = run("experiment=quickstart", "max_steps=30", folder=tmp_path, timeout_s=500)
    rewards = [row["reward/mean"] for row in done.metrics if row["stage"] == "grpo"]
    assert len(rewards) == 30
    first, last = fmean(rewards[:6]), fmean(rewards[-6:])
    assert last > first + 0.08, f"{first:.3f} -> {last:.3f}"
