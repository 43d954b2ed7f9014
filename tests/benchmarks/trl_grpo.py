"""The plain alternative of the GRPO benchmark: TRL's GRPOTrainer in one process, on the same model, prompts and sizes.

Run as a program with the arguments of `main`; prints one JSON line with the seconds of each step after the first.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def main(model: str, prompts: str, num_prompts: str, generations: str, max_tokens: str, steps: str) -> None:
    """Train for a few steps and print the figures of all but the first."""
    started = time.monotonic()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    samples = int(num_prompts) * int(generations)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.monotonic())

    lengths: list[float] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.append(sum(len(ids) for ids in completion_ids))
        return [float(len(ids) % 7) for ids in completion_ids]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": row["messages"]} for row in rows]),
        args=GRPOConfig(
            output_dir=str(Path(prompts).parent / "trl"),
            use_cpu=True,
            per_device_train_batch_size=samples,
            generation_batch_size=samples,
            num_generations=int(generations),
            max_completion_length=int(max_tokens),
            max_steps=int(steps),
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            loss_type="dapo",
            gradient_checkpointing=False,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    spans = [end - start for start, end in itertools.pairwise(ends)]
    figures = {
        "first_step_s": ends[0] - started,
        "step_s": spans,
        "response_tokens": lengths[1:],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print("FIGURES " + json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
