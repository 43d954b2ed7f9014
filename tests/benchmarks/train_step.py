"""One GRPO training step of `MegatronTrain` beside transformers (SDPA) with AdamW, on the same rows.

Each side is a process of its own with two threads; seconds are medians over the steps after the first, which warms up.
The rows are prompt groups, so ours may compute each prompt once; transformers gets padded micro-batches of four rows.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolegraph.batch import Batch
from rolegraph.models import ModelConfig, ensure
from tests.benchmarks.measure import median, run, show

LR = 1e-6


@dataclass(frozen=True)
class Case:
    """One model and the sizes of a step, in prompts, samples and tokens."""

    name: str
    maker: str
    vocab: int
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    steps: int


CASES = (
    Case("tiny", "rolegraph.models.tiny.make", 64, 8, 8, 46, 64, 12),
    Case("smollm2_135m", "rolegraph.models.smollm2.make", 49000, 4, 4, 46, 48, 4),
)


def rows(case: Case) -> Batch:
    """Random tokens; prompts and responses differ in length by up to a quarter, as real ones do."""
    draw = np.random.default_rng(0)

    def tokens(most: int) -> Any:
        return draw.integers(0, case.vocab, draw.integers(3 * most // 4, most + 1)).astype(np.int32)

    prompts = [tokens(case.prompt_tokens) for _ in range(case.prompts)]
    responses = [tokens(case.response_tokens) for _ in range(case.prompts * case.samples)]
    return Batch.from_columns(
        {
            "uid": [f"prompt-{prompt}" for prompt in range(case.prompts) for _ in range(case.samples)],
            "prompt_ids": [prompt for prompt in prompts for _ in range(case.samples)],
            "response_ids": responses,
            "response_mask": [np.ones(len(response), dtype=np.uint8) for response in responses],
            "rollout_logprobs": [np.full(len(response), -8.0, dtype=np.float32) for response in responses],
            "advantage": draw.normal(size=len(responses)),
        }
    )


def ours(case: Case, model: str, settings: dict[str, Any]) -> Callable[[], float]:
    """A step of the role."""
    from rolegraph.interfaces import LossSpec
    from rolegraph.role import RoleContext
    from roles.train.config import MegatronTrainConfig
    from roles.train.megatron import MegatronTrain
    from tests.roles.train.megatron_workers import free_port

    context = RoleContext(role="train", threads=os.cpu_count() or 1, master_port=free_port())
    role = MegatronTrain(MegatronTrainConfig(model=model, **{"lr": LR} | settings), context)
    role.setup()
    batch, loss = rows(case), LossSpec("tests.losses_for_tests.nll")
    return lambda: role.step(batch, loss=loss)["loss"]


def transformers(case: Case, model: str, settings: dict[str, Any]) -> Callable[[], float]:
    """The same step by hand; the head is applied to all positions, as `forward` does."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    batch = rows(case)
    pairs = list(zip(batch.lists("prompt_ids"), batch.lists("response_ids"), strict=True))
    total = sum(len(response) for _, response in pairs)

    def step() -> float:
        loss = 0.0
        for first in range(0, len(pairs), 4):
            part = pairs[first : first + 4]
            width = max(len(prompt) + len(response) for prompt, response in part)
            ids = torch.zeros(len(part), width, dtype=torch.int64)
            mask = torch.zeros(len(part), width)
            for row, (prompt, response) in enumerate(part):
                end = len(prompt) + len(response)
                ids[row, :end] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
                mask[row, len(prompt) : end] = 1.0
            attention = torch.arange(width) < (torch.tensor([len(p) + len(r) for p, r in part])[:, None])
            logits = policy(ids, attention_mask=attention.long()).logits[:, :-1]
            logprobs = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            share = -(logprobs * mask[:, 1:]).sum() / total
            share.backward()
            loss += float(share)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def side(which: str, case: Case, model: str, settings: dict[str, Any]) -> None:
    """Take the steps of one side in this process, and print what they took."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    step = {"ours": ours, "transformers": transformers}[which](case, model, settings)
    seconds, losses = [], []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    for _ in range(case.steps):
        started = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - started)
    system = resource.getrusage(resource.RUSAGE_SELF).ru_stime - before
    print("FIGURES " + json.dumps({"seconds": seconds, "losses": losses, "system": system / case.steps}))


def measure(which: str, case: Case, model: str) -> tuple[float, float, float]:
    """Seconds a step, peak MiB and the first step's loss."""
    # The allocator reads its settings at the start of a process: an actor has those of its role.
    from roles.train.megatron import MegatronTrain

    environment = [f"{name}={value}" for name, value in MegatronTrain.environment.items()] if which == "ours" else []
    command = ["env", *environment, sys.executable, "-m", "tests.benchmarks.train_step", which, case.name, model]
    finished = run(command)
    line = next(line for line in finished.output.splitlines() if line.startswith("FIGURES "))
    figures = json.loads(line.removeprefix("FIGURES "))
    return median(figures["seconds"][1:]), finished.peak_mib, figures["losses"][0]


def main() -> None:
    """Print, for each model, our step beside the one by hand."""
    for case in CASES:
        model = ensure(ModelConfig(maker=case.maker))
        batch = rows(case)
        tokens = sum(len(batch.ragged(name).values) for name in ("prompt_ids", "response_ids"))
        found = {which: measure(which, case, model) for which in ("ours", "transformers")}
        table = [
            (which, seconds, tokens / seconds, f"{peak:.0f}", f"{loss:.5f}")
            for which, (seconds, peak, loss) in found.items()
        ]
        ratio = found["transformers"][0] / found["ours"][0]
        memory = found["transformers"][1] / found["ours"][1]
        show(
            f"{case.name}: a training step of {case.prompts} prompts x {case.samples} samples, {tokens} tokens",
            ("", "s a step", "tokens/s", "peak MiB", "first loss"),
            [*table, ("transformers / ours", ratio, ratio, f"{memory:.2f}", "")],
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        chosen = next(case for case in CASES if case.name == sys.argv[2])
        side(sys.argv[1], chosen, sys.argv[3], json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})
    else:
        main()
