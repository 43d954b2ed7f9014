from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from rolegraph.telemetry.metrics import MetricsLog
from rolegraph.telemetry.report import chart, smooth, write_report


def test_the_report_shows_each_stage_and_its_curves(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"stage": "sft", "loss": 2.0, "seconds/train": 1.0, "seconds/step": 2.0})
    for step in (2, 3, 4):
        figures = {"reward/mean": step / 4, "kl": None, "groups": 8.0, "seconds/step": step - 1.0, "idle/orm": step / 8}
        log.write(step, {"stage": "grpo", **figures})
    log.close()
    path = write_report(tmp_path, "a <title>")
    assert path is not None
    text = path.read_text()
    assert "a &lt;title&gt;" in text
    assert "a <title>" not in text
    assert "sft: 1 steps" in text
    assert "grpo: 3 steps" in text
    assert "0.5 → 1" in text, "the reward's first and last value"
    assert "The same in every step: groups 8." in text
    assert "<td>train</td><td>1.00</td><td>50%</td>" in text
    assert "<td>orm</td><td>58%</td>" in text, "each step counts by its seconds"
    assert text.index("grpo: 3 steps") < text.index("sft: 1 steps"), "the main stage comes first"


def test_evaluations_have_curves_over_all_stages(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(2, {"stage": "warm_start", "loss": 2.0})
    log.write(2, {"stage": "eval", "eval/sums/pass@1": 0.125, "eval/sums/reward/null": 0.0, "eval/sums/x": None})
    log.write(3, {"stage": "grpo", "loss": 1.0, "eval/sums/pass@1": 0.5, "eval/sums/reward/null": 0.0})
    log.close()
    path = write_report(tmp_path, "run")
    assert path is not None
    text = path.read_text()
    assert "2 evaluations" in text
    assert "eval: 1 steps" not in text, "an evaluation is no step"
    assert text.count("<span>eval/sums/pass@1</span><span>0.125 → 0.5</span>") == 1
    assert "The same in every evaluation: eval/sums/reward/null 0." in text
    assert "<p>2 steps." in text
    assert text.index("2 evaluations") < text.index("grpo: 1 steps")


def test_no_steps_no_report(tmp_path: Path) -> None:
    assert write_report(tmp_path, "a run that failed before it had a log") is None
    MetricsLog(tmp_path / "metrics.jsonl").close()
    assert write_report(tmp_path, "run") is None


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [0.0, -3.0, 5.0]])
def test_a_chart_is_well_formed_for_any_curve(values: list[float]) -> None:
    figure = ElementTree.fromstring(chart("a & b", list(range(len(values))), values))
    raw, _ = figure.iter("path")
    assert len(raw.attrib["d"].split("L")) == len(values)
    assert "nan" not in raw.attrib["d"]


def test_smoothing_keeps_a_constant_and_lags_a_jump() -> None:
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    jump = smooth([0.0] * 20 + [1.0])
    assert 0 < jump[-1] < 0.5
