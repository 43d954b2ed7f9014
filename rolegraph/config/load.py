"""From command-line overrides to a checked `RunConfig`: compose, fill, check, derive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rolegraph.config import rules
from rolegraph.config.check import TARGET, UNRESOLVED, Checker, Problem, fill, fill_target, resolve
from rolegraph.config.compose import CONFIG_NAME, Composed, as_config, compose, read_saved, rewrite
from rolegraph.config.eval_sets import filled_sets
from rolegraph.config.provenance import Origins, Path_, join, split
from rolegraph.config.schema import RootConfig, RunConfig, Spec
from rolegraph.errors import ConfigError

ROLES = ("train", "rollout", "teacher", "sampler", "prm", "orm")
"""Roles that come with a config group; a node of another name with a `_target_` is a role too."""


@dataclass(frozen=True)
class Loaded:
    """A checked run, the filled tree it was made of, and the choices of the config groups."""

    run: RunConfig
    tree: Mapping[str, Any]
    choices: Mapping[str, Any]


def load(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    config_name: str = CONFIG_NAME,
    elsewhere: bool = False,
) -> Loaded:
    """Compose and check a run from overrides as a user types them.

    `elsewhere`: for other machines than this one, so that what is installed here does not matter.

    Raises ConfigError with every fault at once, each with its key, its origin and what to type.
    """
    source = composed(overrides, config_dir=config_dir, config_name=config_name)
    return check(source, config_dir=config_dir, elsewhere=elsewhere)


def load_saved(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    elsewhere: bool = False,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Loaded:
    """Check the config that a run kept in its folder, or in a checkpoint, with some values changed, by `change` first.

    Raises ConfigError as `load` does; a fault's origin is then a line of that file.
    """
    add_to_path(config_dir)
    source = read_saved(path, overrides, config_dir, change=change)
    return check(source, config_dir=config_dir, elsewhere=elsewhere)


def load_job(rewritten: Sequence[str], *, typed: Sequence[str], config_dir: str | None, config_name: str) -> RunConfig:
    """Check one job of Hydra, whose overrides are rewritten already."""
    source = compose(rewritten, config_dir=config_dir, config_name=config_name, typed=typed)
    return check(source, config_dir=config_dir).run


def in_folder(run: RunConfig, output_dir: str) -> RunConfig:
    """The run with the folder that Hydra made for it."""
    return replace(run, output_dir=output_dir, tree={**run.tree, "output_dir": output_dir})


def composed(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, config_name: str = CONFIG_NAME
) -> Composed:
    """Compose the tree; the user's folder joins `sys.path`, so that its classes can be named."""
    add_to_path(config_dir)
    rewritten = rewrite(overrides, config_dir, config_name)
    return compose(rewritten, config_dir=config_dir, config_name=config_name, typed=overrides)


def add_to_path(config_dir: str | None) -> None:
    """Make modules beside the user's config files importable."""
    if config_dir is not None and (folder := str(Path(config_dir).absolute())) not in sys.path:
        sys.path.insert(0, folder)


def filled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the defaults of all dataclasses, interpolations unresolved."""
    full: dict[str, Any] = fill(tree, RootConfig)
    full["eval"] = filled_sets(full["eval"], full["data"])
    known = {field.name for field in fields(RootConfig)}
    return {key: node if key in known else fill_target(node) for key, node in full.items()}


def check(source: Composed, *, config_dir: str | None = None, elsewhere: bool = False) -> Loaded:
    """Check a composed tree and derive what is left open."""
    problems: list[Problem] = []
    full = filled(source.tree)
    resolved = resolve(as_config(full), problems)
    checker = Checker()
    root = checker.dataclass(_without_roles(resolved, checker), RootConfig, ())
    algorithm = _spec(resolved.get("algorithm"), ("algorithm",), checker)
    if resolved.get("algorithm") is None:
        checker.fault((), "no algorithm is chosen: add algorithm=grpo, algorithm=sft or algorithm=pt, or an experiment")
    roles = {role: _spec(resolved[role], (role,), checker) for role in _role_names(resolved)}
    problems += checker.problems
    if root and algorithm and all(roles.values()):
        run = _run(root, algorithm, {role: spec for role, spec in roles.items() if spec}, config_dir)
        run = replace(run, tree=resolved)
        problems += [Problem((), text) for text in rules.broken(run, elsewhere=elsewhere)]
        if not problems:
            return Loaded(rules.derive(run), full, source.choices)
    raise ConfigError(report(problems, source.origins))


def _role_names(tree: Mapping[str, Any]) -> list[str]:
    known = {field.name for field in fields(RootConfig)} | {"algorithm"}
    names = [key for key, node in tree.items() if key not in known and isinstance(node, Mapping) and TARGET in node]
    return sorted(names, key=lambda name: ROLES.index(name) if name in ROLES else len(ROLES))


def _without_roles(tree: Mapping[str, Any], checker: Checker) -> dict[str, Any]:
    """The keys of RootConfig; any key that is neither one of these nor a role is reported."""
    known = [field.name for field in fields(RootConfig)]
    roles = set(_role_names(tree))
    for key, node in tree.items():
        if key in known or key in roles or key == "algorithm":
            continue
        if key in ROLES:
            if node is not None:
                checker.fault((key,), f"role {key} is configured but not chosen: add {key}={_DEFAULT_ROLES[key]}")
        else:
            checker.unknown(key, [*known, "algorithm", *ROLES], ())
    return {key: node for key, node in tree.items() if key in known}


_DEFAULT_ROLES = {
    "train": "megatron",
    "rollout": "vllm",
    "teacher": "megatron",
    "sampler": "vllm",
    "prm": "functions",
    "orm": "functions",
}


def _spec(node: Any, path: Path_, checker: Checker) -> Spec | None:
    if node is None or node is UNRESOLVED:
        return None
    if not isinstance(node, Mapping) or TARGET not in node:
        checker.fault(path, f"names no class: choose one with {join(path)}=NAME, or set {join(path)}.{TARGET}")
        return None
    found = checker.target(node, path)
    return None if found is None else Spec(*found)


def _run(root: RootConfig, algorithm: Spec, roles: Mapping[str, Spec], config_dir: str | None) -> RunConfig:
    values = {field.name: getattr(root, field.name) for field in fields(RootConfig)}
    path = (str(Path(config_dir).absolute()),) if config_dir else ()
    run = RunConfig(**values, algorithm=algorithm, roles=roles, python_path=path)
    return replace(run, placement=run.placement.for_roles(list(run.started)))


def report(problems: Iterable[Problem], origins: Origins) -> str:
    """All faults as one message: the key, what is wrong, where it came from."""
    lines: dict[str, None] = {}
    for problem in problems:
        text = f"{join(problem.path)}: {problem.text}" if problem.path else problem.text
        path = problem.path or _leading_key(problem.text)
        origin = origins.of(path) if path else None
        lines[f"  {text}" + (f"\n      from {origin}" if origin else "")] = None
    count = len(lines)
    return "\n".join([f"the config has {count} fault{'s' if count > 1 else ''}:", *lines])


def _leading_key(text: str) -> Path_:
    """The key that a rule's sentence begins with, if it does."""
    word = text.split(" ")[0].split("=")[0].rstrip(":,")
    return split(word) if "." in word else ()
