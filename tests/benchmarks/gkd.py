"""A distillation step beside TRL's GKDTrainer and DistillationTrainer: the same student, teacher, prompts and sizes.

Ten layers of SmolLM2 learn from the whole model over the whole vocabulary, on samples of their own. Ours is the whole
command (Ray, three actors, weight sync, telemetry); TRL's trainers are one process each. Seconds are medians over the
steps after the first; the first step's time includes the start.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from rolegraph.models import ModelConfig, ensure
from tests.benchmarks.grpo import prompts_file
from tests.benchmarks.measure import figures_of, figures_told, median, run, show

ROWS, MAX_TOKENS, STEPS = 4, 48, 5
PHASES = ("generate", "teacher", "train", "sync", "other")
THEIRS = {"gkd": "TRL GKDTrainer", "distillation": "TRL DistillationTrainer"}


def ours(student: str, teacher: str, prompts: Path, folder: Path) -> dict[str, Any]:
    """Run the command; the figures of its steps after the first."""
    finished = run(
        [
            *(sys.executable, "-m", "rolegraph.cli", "run", "algorithm=gkd", "model=hf", f"model.path={student}"),
            *("teacher=huggingface", f"teacher.model={teacher}", "data=jsonl", f"data.path={prompts}"),
            "rollout.dtype=float32",  # as TRL's; `auto` is bfloat16 on CPUs that have it
            *(f"algorithm.global_batch_size={ROWS}", f"algorithm.max_completion_length={MAX_TOKENS}"),
            *("algorithm.beta=0.5", "data.max_length=128", "train.lr=1e-6", "logger.samples_every=0"),
            *(f"max_steps={STEPS}", f"output_dir={folder / 'ours'}"),
        ]
    )
    return figures_of(folder / "ours", PHASES, finished)


def trl(trainer: str, student: str, teacher: str, prompts: Path) -> dict[str, Any]:
    """Run one of TRL's trainers in a process of its own."""
    sizes = (str(ROWS), str(MAX_TOKENS), str(STEPS))
    finished = run([sys.executable, "-m", "tests.benchmarks.trl_gkd", trainer, student, teacher, str(prompts), *sizes])
    figures = figures_told(finished)
    return {
        "step": median(figures["step_s"]),
        "generate": median(figures["generate_s"]),
        "tokens": median(figures["response_tokens"]),
        "first": figures["first_step_s"],
        "peak_mib": finished.peak_mib,
    }


def main() -> None:
    """Print our step beside theirs, and where our seconds go."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = ensure(ModelConfig(maker="rolegraph.models.smollm2.make", args={"layers": 10}))
        teacher = ensure(ModelConfig(maker="rolegraph.models.smollm2.make"))
        prompts = prompts_file(folder)
        sides = {"rolegraph": ours(student, teacher, prompts, folder)}
        sides |= {label: trl(trainer, student, teacher, prompts) for trainer, label in THEIRS.items()}
    rows: list[tuple[object, ...]] = [
        (side, found["step"], found["generate"], found["step"] - found["generate"], ROWS / found["step"],
         found["tokens"], found["first"], found["peak_mib"] / 1024)
        for side, found in sides.items()
    ]  # fmt: skip
    header = ("", "s a step", "of it generate", "the rest", "samples/s", "response tokens", "s to the end of step 1",
              "peak GiB")  # fmt: skip
    show(f"SmolLM2, 10 layers from 30: {ROWS} rows x {MAX_TOKENS} tokens, whole vocabulary", header, rows)
    mine = sides["rolegraph"]
    for label in THEIRS.values():
        print(f"{label}: {sides[label]['step'] / mine['step']:.2f} times our seconds a step")
    show("where our seconds go", PHASES, [tuple(mine[phase] for phase in PHASES)])


if __name__ == "__main__":
    main()
