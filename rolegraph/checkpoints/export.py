"""A checkpoint as a Hugging Face folder that other programs load: `rolegraph export CHECKPOINT OUT [--adapter]`."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolegraph.checkpoints import folder
from rolegraph.checkpoints.card import base_name, write_card
from rolegraph.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig
    from rolegraph.placement import Plan

USAGE = """rolegraph export CHECKPOINT OUT [--adapter] [--config-dir DIR]

  CHECKPOINT   a checkpoint (RUN/checkpoints/step-N), or the folder of a run, for its newest one
  OUT          the Hugging Face folder to write: weights, config, tokenizer and README.md; it must not be there yet
  --adapter    the adapter alone, as PEFT reads it, of a run with train.tuner_type=lora
  --config-dir DIR   the folder with config groups and modules of your own that the run had
"""
_ONE = ("tensor", "pipeline", "context", "expert")


def command(words: Sequence[str]) -> int:
    """The command line behind `rolegraph export`."""
    from argparse import ArgumentParser

    if "-h" in words or "--help" in words:
        print(USAGE)
        return 0
    parser = ArgumentParser(prog="rolegraph export", add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--config-dir")
    given, rest = parser.parse_known_args(list(words))
    if rest or len(given.paths) != 2:
        wrong = f"there is no option {rest[0]}" if rest else f"{len(given.paths)} paths are given, of 2"
        raise ConfigError(f"{wrong}: type rolegraph export CHECKPOINT OUT [--adapter]")
    checkpoint, out = given.paths
    step = export(checkpoint, out, adapter=given.adapter, config_dir=given.config_dir)
    print(f"{out}: {'the adapter' if given.adapter else 'the model'} of step {step}")
    return 0


def export(
    checkpoint: Path, out: Path, adapter: bool = False, *, config_dir: str | None = None, use_ray: bool = False
) -> int:
    """Write `out`, whole or not at all; returns the checkpoint's step.

    One rank of the run's train role loads the weights, in this process, or with `use_ray` in an actor, whose memory is
    free again afterwards. `config_dir`: where the run had modules of its own.

    Raises:
        CheckpointError: there is no whole checkpoint, or `out` holds something.
        ConfigError: its config cannot be used here, or there is no adapter.
    """
    return asyncio.run(exported(checkpoint, out, adapter, config_dir=config_dir, use_ray=use_ray))


async def exported(
    checkpoint: Path, out: Path, adapter: bool = False, *, config_dir: str | None = None, use_ray: bool = False
) -> int:
    """`export`, for programs with an event loop."""
    from rolegraph.config import load_saved

    found, out = folder.resolve(checkpoint), _free(out)
    run = load_saved(found.config, config_dir=config_dir, elsewhere=True).run
    if "train" not in run.roles:
        raise CheckpointError(f"{found.path} is of a run that trained nothing")
    if adapter and getattr(run.roles["train"].config, "tuner_type", "full") == "full":
        raise ConfigError("the run trained all weights, and has no adapter: leave out --adapter")
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        await _write(run, found.train, part, adapter, use_ray)
        if adapter and (base := base_name(run)) is not None:
            _name_base(part / "adapter_config.json", base)
        write_card(part, run, step=found.step, metrics=found.metrics, adapter=adapter)
        if out.exists():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return found.step


def _free(out: Path) -> Path:
    """The whole path, of what is not there yet or an empty folder."""
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is there already: choose another folder, or remove it")
    return out


async def _write(run: RunConfig, saved: Path, part: Path, adapter: bool, use_ray: bool) -> None:
    """One rank of the train role loads the weights and writes them as a Hugging Face folder."""
    from rolegraph.graph import GraphOptions, RoleGraph
    from rolegraph.host import RoleSpec
    from rolegraph.interfaces import TrainRole
    from rolegraph.models import ensure
    from rolegraph.wiring import import_target, with_models

    run = alone(run)
    model = await asyncio.to_thread(ensure, run.model)
    run = await asyncio.to_thread(with_models, run, model)
    spec = run.roles["train"]
    options = GraphOptions(
        exp_name="export",
        run_dir=str(part.with_name(f"{part.name}.logs")),
        seed=run.seed,
        use_ray=use_ray,
        python_path=run.python_path,
    )
    roles = {"train": RoleSpec(import_target(spec.target), spec.config)}
    try:
        async with RoleGraph(_placed(run), roles, options) as graph:
            train = graph.handle("train", TrainRole)
            await train.load(str(saved), weights_only=True)
            await train.export_hf(str(part), adapter=adapter)
    finally:
        shutil.rmtree(options.run_dir, ignore_errors=True)


def alone(run: RunConfig) -> RunConfig:
    """The run with its train role alone, on one rank: weights are the same in any layout."""
    from rolegraph.placement import PlacementConfig

    spec = run.roles["train"]
    given: dict[str, Any] = {
        "ranks": 1,
        "gpus": None,
        **{f"{axis}_{kind}parallel_size": 1 for axis in _ONE for kind in ("model_", "")},
        "sequence_parallel": None,
        "reference": None,
        "seed": run.seed,
    }
    changes = {name: value for name, value in given.items() if hasattr(spec.config, name)}
    placement = PlacementConfig(device="cpu" if run.placement.device == "cpu" else "auto")
    return replace(run, roles={"train": spec}, placement=placement).with_role("train", **changes)


def _placed(run: RunConfig) -> Plan:
    from rolegraph.placement import plan, requests, this_machine

    return plan(this_machine(), requests(run.roles), run.placement)


def _name_base(config: Path, base: str) -> None:
    """The adapter's base by its name on the hub, where it was a folder of this machine's cache."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = base
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
