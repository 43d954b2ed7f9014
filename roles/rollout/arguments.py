"""What vLLM is told: environment, engine arguments, and what the model folder says about its tokens."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rolegraph.errors import BatchError, ConfigError
from rolegraph.role import RoleContext
from roles.rollout.config import VLLMEngineConfig

if TYPE_CHECKING:
    from vllm import EngineArgs, LLMEngine

log = logging.getLogger(__name__)

_CPU_BLOCK = 32
"""Tokens of a KV block on a CPU; vLLM's default of 128 would leave most prompts without a block to share."""
_NARROW = 256
"""Hidden size up to which one thread decodes faster than two: an operator of such a layer is done about when another
thread is awake, and one that waits slows the other down where both are of one core."""
_CPU_BATCH_TOKENS = 4096
"""Prompt tokens of one step on a CPU, where a prompt is never split over steps."""


def prepare_environment(config: VLLMEngineConfig, context: RoleContext) -> None:
    """Set what vLLM, torch and OpenMP read when they are imported; runs before any of them is."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if context.device != "cpu":
        return
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(worker_threads(config, context))
    # Threads that wait for work must leave the cores to the role whose turn it is.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    if config.enforce_eager is not False:
        # The sampler compiles a helper for token ranks, nobody's need here, with the C++ compiler: 28 s at first use.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def worker_threads(config: VLLMEngineConfig, context: RoleContext) -> int:
    """Threads of each engine process: its share of the cores, or one for a model of narrow layers."""
    is_narrow = 0 < int(model_config(config.folder).get("hidden_size") or 0) <= _NARROW
    return 1 if is_narrow else max(1, context.threads // config.tensor_parallel_size)


def engine_args(config: VLLMEngineConfig, context: RoleContext, tokenizer_size: int | None) -> EngineArgs:
    """The engine arguments of one replica; raises ConfigError for an unknown key of `engine_kwargs`."""
    from vllm import EngineArgs

    from roles.rollout.logits import SIZE_KEY

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in config.engine_kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{config.node}.engine_kwargs.{name}: vLLM's EngineArgs has no such field{hint}")
    values: dict[str, Any] = {
        "model": config.folder,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": context.seed,
        "disable_log_stats": True,
        # Beside its methods, a worker process gets our kernels from that module.
        "worker_extension_cls": "roles.rollout.transfer.WorkerExtension",
        **config.engine_values(),
    }
    if config.reloads_weights:
        from roles.rollout.transfer import BACKEND

        values["weight_transfer_config"] = {"backend": BACKEND}
    if config.tensor_parallel_size > 1:
        values["distributed_executor_backend"] = "mp"
    values |= _cpu_values(config) if context.device == "cpu" else _cuda_values(config)
    if tokenizer_size is not None and tokenizer_size < vocabulary_size(config.folder):
        values["logits_processors"] = ["roles.rollout.logits:TokenizerLimit"]
        values["additional_config"] = {SIZE_KEY: tokenizer_size}
    for name in ("logits_processors", "additional_config"):
        if name in values and name in config.engine_kwargs:
            own, given = values[name], config.engine_kwargs[name]
            values[name] = own + list(given) if isinstance(own, list) else {**own, **given}
    return EngineArgs(**{**config.engine_kwargs, **values} | _user_choice(config, values))


def build(config: VLLMEngineConfig, context: RoleContext, args: EngineArgs) -> LLMEngine:
    """The engine, made in the thread that will drive it."""
    import torch
    from vllm import LLMEngine

    if context.device == "cpu":
        # OpenMP keeps the number per thread, and the engine forbids the call later on.
        torch.set_num_threads(worker_threads(config, context))
    return LLMEngine.from_engine_args(args)


def _user_choice(config: VLLMEngineConfig, values: dict[str, Any]) -> dict[str, Any]:
    """`engine_kwargs` win over our defaults; the two merged above hold both."""
    merged = ("logits_processors", "additional_config")
    return {k: v for k, v in config.engine_kwargs.items() if k in values and k not in merged}


def _refuse_experts(config: VLLMEngineConfig) -> None:
    if config.reloads_weights and "num_experts" in model_config(config.folder):
        raise ConfigError(
            f"{config.node}.model={config.folder}: vLLM on a CPU does not reload a mixture of experts (it fails, "
            "or goes on with wrong ones); use rollout=huggingface, a dense model, or GPUs"
        )


def _cpu_values(config: VLLMEngineConfig) -> dict[str, Any]:
    from roles.rollout import kernels

    _refuse_experts(config)
    length = config.max_model_len or int(model_config(config.folder)["max_position_embeddings"])
    dtype = config.dtype if config.dtype != "auto" else cpu_dtype()
    return {
        "dtype": dtype,
        "enforce_eager": config.enforce_eager is not False,
        "kv_cache_memory_bytes": config.kv_cache_bytes or _cpu_cache_bytes(config, length, dtype),
        "block_size": _CPU_BLOCK,
        "ir_op_priority": {name: [kernels.PROVIDER, "native"] for name in kernels.OPERATORS},
        # A seeded request in a prompt cut over several steps fails on a CPU.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(length, _CPU_BATCH_TOKENS, config.max_num_seqs),
    }


def _cuda_values(config: VLLMEngineConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "dtype": "bfloat16" if config.dtype == "auto" else config.dtype,
        "enforce_eager": bool(config.enforce_eager),
        "gpu_memory_utilization": config.gpu_memory_utilization or 0.9,
        "enable_sleep_mode": bool(config.enable_sleep_mode),
    }
    if config.kv_cache_bytes is not None:
        values["kv_cache_memory_bytes"] = config.kv_cache_bytes
    return values


def cpu_dtype() -> str:
    """float32 unless this CPU multiplies bfloat16 in hardware: emulated, it is 200 times slower."""
    import torch

    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    dtype = "bfloat16" if fast else "float32"
    log.info("dtype auto: %s (bfloat16 in hardware: %s)", dtype, fast)
    return dtype


def _cpu_cache_bytes(config: VLLMEngineConfig, length: int, dtype: str) -> int:
    """Room for `max_num_seqs` samples of full length, but no more than an eighth of the free memory.

    With less room vLLM lets samples wait, so one sample's worth is the only hard need.
    """
    model = model_config(config.folder)
    heads = int(model.get("num_key_value_heads") or model["num_attention_heads"])
    head_dim = int(model.get("head_dim") or int(model["hidden_size"]) // int(model["num_attention_heads"]))
    width = 4 if dtype == "float32" else 2
    per_token = 2 * int(model["num_hidden_layers"]) * heads * head_dim * width // config.tensor_parallel_size
    blocks = -(-length // _CPU_BLOCK) + 1
    one = blocks * _CPU_BLOCK * per_token
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(one * 2, min(one * config.max_num_seqs, free // 8))


def model_folder(model: str) -> Path:
    """The folder of a model given by folder or Hugging Face name (downloaded before)."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model))


def model_config(model: str) -> dict[str, Any]:
    """The text part of the model's config.json."""
    config: dict[str, Any] = json.loads((model_folder(model) / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text


def vocabulary_size(model: str) -> int:
    """Rows of the model's embedding."""
    return int(model_config(model)["vocab_size"])


def strange_token_id(what: str, ids: np.ndarray[Any, Any], vocabulary: int) -> str | None:
    """What is wrong with the ids of `what`, where the model lacks one of them."""
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low >= 0 and high < vocabulary:
        return None
    return (
        f"the {what} has token id {low if low < 0 else high}, the model's ids end at {vocabulary - 1}; was it "
        "tokenised for another model?"
    )


def check_token_ids(uid: str, what: str, ids: np.ndarray[Any, Any], vocabulary: int) -> None:
    """Raises BatchError, naming the uid, for `what` with ids that the model lacks."""
    if wrong := strange_token_id(what, ids, vocabulary):
        raise BatchError(f"row {uid}: {wrong}")


def tokenizer_size(model: str) -> int | None:
    """One more than the largest id the tokenizer knows; null for a model folder without a tokenizer."""
    from transformers import AutoTokenizer

    folder = model_folder(model)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        log.warning("%s has no tokenizer: the engine may sample every id of the model's vocabulary", model)
        return None
    return 1 + int(max(AutoTokenizer.from_pretrained(folder).get_vocab().values()))


def eos_token_ids(model: str) -> list[int]:
    """Every id that ends a response: of generation_config.json, config.json and the tokenizer."""
    folder = model_folder(model)
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if (folder / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        value = AutoTokenizer.from_pretrained(folder).eos_token_id
        found.update([] if value is None else [value])
    return sorted(found)


def weight_shapes(model: str) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the checkpoint the engine starts from; null if it has no safetensors files."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_folder(model).glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes or None
