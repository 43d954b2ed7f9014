"""Whether a run goes on from a checkpoint, from which one, whether it may, and how it does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.algorithms.hooks import Step
from rolegraph.checkpoints import folder
from rolegraph.checkpoints.folder import Checkpoint
from rolegraph.checkpoints.state import State, read_rows
from rolegraph.config.check import plain
from rolegraph.errors import CheckpointError, ConfigError
from rolegraph.interfaces import TrainRole

if TYPE_CHECKING:
    from rolegraph.algorithms.base import Algorithm
    from rolegraph.config.schema import RunConfig

ANYWHERE = frozenset(
    {
        *("ranks", "replicas", "gpus", "cpus"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "sequence_parallel", "use_distributed_optimizer"),
        *("tensor_parallel_size", "data_parallel_size"),
        *("micro_batch_size", "max_tokens_per_micro_batch", "padding_free", "share_prompts"),
        *("max_num_seqs", "kv_cache_bytes", "gpu_memory_utilization", "enable_sleep_mode", "enforce_eager"),
        *("async_workers", "rows_per_call", "workers", "concurrency", "timeout_s", "deadline_s", "max_retries"),
        *("max_model_len", "max_logprobs", "enable_prefix_caching", "enable_lora", "max_lora_rank", "cache"),
        *("gradient_checkpointing", "reduce_each_micro_batch", "start_timeout_s", "api_key_env", "model"),
    }
)
"""Keys of roles that say where and how fast, not what, and their models, which are told by their content."""
AROUND = frozenset(
    {
        *("placement", "logger", "checkpoint", "eval", "health", "model"),
        *("output_dir", "resume", "ray_exp_name", "use_ray", "max_steps"),
    }
)
"""Keys of the top level that are not compared: what is around a run, what is told by its content, and its end."""
OF_FILES = frozenset({"path"})
"""Keys of `data` that say where rows come from: those are told by their names and lengths."""


def begin(config: RunConfig, run_dir: Path) -> str | None:
    """Look at the run's folder before anything starts; a sentence where nothing is left to do.

    Raises:
        ConfigError: the folder holds a run and `resume` says nothing of it; or there is nothing to go on from; or the
            run would have other settings than the one it goes on with.
        CheckpointError: the checkpoint is not as it was written.
    """
    checkpoint = start_of(config, run_dir)
    if checkpoint is None:
        return None
    if faults := checkpoint.verify():
        lines = "".join(f"\n  {fault}" for fault in faults[:5])
        raise CheckpointError(
            f"{checkpoint.path} is not as it was written:{lines}\nRemove it, and the run goes on from the one before it"
        )
    if changed := list(differences(settings_of(checkpoint), config.tree)):
        raise ConfigError(
            f"resume={_shown(config.resume)}: the run of {checkpoint.path} has other settings, and would not be the "
            "same run:\n" + "\n".join(f"  {line}" for line in changed) + "\nGive it the same, or begin in a new "
            "output_dir with resume=false"
        )
    return finished(checkpoint, config.max_steps)


def start_of(config: RunConfig, run_dir: Path) -> Checkpoint | None:
    """The checkpoint that the run begins from; null where it begins anew. Raises as `begin` does."""
    newest, holds_run = folder.newest(run_dir), (run_dir / "metrics.jsonl").exists()
    if config.resume is True:
        if newest is None:
            raise ConfigError(
                f"resume=true: output_dir={run_dir} holds no whole checkpoint to go on from. resume=auto begins anew "
                "where there is none"
            )
        return newest
    if config.resume == "auto":
        return newest
    if not config.resume:
        if newest is not None or holds_run:
            go_on = " (or go on with resume=true)" if newest is not None else ""
            raise ConfigError(
                f"output_dir={run_dir} holds a run already: choose another folder, or remove that one{go_on}"
            )
        return None
    chosen = folder.resolve(config.resume)
    is_here = newest is not None and newest.path.resolve() == chosen.path.resolve()
    if (newest is not None or holds_run) and not is_here:
        raise ConfigError(
            f"resume={config.resume} begins from step {chosen.step}, and output_dir={run_dir} holds a run already: "
            "choose another folder, or go on with that run by resume=true"
        )
    return chosen


def finished(checkpoint: Checkpoint, max_steps: int | None) -> str | None:
    """What to say where a run has no step left to take."""
    at = checkpoint.driver["at"]
    steps = int(at["of"]) if max_steps is None else max_steps
    if not at["is_main"] or int(at["number"]) < steps:
        return None
    return (
        f"finished already: {at['number']} of {steps} {at['stage']} steps are taken, and {checkpoint.path} has them "
        "(a larger max_steps goes on)"
    )


def settings_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The config of the run that wrote it. Raises CheckpointError where it cannot be read."""
    import yaml

    try:
        found: Mapping[str, Any] = yaml.safe_load(checkpoint.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{checkpoint.config} cannot be read: {error}") from error
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each setting that changes the numbers of a run and differs in the two configs.

    Where roles run, how large their micro-batches are, what is logged, saved and evaluated may change, and how many
    steps there are where no learning rate depends on it.
    """
    one, other = dict(_compared(plain(before))), dict(_compared(plain(now)))
    for key in sorted({*one, *other}):
        was, is_now = one.get(key), other.get(key)
        if was != is_now:
            yield f"{key} was {_said(one, key)}, and is {_said(other, key)}"
    if before.get("max_steps") != now.get("max_steps"):
        for role, node in now.items():
            if isinstance(node, Mapping) and _ends_with_the_run(node):
                yield (
                    f"max_steps was {before.get('max_steps')}, and is {now.get('max_steps')}, where "
                    f"{role}.lr_schedule={node['lr_schedule']} ends: set {role}.decay_steps={before.get('max_steps')} "
                    "to keep the schedule"
                )


def _ends_with_the_run(role: Mapping[str, Any]) -> bool:
    return role.get("lr_schedule") not in (None, "constant") and role.get("decay_steps") is None


def other_content(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each model, and for the dataset, whose content differs from that of the checkpoint's run."""
    for name in sorted({*before["models"], *now["models"]}):
        was, is_now = (each["models"].get(name) for each in (before, now))
        if was is None or is_now is None or was["sha256"] != is_now["sha256"]:
            paths = [each["path"] if each else "not there" for each in (was, is_now)]
            yield f"{name} was {paths[0]}, and is {paths[1]}" + (", with other content" if paths[0] == paths[1] else "")
    was, is_now = before["data"], now["data"]
    if was != is_now:
        same = was["rows"] == is_now["rows"]
        yield f"data had {was['rows']} rows, and has {is_now['rows']}" + (" of other names or lengths" if same else "")


async def go_on(algorithm: Algorithm, checkpoint: Checkpoint | None, about: Mapping[str, Any]) -> None:
    """Bring an algorithm that has not run, and all that it is given, to where a checkpoint was taken.

    Null: to the beginning. `about`: the fingerprints of this run.

    Raises CheckpointError where it is one of other models or data, or cannot be read.
    """
    job = algorithm.job
    if checkpoint is None:
        if job.telemetry.last_step:
            job.telemetry.event(f"no whole checkpoint in {job.telemetry.run_dir}: the run begins anew")
        job.telemetry.go_back(0)
        return
    driver = checkpoint.driver
    if changed := list(other_content(driver["about"], about)):
        raise CheckpointError(
            f"{checkpoint.path} is of another run:\n" + "\n".join(f"  {line}" for line in changed) + "\nGive it the "
            "same, or begin in a new output_dir with resume=false"
        )
    rows = await read_rows(checkpoint.rows, use_ray=job.config.use_ray)
    async with algorithm.turn("checkpoint"):
        await algorithm.train.load(str(checkpoint.train))  # type: ignore[attr-defined]
    if job.sync is not None:
        job.sync.version = int(driver["weight_version"])
    job.telemetry.go_back(checkpoint.step, driver["telemetry"])
    for hook in job.hooks:
        if state := driver["hooks"].get(type(hook).__name__):
            hook.restore(state)
    algorithm.restore(Step(**driver["at"]), State(driver["algorithm"], rows))
    job.telemetry.event(f"going on behind step {checkpoint.step}, from {checkpoint.path}")


def check_trainer(role: type) -> None:
    """Raises ConfigError for a train role without checkpoints."""
    if inspect.getattr_static(role, "save") is inspect.getattr_static(TrainRole, "save"):
        raise ConfigError(
            f"train._target_={role.__module__}.{role.__name__} has no checkpoints: set checkpoint.every=null and "
            "resume=false, or override save, is_saving, finish_save and load"
        )


def _compared(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that change numbers, by key."""
    for key, node in tree.items():
        if key in AROUND:
            continue
        left_out = OF_FILES if key == "data" else frozenset() if key in ("algorithm", "reward") else ANYWHERE
        yield from _leaves(node, key, left_out)


def _leaves(node: Any, path: str, left_out: frozenset[str]) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping) or not node:
        yield path, node
        return
    for key, value in node.items():
        if key not in left_out:
            yield from _leaves(value, f"{path}.{key}", left_out)


def _said(settings: Mapping[str, Any], key: str) -> str:
    return _shown(settings[key]) if key in settings else "not there"


def _shown(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
