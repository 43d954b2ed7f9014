"""Settings of roles that run vLLM, the rollout first. Light: composing and planning a config imports no engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rolegraph.models.config import ModelConfig, folder_of

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig

MAX_TEMPERATURE = 2.0
"""vLLM's own limit."""

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class VLLMEngineConfig:
    """One engine a replica, on `gpus / replicas` devices or `cpus` cores each."""

    node: ClassVar[str]
    """The role's name in the config, for messages."""
    reloads_weights: ClassVar[bool]
    """Whether the engine takes new weights while it runs."""
    owned: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Engine arguments that this role relies on beside those of `OWNED`, and what to do instead."""

    fields_of: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"engine_kwargs": ("vllm.engine.arg_utils.EngineArgs",)}
    )
    """Whose fields the keys of a free mapping are, to check them before anything starts."""

    replicas: int | None = None
    """Engines; each is one actor. Null: derived from `gpus`, or 1."""
    ranks: int | None = None
    """Another word for `replicas`; given both, they must agree."""
    gpus: int | None = None
    """Devices of all replicas together. 0 on a CPU."""
    cpus: float | None = None
    """Cores a replica on a CPU; fractions allowed. Null: derived from the plan."""

    model: str | ModelConfig | None = None
    """Hugging Face folder or name; null: the policy's."""
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    """Only 1: several engines are several `replicas`, fed by one queue."""
    dtype: DType = "auto"
    """auto: bfloat16 where the device computes in it, else float32 (a CPU without AVX512-BF16 or AMX)."""
    max_model_len: int | None = None
    """Tokens of prompt and response together. Null: `data.max_length + algorithm.max_completion_length`."""
    max_num_seqs: int = 256
    """Samples an engine advances at once; more wait inside it."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU the engine may take. Null: by the plan (0.9 alone, less where roles share it)."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache. Null: by `gpu_memory_utilization` on a GPU, room for all running samples on a CPU."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs or compilation. Null: true on a CPU."""
    enable_sleep_mode: bool | None = None
    """On a GPU: allocate weights and KV cache so that they can be given to other roles meanwhile. Null: as
    `placement` needs it."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's EngineArgs, checked against them when the engine starts."""

    @property
    def folder(self) -> str:
        """The Hugging Face folder or name, once the run has found the model; raises ConfigError before that."""
        return folder_of(self.model, self.node)

    def engine_values(self) -> dict[str, Any]:
        """Engine arguments of this kind of role."""
        return {}

    def check(self, run: RunConfig) -> Iterator[str]:
        """What does not go together with the rest of the run."""
        if not run.use_ray and "train" in run.roles:
            instead = ", or rollout=huggingface" if self.node == "rollout" else ""
            yield (
                "use_ray=false puts all roles in one process, and vLLM and a train role both need that process's "
                f"torch.distributed for themselves: set use_ray=true{instead} (algorithm=sft and algorithm=pt run "
                "without Ray)"
            )

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        found = []
        if self.data_parallel_size != 1:
            found.append(
                f"{self.node}.data_parallel_size={self.data_parallel_size}: an engine of this role is never data "
                f"parallel; set {self.node}.replicas={self.data_parallel_size} instead"
            )
        for name in ("tensor_parallel_size", "max_num_seqs", "max_model_len", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{self.node}.{name}={value} must be at least 1")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            found.append(
                f"{self.node}.gpu_memory_utilization={share} must be a share of the device: above 0, at most 1"
            )
        owned = {**OWNED, **self.owned}
        found += [
            f"{self.node}.engine_kwargs.{key}: {owned[key]}" for key in sorted(owned.keys() & self.engine_kwargs.keys())
        ]
        return found


OWNED = {
    "model": "set `model` of the role",
    "tokenizer": "the role reads the tokenizer of its model",
    "tensor_parallel_size": "set `tensor_parallel_size` of the role",
    "data_parallel_size": "set `replicas` of the role",
    "dtype": "set `dtype` of the role",
    "max_model_len": "set `max_model_len` of the role",
    "max_num_seqs": "set `max_num_seqs` of the role",
    "gpu_memory_utilization": "set `gpu_memory_utilization` of the role",
    "kv_cache_memory_bytes": "set `kv_cache_bytes` of the role",
    "enforce_eager": "set `enforce_eager` of the role",
}
"""Engine arguments with a field above, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class VLLMDrawingConfig(VLLMEngineConfig):
    """Engines that draw responses."""

    owned: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "enable_prefix_caching": "set `enable_prefix_caching` of the role",
            "enable_sleep_mode": "set `placement.sleep_level`, or `enable_sleep_mode` of the role",
            "seed": "set `seed` of the role",
            "logprobs_mode": "the role needs logprobs at the sampling temperature",
            "worker_extension_cls": "the role's workers get their kernels and their weights by it",
        }
    )

    enable_prefix_caching: bool = True
    """Compute a prompt once for its n samples; the cache is dropped at every weight sync."""
    seed: int | None = None
    """Seed of draws without a seed of their own. Null: the run's."""

    def engine_values(self) -> dict[str, Any]:
        """Logprobs are those of the distribution that is sampled from."""
        seed = {} if self.seed is None else {"seed": self.seed}
        return {"enable_prefix_caching": self.enable_prefix_caching, "logprobs_mode": "processed_logprobs"} | seed

    def check(self, run: RunConfig) -> Iterator[str]:
        """What does not go together with the rest of the run."""
        temperature = getattr(run.algorithm.config, "temperature", 1.0)
        if temperature > MAX_TEMPERATURE:
            yield f"algorithm.temperature={temperature}: vLLM samples at {MAX_TEMPERATURE:g} at most"
        for name, each in run.eval.sets.items():
            if each.temperature > MAX_TEMPERATURE:
                yield f"eval.sets.{name}.temperature={each.temperature:g}: vLLM samples at {MAX_TEMPERATURE:g} at most"
        yield from super().check(run)


@dataclass(frozen=True, kw_only=True)
class VLLMRolloutConfig(VLLMDrawingConfig):
    """Engines that sample from the policy."""

    node: ClassVar[str] = "rollout"
    reloads_weights: ClassVar[bool] = True
    owned: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **VLLMDrawingConfig.owned,
            "weight_transfer_config": "the role's weight sync sets it",
            "enable_lora": "set `enable_lora` of the role",
            "max_lora_rank": "set `max_lora_rank` of the role",
            "max_loras": "there is one adapter, the one that is trained",
        }
    )

    model: str | None = None
    """Hugging Face folder or name; null: the policy's."""
    enable_lora: bool = False
    """Weight syncs bring the adapter that is trained, beside weights that stay; false: merged into all of them."""
    max_lora_rank: int | None = None
    """Largest rank of an adapter that the engine has room for, one of vLLM's sizes; null: by train.lora_rank."""

    def engine_values(self) -> dict[str, Any]:
        """With room for the adapter, where one comes alone."""
        values = super().engine_values()
        if self.enable_lora:
            values |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": self.max_lora_rank or LORA_RANKS[-1]}
        return values

    def settled(self, run: RunConfig) -> dict[str, Any]:
        """Room for the adapter that is trained, where none is asked for."""
        rank = trained_rank(run) if self.enable_lora and self.max_lora_rank is None else None
        return {} if rank is None else {"max_lora_rank": engine_rank(rank)}

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each, with the key and what to type."""
        found = super().problems()
        if self.max_lora_rank is not None and not self.enable_lora:
            found.append("rollout.max_lora_rank has no effect: set rollout.enable_lora=true, or remove it")
        elif self.max_lora_rank is not None and self.max_lora_rank not in LORA_RANKS:
            sizes = ", ".join(map(str, LORA_RANKS))
            found.append(f"rollout.max_lora_rank={self.max_lora_rank} is none of vLLM's sizes: {sizes}")
        return found

    def check(self, run: RunConfig) -> Iterator[str]:
        """What does not go together with the rest of the run."""
        yield from super().check(run)
        if not self.enable_lora:
            return
        rank = trained_rank(run)
        if rank is None:
            yield (
                "rollout.enable_lora=true waits for adapters, and none are trained: set train.tuner_type=lora, or "
                "remove it"
            )
        elif rank > (limit := self.max_lora_rank or LORA_RANKS[-1]):
            advice = f", or raise rollout.max_lora_rank to {engine_rank(rank)}" if rank <= LORA_RANKS[-1] else ""
            yield f"train.lora_rank={rank} is more than the {limit} that the engine has room for: lower it{advice}"
        if run.placement.sleep_level == 2:
            yield (
                "placement.sleep_level=2 drops weights of the engine that no sync brings back with "
                "rollout.enable_lora=true, where adapters come alone: set placement.sleep_level=1, or "
                "rollout.enable_lora=false"
            )


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those vLLM keeps room for."""


def engine_rank(rank: int) -> int:
    """The least of vLLM's ranks that holds one of this size."""
    return next(size for size in LORA_RANKS if size >= rank)


def trained_rank(run: RunConfig) -> int | None:
    """The rank of the adapters that `train` has under training; null where it has none."""
    train = run.roles.get("train")
    adapter = getattr(train.config, "adapter", None) if train else None
    return None if adapter is None else int(adapter.rank)
