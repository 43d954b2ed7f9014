"""Metrics of samples, from light columns by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rolegraph.algorithms.metrics import of_privileged, of_rewards
from rolegraph.batch import Batch
from rolegraph.interfaces import FAULT_REASONS


def test_rows_without_a_reward_are_counted_by_function_and_reason() -> None:
    code = {reason: index for index, reason in enumerate(FAULT_REASONS, 1)}
    samples = Batch.from_columns(
        {
            "reward": [1.0, None, 0.0, None],
            "rewards/judge": [1.0, None, 0.0, None],
            "reward_faults": [0, 1, 0, 2],
            "reward_faults/judge": np.array([0, code["timeout"], 0, code["timeout"]], np.int8),
            "reward_faults/form": np.array([0, 0, 0, code["none"]], np.int8),
        }
    )
    found = of_rewards(samples)
    assert found["reward/null"] == 2
    assert found["reward/faults"] == 3
    assert {name: value for name, value in found.items() if "/faults/" in name} == {
        "rewards/judge/faults/timeout": 2.0,
        "rewards/form/faults/none": 1.0,
    }


def test_rows_whose_teacher_sees_more_are_looked_at_alone_where_others_are_beside_them() -> None:
    samples = Batch.from_columns({"reward": [1.0, 0.0, None, 0.5], "teacher_prompt_length": [0, 7, 7, 9]})
    assert of_privileged(samples) == {"reward/teacher_prompt/mean": pytest.approx(0.25)}
    assert of_privileged(samples.slice(1)) == {}
    assert of_privileged(samples.slice(0, 1)) == {}
    assert of_privileged(samples.drop(["teacher_prompt_length"])) == {}
