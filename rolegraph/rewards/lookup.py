"""Finding reward functions without importing anybody's module: by reading source, so that a config is checked at once.

What source cannot tell (a name registered in a loop, a compiled module) is left to the start of the role.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rolegraph.rewards.functions import BUILTIN, setting_problems
from rolegraph.rewards.step_functions import STEP_FUNCTIONS

BATCH_ARGUMENTS = ("prompts", "response_ids", "response_length", "completions")
"""What a function may ask for by name beside the completions and the dataset's columns."""


_BUILTIN = {**BUILTIN, **STEP_FUNCTIONS}


def builtin() -> Mapping[str, Callable[..., Any]]:
    """The functions of this package by name."""
    return _BUILTIN


def nearest(name: str, names: Iterable[str]) -> str:
    """`, did you mean ...?` or the names to choose from."""
    names = sorted(name for name in names if not name.startswith("_"))
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.5):
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else "nothing is known by any name"


def problems(target: str, kwargs: Mapping[str, Any], plugins: Sequence[str]) -> list[str]:
    """What is wrong with naming `target` with `kwargs`, as far as source tells."""
    known = builtin()
    if target in known:
        names = [name for name in list(inspect.signature(known[target]).parameters)[1:] if name not in BATCH_ARGUMENTS]
        return _setting_problems(target, kwargs, names) or setting_problems(target, kwargs)
    if "." not in target:
        registered = {name: node for plugin in plugins for name, node in _registered(plugin).items()}
        if target in registered:
            return _source_problems(target, kwargs, registered[target])
        if plugins:
            return []
        advice = "a function of yours is named by its import path, or by a plugin in reward.external_plugins"
        return [f"no reward function is called {target!r}; {nearest(target, known)} ({advice})"]
    return _path_problems(target, kwargs, plugins)


def requires(target: str, plugins: Sequence[str]) -> tuple[str, ...]:
    """Columns that a function cannot do without, as far as source tells."""
    if (known := builtin().get(target)) is not None:
        parameters = list(inspect.signature(known).parameters.values())[1:]
        return tuple(each.name for each in parameters if each.default is each.empty)
    node = _definition(target, plugins)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ()
    given = node.args
    plain = given.args[1 : len(given.args) - len(given.defaults)]
    named = [each for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return tuple(each.arg for each in (*plain, *named))


def _definition(target: str, plugins: Sequence[str]) -> ast.AST | None:
    """Where a function of the user's is defined; null where source does not tell."""
    module, _, attribute = target.rpartition(".")
    if not module:
        return {name: node for plugin in plugins for name, node in _registered(plugin).items()}.get(target)
    source = _module_source(module, _beside(plugins))
    try:
        return None if source is None else _top_level(_tree(source))[0].get(attribute)
    except SyntaxError:
        return None


def is_file(plugin: str) -> bool:
    """Whether a plugin is a file that is there."""
    return plugin.endswith(".py") and Path(plugin).expanduser().is_file()


def plugin_problem(plugin: str) -> str | None:
    """What is wrong with one entry of `external_plugins`."""
    if not plugin.endswith(".py"):
        return _module_problem(plugin)
    if not is_file(plugin):
        return f"there is no file {plugin!r} (looked in {Path.cwd()})"
    try:
        _tree(Path(plugin).expanduser())
    except SyntaxError as error:
        return f"{plugin}, line {error.lineno}: {error.msg}"
    return None


def _setting_problems(target: str, kwargs: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [f"{target} has no setting {key!r}; {nearest(key, names)}" for key in kwargs if key not in names]


def _path_problems(target: str, kwargs: Mapping[str, Any], plugins: Sequence[str]) -> list[str]:
    module, _, attribute = target.rpartition(".")
    source = _module_source(module, _beside(plugins))
    if source is None:
        problem = _module_problem(module)
        return [f"{problem} (for {target!r})"] if problem else []
    try:
        tree = _tree(source)
    except SyntaxError as error:
        return [f"{source}, line {error.lineno}: {error.msg}"]
    names, certain = _top_level(tree)
    if attribute not in names:
        return [f"{source} defines no {attribute!r}; {nearest(attribute, names)}"] if certain else []
    return _source_problems(target, kwargs, names[attribute])


def _beside(plugins: Sequence[str]) -> list[str]:
    # A plugin's file is a module by its own name, and sees those beside it.
    return [str(Path(plugin).expanduser().parent) for plugin in plugins if plugin.endswith(".py")]


def _source_problems(target: str, kwargs: Mapping[str, Any], node: ast.AST | None) -> list[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    arguments = node.args
    names = [argument.arg for argument in (*arguments.args[1:], *arguments.kwonlyargs)]
    found = [] if arguments.kwarg else _setting_problems(target, kwargs, names)
    return found + [f"{target}: {key!r} is given by the run" for key in kwargs if key in BATCH_ARGUMENTS]


def _module_problem(module: str) -> str | None:
    # Only the outermost package: looking further would import it.
    outer = module.partition(".")[0]
    try:
        missing = not outer.isidentifier() or importlib.util.find_spec(outer) is None
    except (ImportError, ValueError):
        missing = outer not in sys.modules
    if missing and _module_source(module) is None:
        return f"there is no module {outer!r} on the import path"
    return None


def _module_source(module: str, more: Sequence[str] = ()) -> Path | None:
    relative = Path(*module.split("."))
    for folder in map(Path, (*sys.path, *more)):
        for candidate in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _registered(plugin: str) -> dict[str, ast.AST]:
    """Functions that a plugin registers by `@reward("name")` or `@reward`, by name."""
    source = Path(plugin).expanduser() if plugin.endswith(".py") else _module_source(plugin)
    if source is None or not source.is_file():
        return {}
    try:
        tree = _tree(source)
    except SyntaxError:
        return {}
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            called = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
            if called == "reward":
                found[_registered_name(decorator) or node.name] = node
    return found


def _registered_name(decorator: ast.expr) -> str | None:
    if isinstance(decorator, ast.Call) and decorator.args and isinstance(decorator.args[0], ast.Constant):
        return str(decorator.args[0].value)
    return None


def _top_level(tree: ast.Module) -> tuple[dict[str, ast.AST | None], bool]:
    """Names bound at a module's top level, and whether these are certainly all."""
    names: dict[str, ast.AST | None] = {}
    certain = True
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node if not node.decorator_list else None
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update({target.id: None for target in targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update({(alias.asname or alias.name).partition(".")[0]: None for alias in node.names})
            certain = certain and all(alias.name != "*" for alias in node.names)
        else:
            certain = certain and isinstance(node, ast.Expr)
    return names, certain and "__getattr__" not in names


@lru_cache(maxsize=32)
def _tree_of(path: Path, changed_ns: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _tree(path: Path) -> ast.Module:
    return _tree_of(path, path.stat().st_mtime_ns)
