"""The plain alternatives of the distillation benchmark: TRL's GKDTrainer and its DistillationTrainer, in one process.

Run as a program with the arguments of `main`; prints one JSON line with the seconds of each step after the first.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any


def main(trainer: str, student: str, teacher: str, prompts: str, rows: str, max_tokens: str, steps: str) -> None:
    """Train for a few steps, `trainer` being gkd or distillation, and print the figures of all but the first."""
    started = time.monotonic()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    asked = [json.loads(line)["messages"] for line in Path(prompts).read_text().splitlines()]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.monotonic())

    model: Any = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    generated: list[float] = []
    tokens: list[float] = []
    generate = model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        found = generate(*args, **kwargs)
        generated.append(time.monotonic() - begun)
        sequences = getattr(found, "sequences", found)
        asked_width = (args[0] if args else kwargs["input_ids"]).shape[1]
        tokens.append(float(sequences[:, asked_width:].numel()))
        return found

    model.generate = timed
    args: dict[str, Any] = {
        "output_dir": str(Path(prompts).parent / trainer),
        "use_cpu": True,
        "per_device_train_batch_size": int(rows),
        "max_steps": int(steps),
        "beta": 0.5,
        "temperature": 1.0,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    others: dict[str, Any] = {
        "model": model,
        "teacher_model": AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(student),
        "callbacks": [Clock()],
    }
    made: Any
    if trainer == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        # Its collator takes the last message off; what it says is not used where every step is on the student's own.
        data = [{"messages": [*messages, {"role": "assistant", "content": "0"}]} for messages in asked]
        config = GKDConfig(**args, max_new_tokens=int(max_tokens), lmbda=1.0, max_length=128)
        made = GKDTrainer(**others, args=config, train_dataset=Dataset.from_list(data))
    else:
        from trl import DistillationConfig, DistillationTrainer

        settings = DistillationConfig(**args, max_completion_length=int(max_tokens))
        data = [{"prompt": messages} for messages in asked]
        made = DistillationTrainer(**others, args=settings, train_dataset=Dataset.from_list(data))
    made.train()
    figures = {
        "first_step_s": ends[0] - started,
        "step_s": [end - start for start, end in itertools.pairwise(ends)],
        "generate_s": generated[1:],
        "response_tokens": tokens[1:],
    }
    print("FIGURES " + json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
