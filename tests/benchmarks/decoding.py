"""Tokens a second of `rollout=huggingface` beside transformers' own `generate`, on the same model and prompts.

Both draw the same number of samples from the same prompts, in turn. transformers computes a prompt for each of its
samples, and a sample that has ended stays in the batch. Once all samples are as long as they may be, and once they end
by themselves.

`python -m tests.benchmarks decoding`
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rolegraph.batch import Batch
from rolegraph.interfaces import SamplingParams
from rolegraph.models import ensure
from rolegraph.models.config import ModelConfig
from rolegraph.role import RoleContext
from tests.benchmarks.measure import median, show

ROUNDS = 3
MODELS = (
    ("tiny", "rolegraph.models.tiny.make", 8, 8, 48, 48),
    ("SmolLM2-135M", "rolegraph.models.smollm2.make", 2, 4, 48, 16),
)
"""Name, maker, prompts, samples a prompt, tokens of the longest prompt, tokens a sample."""


def main() -> None:
    """Measure, and print a table."""
    rows = []
    for name, maker, prompts, samples, width, length in MODELS:
        folder = ensure(ModelConfig(maker=maker))
        for ends in (0.0, 1 / length):
            ours, plain = measure(folder, prompts, samples, width, length, ends)
            what = "all samples end at the limit" if not ends else "about a token in so many ends a sample"
            figures = (f"{ours:.0f}", f"{plain:.0f}", f"{ours / plain:.2f}")
            rows.append((f"{name}, {prompts} x {samples}, {what}", *figures))
    show("tokens a second", ("", "rollout=huggingface", "model.generate", "ratio"), rows)


def measure(folder: str, count: int, samples: int, width: int, length: int, ends: float) -> tuple[float, float]:
    """Tokens a second of ours and of transformers; `ends`: the part of the vocabulary that ends a sample."""
    import torch
    from transformers import GenerationConfig

    from roles.rollout.decoding import left_padded
    from roles.rollout.huggingface import HuggingFaceRollout
    from roles.rollout.huggingface_config import HuggingFaceRolloutConfig

    role: Any = HuggingFaceRollout(HuggingFaceRolloutConfig(model=folder), RoleContext(role="rollout", threads=2))
    role.setup()
    model, vocabulary = role._engine.model, role._engine._limit
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, vocabulary, width - 2 * row).tolist() for row in range(count)]
    batch = Batch.from_columns({"uid": [str(row) for row in range(count)], "prompt_ids": prompts})
    stop = draw.permutation(vocabulary)[: int(vocabulary * ends)].tolist()
    sampling = SamplingParams(n=samples, max_tokens=length, ignore_eos=True, stop_token_ids=tuple(stop), seed=0)
    ids = left_padded(prompts, width, 0).repeat_interleave(samples, 0)
    mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts]).long()
    options = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length, pad_token_id=0, eos_token_id=stop or None
    )
    model.generation_config = GenerationConfig()

    def ours(seed: int) -> float:
        started = time.monotonic()
        drawn = role.generate(batch, SamplingParams(**{**vars(sampling), "seed": seed}))
        return float(drawn.numpy("response_length").sum()) / (time.monotonic() - started)

    def plain(seed: int) -> float:
        torch.manual_seed(seed)
        started = time.monotonic()
        with torch.no_grad():
            found = model.generate(
                input_ids=ids, attention_mask=mask.repeat_interleave(samples, 0), generation_config=options
            )
        seconds = time.monotonic() - started
        is_end = torch.isin(found[:, width:], torch.tensor(stop))
        lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, found.shape[1] - width)
        return float(lengths.sum()) / seconds

    ours(0)
    plain(0)
    pairs = [(ours(seed), plain(seed)) for seed in range(1, ROUNDS + 1)]
    return median([one for one, _ in pairs]), median([other for _, other in pairs])
