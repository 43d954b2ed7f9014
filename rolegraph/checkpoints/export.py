"""A checkpoint as a Hugging Face folder that other programs load: `rolegraph export CHECKPOINT OUT [--adapter]`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rolegraph.checkpoints import folder
from rolegraph.checkpoints.card import base_name, write_card
from rolegraph.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig
    from rolegraph.placement import Plan

_ONE = ("tensor", "pipeline", "context", "expert")


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: type rolegraph export CHECKPOINT OUT [--adapter]")


def main(words: Sequence[str]) -> int:
    """Run the command with these words."""
    parser = _Parser(
        allow_abbrev=False, prog="rolegraph export", description="Write a checkpoint as a Hugging Face folder."
    )
    parser.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step-N, or the folder of a run: its newest one")
    parser.add_argument("out", type=Path, help="the folder to write, which is not there yet, or empty")
    parser.add_argument("--adapter", action="store_true", help="the adapter alone, as PEFT reads it")
    parser.add_argument("--config-dir", metavar="DIR", help="where the run had config groups and modules of its own")
    given = parser.parse_args(list(words))
    step = export(given.checkpoint, given.out, adapter=given.adapter, config_dir=given.config_dir)
    print(f"{given.out}: {'the adapter' if given.adapter else 'the model'} of step {step}")
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
    part = out.with_name(f".{out.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        await _write(run, found.train, part, adapter, use_ray)
        if adapter and (base := base_name(run)) is not None:
            _name_base(part / "adapter_config.json", base)
        write_card(part, run, step=found.step, metrics=found.metrics, adapter=adapter)
        _free(out)  # another export may have been faster
        part.replace(out)
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
        "cpus": None,
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
