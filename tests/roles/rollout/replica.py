"""A rollout role in a process of its own, as its actor would be, and a trainer's end in plain torch."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph.batch import Batch
from rolegraph.errors import WeightSyncError
from rolegraph.interfaces import AdapterInfo, SamplingParams, TensorInfo, TransferGroup
from rolegraph.role import RoleContext
from rolegraph.weights import WeightSender, free_port
from roles.rollout.config import VLLMRolloutConfig


class _Process(BaseManager):
    pass


def _role(config: VLLMRolloutConfig, context: RoleContext) -> Any:
    from roles.rollout.vllm import VLLMRollout

    return VLLMRollout(config, context)


_Process.register("role", _role)


@contextmanager
def replica(context: RoleContext | None = None, **settings: Any) -> Iterator[Any]:
    """A running VLLMRollout; its endpoints may be called from many threads."""
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 32, "kv_cache_bytes": 64 * 2**20} | settings
    process = _Process(ctx=multiprocessing.get_context("spawn"))
    process.start()
    try:
        role: Any = process.role(VLLMRolloutConfig(**settings), context or RoleContext(threads=2))
        role.setup()
        yield role
        role.teardown()
    finally:
        process.shutdown()


def checkpoint_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def manifest_of(tensors: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]


def push(
    role: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    manifest: list[TensorInfo],
    version: int,
    *,
    bucket_bytes: int = 20_000,
    timeout_s: float = 30.0,
    adapter: AdapterInfo | None = None,
) -> None:
    """One whole sync: connect, send, receive, disconnect. Raises the receiver's fault before the sender's."""
    group = TransferGroup("gloo", "127.0.0.1", free_port(), 1 + role.transfer_workers()[1], {0: 1}, timeout_s)
    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(role.connect_weights, group)
        sender = WeightSender(group)
        joined.result()
        received = pool.submit(role.receive_weights, manifest, bucket_bytes, version, adapter=adapter)
        sent = pool.submit(sender.send, tensors, bucket_bytes)
        try:
            received.result()
            sent.result()
        finally:
            sender.close()
            role.disconnect_weights()


QKV = "model.layers.1.self_attn.q_proj.weight"


def breaking(tensors: dict[str, torch.Tensor], fault: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What a trainer sends whose transfer breaks in the middle: it leaves out a weight, cuts it, or dies of it."""
    for name, tensor in tensors.items():
        if name != QKV:
            yield name, tensor
        elif fault == "misshapen":
            yield name, tensor[:5]
        elif fault == "dies":
            raise MemoryError("the gather failed")


def prompts(rows: int = 5) -> Batch:
    """Rows of random prompts, each longer than the one before."""
    draw = np.random.default_rng(0)
    return Batch.from_columns(
        {
            "uid": [f"row-{i}" for i in range(rows)],
            "prompt_ids": [draw.integers(130, 300, 4 + 5 * i).tolist() for i in range(rows)],
            "answer": list(range(rows)),
        }
    )


def ids_of(batch: Batch) -> list[list[int]]:
    return [row.tolist() for row in batch.lists("response_ids")]


def logprob_error(
    folder: str | Path | Sequence[str], batch: Batch, *, temperature: float, ids: int | None = None
) -> float:
    """Largest difference between the batch's logprobs and those of transformers over the first `ids` ids.

    With several models, of each token to the one that comes closest.
    """
    folders = [folder] if isinstance(folder, str | Path) else folder
    found = [_logprob_errors(each, batch, temperature, ids) for each in folders]
    return max(float(torch.stack(errors).amin(0).max()) for errors in zip(*found, strict=True))


def _logprob_errors(folder: str | Path, batch: Batch, temperature: float, ids: int | None) -> list[torch.Tensor]:
    """Of each row, by token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    errors = []
    columns = (batch.lists("prompt_ids"), batch.lists("response_ids"), batch.lists("rollout_logprobs"))
    for prompt, response, logprobs in zip(*columns, strict=True):
        tokens = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1, :ids].float() / temperature
        wanted = torch.log_softmax(logits, -1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        errors.append((wanted - torch.from_numpy(logprobs.copy())).abs())
    return errors


def some_tokens_s(role: Any, batch: Batch, sampling: SamplingParams) -> float:
    """How long this engine takes now for the first eight tokens of what is going to be drawn."""
    started = time.monotonic()
    role.generate(batch, replace(sampling, max_tokens=8))
    return time.monotonic() - started


def sits_out_a_broken_sync(role: Any, folders: Sequence[str], fault: str, version: int, ids: int) -> None:
    """Fails unless samples wait while weights are torn, those that come then too, and none is drawn from such."""
    tensors = checkpoint_tensors(folders[1])
    manifest = manifest_of(tensors)
    long = SamplingParams(n=2, max_tokens=200, ignore_eos=True, seed=1)
    message = "the gather failed" if fault == "dies" else QKV
    begins_s = some_tokens_s(role, prompts(2), long)
    with ThreadPoolExecutor(2) as pool:
        begun = pool.submit(role.generate, prompts(2), long)
        time.sleep(begins_s)
        with pytest.raises(WeightSyncError, match=message):
            push(role, breaking(tensors, fault), manifest, version)
        late = pool.submit(role.generate, prompts(), SamplingParams(max_tokens=8, seed=1))
        time.sleep(0.3)
        assert not begun.done()
        assert not late.done()
        push(role, tensors.items(), manifest, version + 1)
        over_both, after = begun.result(60), late.result(60)
    assert set(after.numpy("weight_version")) == set(over_both.numpy("weight_version_last")) == {version + 1}
    assert logprob_error(folders[1], after, temperature=1.0, ids=ids) < 1e-4
    assert logprob_error(folders[:2], over_both, temperature=1.0, ids=ids) < 1e-4
    for model in folders[:2]:
        assert logprob_error(model, over_both, temperature=1.0, ids=ids) > 1e-2, "drawn from both"


def refuses_when_no_sync_comes(role: Any, folders: Sequence[str], version: int) -> None:
    """Fails unless samples end with the reason after the time that a sync may take."""
    tensors = checkpoint_tensors(folders[1])
    with pytest.raises(WeightSyncError, match=QKV):
        push(role, breaking(tensors, "misshapen"), manifest_of(tensors), version, timeout_s=4.0)
    with pytest.raises(WeightSyncError, match=f"incomplete until the next sync: .*{QKV}"):
        role.generate(prompts(), SamplingParams(max_tokens=8))
