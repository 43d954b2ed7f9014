"""Which settings of two runs differ that change numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rolegraph.config.check import plain
from rolegraph.role import is_scorer

ANYWHERE = frozenset(
    {
        *("ranks", "replicas", "gpus", "cpus", "base_url", "api_key_env"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "sequence_parallel", "use_distributed_optimizer"),
        *("tensor_parallel_size", "data_parallel_size"),
        *("micro_batch_size", "max_tokens_per_micro_batch", "padding_free", "share_prompts"),
        *("gradient_checkpointing", "reduce_each_micro_batch"),
        *("max_num_seqs", "kv_cache_bytes", "gpu_memory_utilization", "enable_sleep_mode", "enforce_eager"),
        "enable_prefix_caching",
        *("async_workers", "rows_per_call", "workers", "concurrency"),
        *("timeout_s", "start_timeout_s", "deadline_s", "max_retries"),
    }
)
"""Keys of roles that say where and how fast, not what: they change the order of sums, as another machine does."""
RECOMPUTE = "recompute_"
"""How keys of `train.megatron` begin that trade memory for time."""
AROUND = frozenset(
    {
        *("placement", "logger", "checkpoint", "eval", "health", "model"),
        *("output_dir", "resume", "ray_exp_name", "use_ray", "max_steps"),
    }
)
"""Keys of the top level that are not compared: what is around a run, what is told by its content, and its end."""
LEFT_OUT: Mapping[str, frozenset[str]] = {
    "algorithm": frozenset(),
    "data": frozenset({"path"}),
    "reward": frozenset({"workers", "async_workers", "rows_per_call", "timeout_s", "start_timeout_s"}),
}
"""Of nodes that are no roles. Rows are told by their content, wherever they come from."""
FILES = "external_plugins"
"""A key whose files are told by their names: they may lie elsewhere."""


def takes_part(role: str, *, draws: bool) -> bool:
    """Whether a role, or the node `reward`, has a say in the steps; where no samples are drawn, some only evaluate."""
    return draws or not (role in ("rollout", "reward") or is_scorer(role))


def differences(before: Mapping[str, Any], now: Mapping[str, Any], *, draws: bool = True) -> Iterator[str]:
    """A line for each setting that changes the numbers of a run and differs in the two configs.

    Where roles run, how large their micro-batches are, what is logged, saved and evaluated may change, and how many
    steps there are where no learning rate depends on it. `draws`: whether the steps draw samples.
    """
    one, other = dict(_compared(plain(before), draws)), dict(_compared(plain(now), draws))
    for key in sorted({*one, *other}):
        if one.get(key) == other.get(key):
            continue
        role, _, name = key.rpartition(".")
        if name == "decay_steps" and _is_open(before.get(role)) and _is_open(now.get(role)):
            yield (
                f"max_steps was {shown(before.get('max_steps'))}, and is {shown(now.get('max_steps'))}, where "
                f"{role}.lr_schedule={now[role]['lr_schedule']} ends: set {role}.decay_steps={one.get(key)} to keep "
                "the schedule"
            )
        else:
            yield f"{key} was {_said(one, key)}, and is {_said(other, key)}"


def _is_open(role: Any) -> bool:
    """Whether a role's learning rate falls until the run ends."""
    falls = isinstance(role, Mapping) and role.get("lr_schedule") not in (None, "constant")
    return falls and role.get("decay_steps") is None


def _compared(tree: Mapping[str, Any], draws: bool) -> Iterator[tuple[str, Any]]:
    """The settings that change numbers, by key."""
    for key, node in tree.items():
        if key in AROUND or not takes_part(key, draws=draws):
            continue
        if isinstance(node, Mapping) and "_target_" in node and key not in LEFT_OUT:
            # Its own model is told by its content, and a schedule without an end ends with the run.
            node = {name: value for name, value in node.items() if name != "model"}
            if _is_open(node):
                node["decay_steps"] = tree.get("max_steps")
        yield from _leaves(node, key, LEFT_OUT.get(key, ANYWHERE))


def _leaves(node: Any, path: str, left_out: frozenset[str]) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping) or not node:
        yield path, node
        return
    for key, value in node.items():
        if key == FILES and isinstance(value, list):
            yield f"{path}.{key}", [Path(str(each)).name for each in value]
        elif key not in left_out and not (left_out is ANYWHERE and str(key).startswith(RECOMPUTE)):
            yield from _leaves(value, f"{path}.{key}", left_out)


def _said(settings: Mapping[str, Any], key: str) -> str:
    return shown(settings[key]) if key in settings else "not there"


def shown(value: Any) -> str:
    """A value as YAML has it."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
