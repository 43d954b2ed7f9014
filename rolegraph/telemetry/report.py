"""`report.html`: the curves of a run on one page that opens anywhere, without a server and without the internet."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolegraph.telemetry.metrics import EVALUATED, read_metrics
from rolegraph.telemetry.progress import figure

WIDTH, HEIGHT, PAD = 340, 150, 34
SMOOTHING_SPAN = 10
"""Steps over which the bold line averages (an exponential mean with this span)."""

EVAL = "eval/"
"""How metrics of eval sets begin."""
FIRST = ("reward/mean", "loss", "response_length/mean", "grad_norm")
"""Charts that come first; the others follow by name."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #66717e; --line: #2f6fde; --paper: #fff; --edge: #dfe4ea; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ef; --soft: #98a3b0; --line: #7aa7ff; --paper: #14181d; --edge: #2b333d; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1120px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
p, figcaption { color: var(--soft); } figure { margin: 0; border: 1px solid var(--edge); border-radius: 8px;
  padding: .6rem; } figcaption { font-size: .85rem; display: flex; justify-content: space-between; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 1rem; }
svg { width: 100%; } svg text { font-size: 10px; fill: var(--soft); }
.raw { stroke: var(--line); opacity: .3; fill: none; } .smooth { stroke: var(--line); stroke-width: 2; fill: none; }
table { border-collapse: collapse; } td, th { text-align: right; padding: .15rem .9rem .15rem 0; }
th { color: var(--soft); font-weight: 500; } td:first-child, th:first-child { text-align: left; }
"""


def smooth(values: Sequence[float], span: int = SMOOTHING_SPAN) -> list[float]:
    """Exponential moving average of the given span, unbiased at its start."""
    decay, total, weight, out = 1 - 2 / (span + 1), 0.0, 0.0, []
    for value in values:
        total, weight = total * decay + value, weight * decay + 1
        out.append(total / weight)
    return out


def chart(name: str, steps: Sequence[int], values: Sequence[float]) -> str:
    """One curve as an SVG figure."""
    low, high = min(values), max(values)
    rise = (high - low) or 1.0
    span = (steps[-1] - steps[0]) or 1

    def path(series: Sequence[float]) -> str:
        points = [
            f"{PAD + (step - steps[0]) / span * (WIDTH - PAD - 8):.1f},{8 + (high - value) / rise * (HEIGHT - 30):.1f}"
            for step, value in zip(steps, series, strict=True)
        ]
        return "M" + "L".join(points)

    return (
        f"<figure><figcaption><span>{html.escape(name)}</span><span>{figure(values[0])} → {figure(values[-1])}</span>"
        f"</figcaption><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{html.escape(name)} by step'>"
        f"<text x='0' y='14'>{figure(high)}</text><text x='0' y='{HEIGHT - 22}'>{figure(low)}</text>"
        f"<text x='{PAD}' y='{HEIGHT - 4}'>{steps[0]}</text>"
        f"<text x='{WIDTH - 8}' y='{HEIGHT - 4}' text-anchor='end'>step {steps[-1]}</text>"
        f"<path class='raw' d='{path(values)}'/><path class='smooth' d='{path(smooth(values))}'/></svg></figure>"
    )


def seconds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where the time of a step went: the mean seconds and share of each phase."""
    totals: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("seconds/") and value is not None:
                totals[key.removeprefix("seconds/")] = totals.get(key.removeprefix("seconds/"), 0.0) + value
    whole = totals.pop("step", 0.0) or 1.0
    lines = [
        f"<tr><td>{html.escape(name)}</td><td>{seconds / len(rows):.2f}</td><td>{seconds / whole:.0%}</td></tr>"
        for name, seconds in sorted(totals.items(), key=lambda item: -item[1])
    ]
    return f"<table><tr><th>phase</th><th>seconds a step</th><th>share</th></tr>{''.join(lines)}</table>"


def busy_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In which share of the time each role had a call to work on; empty where that is not known."""
    seconds = sum(row.get("seconds/step", 0.0) for row in rows) or 1.0
    idle: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("idle/") and value is not None:
                role = key.removeprefix("idle/")
                idle[role] = idle.get(role, 0.0) + value * row.get("seconds/step", 0.0)
    lines = [f"<tr><td>{html.escape(role)}</td><td>{1 - share / seconds:.0%}</td></tr>" for role, share in idle.items()]
    return f"<table><tr><th>role</th><th>busy</th></tr>{''.join(lines)}</table>" if lines else ""


def stage_section(stage: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The charts and the time table of one stage."""
    names = sorted({key for row in rows for key, value in row.items() if isinstance(value, int | float)})
    apart = ("seconds/", "idle/", EVAL)
    charted = [name for name in names if name not in ("step", "time") and not name.startswith(apart)]
    ordered = [name for name in FIRST if name in charted] + [name for name in charted if name not in FIRST]
    return (
        f"<h2>{html.escape(stage)}: {len(rows)} steps</h2>{charts_of(rows, ordered, 'The same in every step')}"
        f"<h2>where the time of a step went</h2>{seconds_table(rows)}{busy_table(rows)}"
    )


def evaluations_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The curves of all eval sets over the whole run; empty where there are none."""
    rows = [row for row in rows if any(key.startswith(EVAL) for key in row)]
    names = sorted({key for row in rows for key in row if key.startswith(EVAL)})
    count = f"{len(rows)} evaluation{'s' if len(rows) > 1 else ''}"
    return f"<h2>{count}</h2>{charts_of(rows, names, 'The same in every evaluation')}" if rows else ""


def charts_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str], same: str) -> str:
    """A chart for each metric that changes, and a line with those that do not."""
    charts, constant = [], []
    for name in names:
        points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
        steps, values = [step for step, _ in points], [value for _, value in points]
        if not values:
            continue  # never a number
        if len(values) > 1 and min(values) == max(values):
            constant.append(f"{html.escape(name)} {figure(values[0])}")
        else:
            charts.append(chart(name, steps, values))
    still = f"<p>{same}: {', '.join(constant)}.</p>" if constant else ""
    return f"<div class='charts'>{''.join(charts)}</div>{still}"


def write_report(run_dir: Path, title: str) -> Path | None:
    """Write `report.html` from a run's `metrics.jsonl`; None when no step was finished."""
    file = run_dir / "metrics.jsonl"
    rows = read_metrics(file) if file.is_file() else []
    if not rows:
        return None
    steps = [row for row in rows if row.get("stage") != EVALUATED]
    stages = list(dict.fromkeys(str(row.get("stage", "run")) for row in steps))
    sections = [
        stage_section(stage, [row for row in steps if str(row.get("stage", "run")) == stage]) for stage in stages
    ]
    sections.append(evaluations_section(rows))
    page = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p>{len(steps)} steps. Thin lines are steps, bold ones their moving average. "
        f"The numbers are in metrics.jsonl, the samples in samples/.</p>{''.join(reversed(sections))}</html>"
    )
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path
