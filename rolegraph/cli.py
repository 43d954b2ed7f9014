"""The `rolegraph` command."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from rolegraph.errors import ConfigError, PlanError, RoleGraphError, StoppedError
from rolegraph.placement.option import OPTION, take_option

if TYPE_CHECKING:
    from rolegraph.config import RunConfig

USAGE = """rolegraph trains language models by reinforcement learning on a graph of Ray actors.

  rolegraph run  [CHOICES] [KEY=VALUE ...]    train
  rolegraph plan [CHOICES] [KEY=VALUE ...]    show which rank runs where, how batches divide and what memory that
                                              takes; starts nothing
  rolegraph eval CHECKPOINT|MODEL [CHOICES] [KEY=VALUE ...]
                                              evaluate what a checkpoint holds, or a model (rolegraph eval --help)
  rolegraph checkpoints RUN [--verify] [--prune --keep-last N]
                                              the checkpoints of a run: which are whole, and which go
  rolegraph export CHECKPOINT OUT             write a checkpoint as a Hugging Face folder

Examples
  rolegraph run experiment=quickstart
  rolegraph run algorithm=grpo model=smollm2_135m algorithm.num_generations=4 train.lr=1e-6
  rolegraph run algorithm=sft model=hf model.path=Qwen/Qwen3-0.6B data=jsonl data.path=chats.jsonl
  rolegraph plan algorithm=grpo placement=separate train.ranks=2 rollout.replicas=2
  rolegraph plan algorithm=grpo placement=separate train.gpus=8 rollout.gpus=8 --cluster 2x8xH100-80G
  rolegraph run --config-dir my_configs experiment=mine

Choices pick a file of a config group (algorithm, model, data, reward, placement, train, rollout, orm, eval, logger,
experiment); KEY=VALUE sets any value. Everything is checked before anything starts.

Options of `run` and `plan`
  --config-dir DIR   a folder with config groups and modules of your own
  --device_groups JSON   placement.device_groups as JSON
  --cluster NODES    plan for machines that are not there: 2x8xH100-80G is 2 nodes of 8 GPUs with 80 GiB each, 2xcpu32
                     2 nodes of 32 cores; several kinds by commas (plan only)
  -o FILE            write the plan as JSON, for machines (plan only)
  --cfg job          print the config with all defaults, and stop (run only; --resolve fills in interpolations)
  --help             list the config groups and what they offer
  -m, --multirun     one run for each combination of comma-separated values (run only)
  --traceback        show Python's traceback with an error (or ROLEGRAPH_TRACEBACK=1)

Tab completion in bash: eval "$(rolegraph -sc install=bash)"
"""

COMMANDS = {"checkpoints": "rolegraph.checkpoints.command", "export": "rolegraph.checkpoints.export"}
"""Commands of their own by the module whose `main(words)` runs them and gives the exit code."""
CONFIG_FAULT = 2
FAILED = 1


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    sys.exit(dispatch(list(sys.argv[1:] if argv is None else argv)))


def dispatch(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    if any(word in ("-sc", "--shell-completion") for word in argv):
        return _complete(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"rolegraph {version('rolegraph')}")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {"run": _run, "plan": _plan, "eval": _eval}
    commands |= {name: _from_module(module) for name, module in COMMANDS.items()}
    if argv[0] not in commands:
        near = difflib.get_close_matches(argv[0], commands, n=1, cutoff=0.5)
        names = ", ".join(commands)
        hint = f"did you mean `rolegraph {near[0]}`?" if near else f"the commands are {names}"
        print(f"rolegraph: there is no command {argv[0]!r}: {hint}\n")
        print(USAGE)
        return CONFIG_FAULT
    rest = [word for word in argv[1:] if word != "--traceback"]
    show_traceback = len(rest) < len(argv) - 1 or os.environ.get("ROLEGRAPH_TRACEBACK", "0") not in ("", "0")
    return guarded(lambda: commands[argv[0]](rest), show_traceback=show_traceback)


def _from_module(module: str) -> Callable[[list[str]], int]:
    return lambda words: int(importlib.import_module(module).main(words))


def guarded(command: Callable[[], int], *, show_traceback: bool) -> int:
    """Run a command; an error of ours becomes its message and an exit code."""
    try:
        return command()
    except StoppedError as error:
        print(f"rolegraph: {error}", file=sys.stderr)
        return 128 + error.signal
    except RoleGraphError as error:
        if show_traceback:
            traceback.print_exc()
        print(f"rolegraph: {error}", file=sys.stderr)
        return CONFIG_FAULT if isinstance(error, ConfigError | PlanError) else FAILED
    except KeyboardInterrupt:
        print("rolegraph: stopped", file=sys.stderr)
        return 130


def _parse(words: Sequence[str]) -> Namespace:
    from hydra._internal.utils import get_args_parser

    words, device_groups = take_option(words)
    args = get_args_parser().parse_intermixed_args(words)
    if device_groups is not None:
        args.overrides.append(f"{OPTION}={device_groups}")
    if args.config_path:
        raise ConfigError(f"--config-path {args.config_path}: a folder of your own is given by --config-dir")
    return args


def _plan(words: list[str]) -> int:
    words, given = _take(words, PLAN_OPTIONS)
    args = _parse(words)
    if args.help:
        print(USAGE)
        return 0
    for name, chosen in (("--multirun", args.multirun), ("--cfg", args.cfg), ("--info", args.info)):
        if chosen:
            raise ConfigError(f"{name} is for `rolegraph run`: a plan shows one run, and nothing else")
    from rolegraph.config import load
    from rolegraph.explain import print_plan
    from rolegraph.models.architecture import FETCH_S
    from rolegraph.placement import this_machine
    from rolegraph.placement.clusters import cluster

    elsewhere = "--cluster" in given
    inventory = cluster(given["--cluster"]) if elsewhere else this_machine()
    name = args.config_name or "config"
    run = load(args.overrides, config_dir=args.config_dir, config_name=name, elsewhere=elsewhere).run
    placed, estimate = print_plan(run, inventory, fetch_s=FETCH_S)
    if "-o" in given:
        from rolegraph.plan_file import write_plan

        write_plan(given["-o"], run, placed, estimate, inventory)
    return 0


def _eval(words: list[str]) -> int:
    from rolegraph.evaluation.command import command

    if wrong := [word for word in words if word.partition("=")[0] in PLAN_OPTIONS]:
        option = wrong[0].partition("=")[0]
        raise ConfigError(f"{option} is for `rolegraph plan`: an evaluation takes the machines it finds")
    return command(words, parse=_parse, run=_run, refuse=_refuse_early)


PLAN_OPTIONS = {"--cluster": "2x8xH100-80G", "-o": "plan.json"}
"""Options that only a plan has, with an example of what follows them."""


def _take(words: Sequence[str], options: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The words without some options, and the value of each: the next word, or what stands behind `=`."""
    rest: list[str] = []
    found: dict[str, str] = {}
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name not in options:
            rest.append(word)
            continue
        given = value if equals else next(left, "")
        if not given or given.startswith("-"):
            raise ConfigError(f"{name} needs a value, as in {name} {options[name]}")
        if name in found:
            raise ConfigError(f"{name} is given twice")
        found[name] = given
    return rest, found


def _run(words: list[str]) -> int:
    from rolegraph.config.load import composed, load

    if wrong := [word for word in words if word.partition("=")[0] in PLAN_OPTIONS]:
        raise ConfigError(f"{wrong[0].partition('=')[0]} is for `rolegraph plan`: a run takes the machines it finds")
    args = _parse(words)
    name = args.config_name or "config"
    if args.cfg == "job":
        from rolegraph.explain import print_config

        tree = composed(args.overrides, config_dir=args.config_dir, config_name=name)
        print_config(tree, package=args.package, resolved=args.resolve)
        return 0
    if args.multirun or args.help or args.hydra_help or args.cfg or args.info:
        return _through_hydra(args)
    # First, so that no faulty run makes a folder, or waits for Ray to learn that its roles do not fit.
    run = load(args.overrides, config_dir=args.config_dir, config_name=name).run
    _refuse_early(run)
    return _through_hydra(args, run)


def _refuse_early(run: RunConfig) -> None:
    """Raise PlanError where the roles have no room on this machine, unless the run may join a cluster."""
    from rolegraph.cluster import finds_cluster
    from rolegraph.placement import plan, requests, this_machine

    if not (run.use_ray and finds_cluster()):
        plan(this_machine(), requests(run.roles), run.placement)


class _Stopped(BaseException):
    """A signal has asked the run to end: no error that Hydra would keep until a sweep is through."""

    def __init__(self, error: StoppedError) -> None:
        super().__init__(str(error))
        self.error = error


def _through_hydra(args: Namespace, checked: RunConfig | None = None) -> int:
    """Hand the command line to Hydra, which makes the run's folder, or one a job of a sweep.

    `checked` is what the command line says, where it has been read already.
    """
    from hydra._internal.utils import _run_hydra, get_args_parser
    from hydra.errors import HydraException
    from omegaconf import DictConfig

    from rolegraph.config.compose import CONFIG_NAME, CONFIG_PATH, register_resolvers, rewrite, set_version
    from rolegraph.config.load import add_to_path

    set_version()
    register_resolvers()
    add_to_path(args.config_dir)
    typed = list(args.overrides)
    if not args.shell_completion:  # its words are subcommands of Hydra's
        args.overrides = rewrite(typed, args.config_dir, args.config_name or CONFIG_NAME)
    as_typed = dict(zip(args.overrides, typed, strict=True))
    failures: list[RoleGraphError] = []

    def task(config: DictConfig) -> None:
        try:
            _job(args, as_typed, checked)
        except StoppedError as error:
            raise _Stopped(error) from None  # a sweep ends here, where it would take another error for one job's
        except RoleGraphError as error:
            failures.append(error)
            if args.multirun:
                print(f"rolegraph: {error}", file=sys.stderr)

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints errors its own way and exits
    try:
        _run_hydra(args, get_args_parser(), task, CONFIG_PATH, CONFIG_NAME)
    except HydraException as error:
        raise ConfigError(str(error)) from error
    except _Stopped as stopped:
        raise stopped.error from None
    if failures:
        raise failures[0]
    return 0


def _job(args: Namespace, as_typed: Mapping[str, str], checked: RunConfig | None) -> None:
    """One run inside the folder that Hydra made for it."""
    from hydra.core.hydra_config import HydraConfig

    from rolegraph.config.load import in_folder, load_job

    hydra = HydraConfig.get()
    words = [*hydra.overrides.hydra, *hydra.overrides.task]
    if checked is None or not {*words} <= {*as_typed, "hydra.mode=RUN"}:
        # A job of a sweep: Hydra chose its words.
        typed = [as_typed.get(word, word.lstrip("+")) for word in words]
        checked = load_job(words, typed=typed, config_dir=args.config_dir, config_name=hydra.job.config_name)
    from rolegraph.run import main as run_main

    run_main(in_folder(checked, hydra.runtime.output_dir))


def _complete(argv: list[str]) -> int:
    """Tab completion: Hydra's, which knows none of the commands that take its words."""
    with_words = ("run", "plan", "eval")
    line = os.environ.get("COMP_LINE")
    if line is not None:
        head, _, rest = line.partition(" ")
        command, _, tail = rest.lstrip().partition(" ")
        if command == "eval":
            _, is_behind, tail = tail.lstrip().partition(" ")
            if not is_behind:
                return 0  # what is evaluated comes first: a path or a name
        if command in with_words:
            shortened = f"{head} {tail}"
            point = int(os.environ.get("COMP_POINT", len(line))) - (len(line) - len(shortened))
            os.environ.update(COMP_LINE=shortened, COMP_POINT=str(point))
        elif " " not in rest.lstrip() and not any("install" in word for word in argv):
            print("\n".join(word for word in (*with_words, *COMMANDS) if word.startswith(command)))
            return 0
    return _through_hydra(_parse([word for word in argv if word not in with_words]))


if __name__ == "__main__":
    main()
