"""One run, from a checked config to its end: places the roles, starts them beside the data, and runs the algorithm."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rolegraph.algorithms.base import Algorithm
from rolegraph.algorithms.hooks import Hook
from rolegraph.algorithms.scorers import Scorers
from rolegraph.algorithms.teachers import Teachers
from rolegraph.care import RunCare
from rolegraph.checkpoints.folder import Checkpoint, newest
from rolegraph.checkpoints.resume import as_kept, check_trainer, go_on, put_aside, start_of
from rolegraph.config.rules import settle
from rolegraph.config.schema import RunConfig, Spec
from rolegraph.config.turn_rules import takes_no_device
from rolegraph.data import Dataset
from rolegraph.errors import ConfigError, PlanError, RoleGraphError
from rolegraph.graph import GraphOptions, OnReady, RoleGraph
from rolegraph.host import RoleSpec
from rolegraph.models import ensure
from rolegraph.movers import mover
from rolegraph.parcel import code_folder
from rolegraph.placement import Plan, plan, requests, this_machine
from rolegraph.placement.environment import as_environment
from rolegraph.reading import load_checked, models_about
from rolegraph.rebuild import TrainGroup
from rolegraph.results import alone_in
from rolegraph.rewards.config import RewardConfig
from rolegraph.role import Role
from rolegraph.telemetry import Telemetry
from rolegraph.telemetry.report import write_report
from rolegraph.turns import TurnTaker, turns_of
from rolegraph.weights import WeightSync
from rolegraph.wiring import (
    Hooks,
    eval_hook,
    handles_of,
    hooks_of,
    import_target,
    scorers_of,
    teachers_of,
    weight_sync,
    with_models,
)

T = TypeVar("T")

REMIND_EVERY_S = 60.0
"""Between two lines that say what a slow start waits for."""


@dataclass
class Run:
    """What an algorithm is given beside its config and the handles on its roles."""

    config: RunConfig
    dataset: Dataset
    telemetry: Telemetry
    sync: WeightSync | None = None
    """Brings the trainer's weights into the engines; None where no role generates."""
    turns: TurnTaker = field(default_factory=TurnTaker)
    """Whose turn it is on devices that roles share; by itself it keeps nobody waiting."""
    teachers: Teachers = field(default_factory=lambda: Teachers({}))
    """All teachers behind one call; empty where nothing is distilled."""
    scorers: Scorers = field(default_factory=lambda: Scorers({}))
    """All prm and orm roles behind one call; empty where nothing is scored."""
    hooks: tuple[Hook, ...] = ()
    """Who is told of stages and steps, in this order."""


def main(config: RunConfig) -> None:
    """Run to the end, or not at all where the algorithm finds nothing left to do.

    Ctrl-C and SIGTERM free every actor first; errors are those of the part that failed.
    """
    run_dir = Path(config.output_dir or "outputs").absolute()
    with alone_in(run_dir):
        algorithm_class = _algorithm_class(config.algorithm)
        if ending := algorithm_class.begin(config, run_dir):
            _say(ending)
            return
        if not config.resume or not (run_dir / "config.yaml").exists():  # else once nothing refuses it any more
            save_config(as_kept(config, _start(config, run_dir), run_dir), run_dir / "config.yaml")
        try:
            asyncio.run(_run(config, run_dir))
        finally:
            try:
                report = write_report(run_dir, f"{_exp_name(config)} in {run_dir.name}")
            except OSError as error:
                report = run_dir / "metrics.jsonl"
                _say(f"report.html was not written: {error.strerror}")
            if report is not None:
                _say_where(run_dir)


async def _run(config: RunConfig, run_dir: Path) -> None:
    algorithm_class = _algorithm_class(config.algorithm)
    # While the folder holds what an earlier run left, and nothing of this one.
    checkpoint = _start(config, run_dir)
    aside = put_aside(run_dir) if algorithm_class.can_save and checkpoint is None else None
    started = time.monotonic()
    telemetry = Telemetry(
        run_dir,
        roles=tuple(config.roles),
        loggers=config.logger.names,
        name=_exp_name(config),
        config=config.tree,
        samples_every=config.logger.samples_every,
        use_ray=config.use_ray,
    )
    async with AsyncExitStack() as stack:
        stack.callback(telemetry.close)
        if aside is not None:
            telemetry.event(
                f"no whole checkpoint in {run_dir}: the run begins anew; {aside.name} has the metrics of before"
            )
        model_path = await asyncio.to_thread(ensure, config.model)
        config = await asyncio.to_thread(with_models, config, model_path)
        about = await asyncio.to_thread(models_about, config, checkpoint)
        placed = await asyncio.to_thread(_place, config, stack)
        config = settle(config, placed)
        turns = _turns(config, placed, algorithm_class)
        telemetry.timeline.place({role: len(slots) for role, slots in placed.roles.items()})
        care = RunCare(config.health.max_restarts, turns, telemetry)
        graph = _graph(config, placed, run_dir, algorithm_class, telemetry, turns, care)
        stack.push_async_callback(graph.stop)
        dataset, sets = await _side_by_side(graph, load_checked(config, model_path, about, checkpoint), telemetry)
        save_config(as_kept(config, checkpoint, run_dir), run_dir / "config.yaml")
        stack.callback(telemetry.finish_samples)
        for name, loaded in {**({"": dataset} if len(dataset) else {}), **sets}.items():
            for line in loaded.report.lines():
                telemetry.event(f"eval set {name}: {line}" if name else line)
        slow = ", ".join(f"{role} {seconds:.1f} s" for role, seconds in graph.startup.items())
        telemetry.event(f"roles ready after {time.monotonic() - started:.1f} s ({slow})")
        hooks = hooks_of(config, run_dir, about, stack)
        ready = Ready(config, placed, graph, dataset, sets, telemetry, turns, hooks, care)
        await run_to_the_end(ready, checkpoint)
        gain = telemetry.gain if "train" in config.roles else ""  # rewards rise where something learns
        telemetry.event(f"done in {telemetry.elapsed}" + (f": {gain}" if gain else ""))


def _start(config: RunConfig, run_dir: Path) -> Checkpoint | None:
    """The checkpoint that the run begins from, where its algorithm knows of such."""
    return start_of(config, run_dir) if _algorithm_class(config.algorithm).can_save else None


@dataclass(frozen=True)
class Ready:
    """What there is once roles and data are: all that an algorithm needs to begin, or to begin again."""

    config: RunConfig
    placed: Plan
    graph: RoleGraph
    dataset: Dataset
    sets: Mapping[str, Dataset]
    """The rows of the eval sets, by name."""
    telemetry: Telemetry
    turns: TurnTaker
    hooks: Hooks
    care: RunCare


async def run_to_the_end(ready: Ready, checkpoint: Checkpoint | None) -> None:
    """Run the algorithm, and where its trainer dies, once more from the newest checkpoint with a new one.

    Where the run saves none, or the trainer has died too often, its death ends the run.
    """
    trainer, begun_from = TrainGroup(ready.graph, ready.turns, ready.care), checkpoint
    while True:
        hooks = ready.hooks.make()
        try:
            return await run_algorithm(ready, checkpoint, hooks)
        except Exception as error:
            is_death = isinstance(error, RoleGraphError) and ready.config.checkpoint.every is not None
            if not is_death or (death := await trainer.has_died()) is None:
                for hook in hooks:
                    await hook.broken_off()  # while the trainer can still write
                raise
            await trainer.end(hooks)
            checkpoint = newest(ready.telemetry.run_dir) or begun_from
            going_on = f"and goes on behind step {checkpoint.step}" if checkpoint is not None else "and begins anew"
            if not trainer.may_restart(death, going_on):
                raise
        await trainer.restart()


async def run_algorithm(ready: Ready, checkpoint: Checkpoint | None, hooks: tuple[Hook, ...]) -> None:
    """Run a new object of the algorithm to its end, from a checkpoint or from the beginning."""
    config, graph = ready.config, ready.graph
    algorithm_class = _algorithm_class(config.algorithm)
    handles = handles_of(config, graph)
    run = Run(
        config,
        ready.dataset,
        ready.telemetry,
        weight_sync(config, ready.placed, graph),
        ready.turns,
        teachers_of(config, handles),
        scorers_of(config, handles),
        hooks,
    )
    ready.care.sync, ready.care.rollout = run.sync, graph.groups.get("rollout")
    if ready.sets:
        run.hooks = (eval_hook(config, ready.placed, run, handles, ready.sets, ready.hooks.stop), *run.hooks)
    algorithm = algorithm_class(config.algorithm.config, run)
    for name in dict.fromkeys((*algorithm_class.roles(), *handles)):
        setattr(algorithm, name, handles.get(name))
    if algorithm_class.can_save:
        await go_on(algorithm, checkpoint, ready.hooks.about)
    await algorithm.run()
    for hook in run.hooks:
        await hook.ended(algorithm)


async def _side_by_side(graph: RoleGraph, load: Coroutine[Any, Any, T], telemetry: Telemetry) -> T:
    """Start the roles while the data is read; the first fault of either ends both."""

    async def remind() -> None:
        while True:
            await asyncio.sleep(REMIND_EVERY_S)
            waiting = graph.still_starting()
            telemetry.event(f"still starting after {telemetry.elapsed}: {', '.join(waiting) or 'reading the data'}")

    reminder = asyncio.create_task(remind())
    try:
        async with asyncio.TaskGroup() as both:
            loading = both.create_task(load)
            both.create_task(graph.start())
    except BaseExceptionGroup as faults:
        raise faults.exceptions[0] from None
    finally:
        reminder.cancel()
    return loading.result()


def _algorithm_class(spec: Spec) -> type[Algorithm]:
    found = import_target(spec.target)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"algorithm._target_={spec.target} is no rolegraph.algorithms.base.Algorithm")
    return found


def _role_spec(role: str, spec: Spec, kind: type[Role]) -> RoleSpec:
    found = import_target(spec.target)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{role}._target_={spec.target} is no {kind.__name__}, which the algorithm talks to there")
    return RoleSpec(found, spec.config)


def _turns(config: RunConfig, placed: Plan, algorithm: type[Algorithm]) -> TurnTaker:
    # Who computes in moments of a core, or elsewhere, keeps nobody from a device and waits for none.
    kinds = {role: algorithm.interface_of(role) for role in placed.roles if not takes_no_device(config, role)}
    groups = [[role for role in group if role in kinds] for group in placed.groups]
    return TurnTaker(turns_of(groups, kinds, config.placement))


def _make_room(config: RunConfig, placed: Plan, turns: TurnTaker) -> OnReady | None:
    """What each role does once it has started, where some of them make room for others."""
    moving = [role for role in placed.roles if turns.turns.first_rest(role)]

    async def ready(role: str, handle: Role) -> None:
        if role in moving:
            await turns.started(role, mover(handle, config.placement))

    return ready if moving else None


def _graph(
    config: RunConfig,
    placed: Plan,
    run_dir: Path,
    algorithm: type[Algorithm],
    telemetry: Telemetry,
    turns: TurnTaker,
    care: RunCare,
) -> RoleGraph:
    options = GraphOptions(
        exp_name=_exp_name(config),
        run_dir=str(run_dir),
        seed=config.seed,
        deterministic=config.deterministic,
        use_ray=config.use_ray,
        timeout_s=config.placement.timeout_s,
        setup_timeout_s=config.placement.setup_timeout_s,
        env=as_environment(config.placement.env),
        code=plugin_folders(config),
        ship_code=config.placement.ship_code,
        python_path=config.python_path,
    )
    # Before what is shipped is looked for: the roles' modules are imported here.
    specs = {role: _role_spec(role, spec, algorithm.interface_of(role)) for role, spec in config.started.items()}
    if config.checkpoint.every is not None or (config.resume and algorithm.can_save):
        check_trainer(specs["train"].role_class)
    on_ready = _make_room(config, placed, turns)
    return RoleGraph(placed, specs, options, on_call=telemetry.timeline.call, on_ready=on_ready, care=care)


def plugin_folders(config: RunConfig) -> tuple[str, ...]:
    """Folders of reward plugins and of reward functions named by import path: only the actors import these."""
    configs = [spec.config for spec in config.roles.values()]
    rewards = [each if isinstance(each, RewardConfig) else getattr(each, "reward", None) for each in configs]
    names = []
    for reward in filter(None, [config.reward, *rewards]):
        names += [*reward.external_plugins, *(spec.target.rpartition(".")[0] for spec in reward.functions())]
    return tuple(dict.fromkeys(folder for name in names if name and (folder := code_folder(name)) is not None))


def _place(config: RunConfig, stack: AsyncExitStack) -> Plan:
    """Start or join Ray, and place the roles on what there is.

    On a cluster that others use too, on what is free now; where that is not enough, on all of it, to wait for it.
    """
    asked = requests(config.roles)
    if not config.use_ray:
        return plan(this_machine(), asked, config.placement)
    from rolegraph.cluster import Cluster
    from rolegraph.nodes import cluster_inventory

    cluster = Cluster.connect(this_machine().cpus)
    stack.callback(cluster.stop)
    if not cluster.is_joined:
        return plan(this_machine(), asked, config.placement)
    whole, placement = cluster_inventory(), config.placement
    if placement.device_groups is not None:  # these count the cluster's devices, whoever holds them
        return plan(whole, asked, placement)
    if whole.gpus and placement.device == "auto":
        # A cluster whose GPUs are all taken is no cluster without GPUs.
        placement = dataclasses.replace(placement, device="gpu")
    with contextlib.suppress(PlanError):
        return plan(cluster_inventory(free=True), asked, placement)
    return plan(whole, asked, placement)


def _exp_name(config: RunConfig) -> str:
    return config.ray_exp_name or config.algorithm.name.lower()


def save_config(config: RunConfig, path: Path) -> None:
    """Keep the whole config with its defaults filled in, as it can be read back."""
    from omegaconf import OmegaConf

    path.write_text(OmegaConf.to_yaml(OmegaConf.create(plain(config.tree))), encoding="utf-8")


def plain(value: Any) -> Any:
    """Dataclasses, mappings and tuples as what YAML has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _say_where(run_dir: Path) -> None:
    folder = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    kinds = {
        "kept.jsonl": "the responses that were kept, for algorithm=sft",
        "pairs.jsonl": "the pairs, for preference training",
        "candidates.jsonl": "every candidate with every score",
        "report.html": "the curves, in a browser",
        "metrics.jsonl": "the numbers, a line a step",
        "timeline.json": "who did what when, for ui.perfetto.dev",
        "results.json": "the numbers of every eval set",
        "samples": "what the policy wrote, as Parquet",
        "eval": "answers to the eval sets, as Parquet",
        "checkpoints": "from where resume=auto goes on, and rolegraph export makes models",
        "logs": "what each role logged",
    }
    there = {name: what for name, what in kinds.items() if (run_dir / name).exists()}
    width = max(15, *map(len, there)) if there else 0
    lines = [f"  {folder}/{name:<{width}} {what}" for name, what in there.items()]
    _say("Where to look:\n" + "\n".join(lines))


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False, soft_wrap=True, markup=False)
