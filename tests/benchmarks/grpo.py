"""A GRPO step beside TRL's GRPOTrainer: the same model, prompts, sizes and reward, on the same machine in the same run.

Ours is the whole command (Ray, three actors, weight sync, telemetry); TRL's is one process. Seconds are medians over
the steps after the first; the first step's time includes the start.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolegraph.models import ModelConfig, ensure
from tests.benchmarks.measure import figures_of, figures_told, median, run, show

REWARD = '''"""The reward of both sides: it costs nothing and differs within a group."""

from rolegraph.rewards import reward


@reward("length_mod_7")
def length_mod_7(completions, *, response_ids):
    return [float(len(ids) % 7) for ids in response_ids]
'''


@dataclass(frozen=True)
class Case:
    """One model and the sizes of a step."""

    name: str
    maker: str
    prompts: int
    generations: int
    max_tokens: int
    steps: int


CASES = (
    Case("tiny", "rolegraph.models.tiny.make", 8, 8, 64, 8),
    Case("smollm2_135m", "rolegraph.models.smollm2.make", 4, 4, 48, 5),
)
PHASES = ("generate", "score", "train", "sync", "other")


def prompts_file(folder: Path) -> Path:
    """Chat prompts of reasoning-gym, as a JSONL file that both sides read."""
    import reasoning_gym

    tasks = reasoning_gym.create_dataset("chain_sum", size=64, seed=1, min_digits=2, max_digits=3)
    path = folder / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": task["question"]}]} for task in tasks]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ours(case: Case, model: str, prompts: Path, folder: Path) -> dict[str, Any]:
    """Run the command; the figures of its steps after the first."""
    (folder / "reward_plugin.py").write_text(REWARD)
    finished = run(
        [
            *(sys.executable, "-m", "rolegraph.cli", "run", "algorithm=grpo", "model=hf", f"model.path={model}"),
            *("data=jsonl", f"data.path={prompts}", "reward=exact_match", "reward.reward_funcs=[length_mod_7]"),
            f"reward.external_plugins=[{folder / 'reward_plugin.py'}]",
            f"algorithm.global_batch_size={case.prompts * case.generations}",
            f"algorithm.num_generations={case.generations}",
            f"algorithm.max_completion_length={case.max_tokens}",
            *("algorithm.loss_type=dapo", "data.max_length=128", "train.lr=1e-6", "logger.samples_every=0"),
            "rollout.dtype=float32",  # as TRL's; `auto` is bfloat16 on CPUs that have it
            *(f"max_steps={case.steps}", f"output_dir={folder / 'ours'}"),
        ]
    )
    return figures_of(folder / "ours", PHASES, finished)


def trl(case: Case, model: str, prompts: Path) -> dict[str, Any]:
    """Run TRL's trainer in a process of its own."""
    sizes = (str(case.prompts), str(case.generations), str(case.max_tokens), str(case.steps))
    finished = run([sys.executable, "-m", "tests.benchmarks.trl_grpo", model, str(prompts), *sizes])
    figures = figures_told(finished)
    return {
        "step": median(figures["step_s"]),
        "tokens": median(figures["response_tokens"]),
        "first": figures["first_step_s"],
        "peak_mib": finished.peak_mib,
    }


def main(only: str | None = None) -> None:
    """Print, for each model, our step beside TRL's, and where our seconds go."""
    for case in CASES:
        if only not in (None, case.name):
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = ensure(ModelConfig(maker=case.maker))
            prompts = prompts_file(folder)
            mine = ours(case, model, prompts, folder)
            theirs = trl(case, model, prompts)
        samples = case.prompts * case.generations
        rows = [
            (side, found["step"], samples / found["step"], found["tokens"] / found["step"], found["first"],
             found["peak_mib"] / 1024)
            for side, found in (("rolegraph", mine), ("TRL", theirs))
        ]  # fmt: skip
        ratio = [b / a for a, b in zip(rows[0][1:], rows[1][1:], strict=True)]
        header = ("", "s a step", "samples/s", "response tokens/s", "s to the end of step 1", "peak GiB")
        title = f"{case.name}: {case.prompts} prompts x {case.generations} samples x {case.max_tokens} tokens"
        show(title, header, [*rows, ("TRL / rolegraph", *ratio)])
        show(f"{case.name}: where our seconds go", PHASES, [tuple(mine[phase] for phase in PHASES)])


if __name__ == "__main__":
    main(*sys.argv[1:])
