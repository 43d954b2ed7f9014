"""What a `_target_` takes, found without importing it where its source tells: a config is checked before torch loads.

A class's typed `Config` is looked up as `NameConfig` in the module `config` beside the class's own. A function, or a
class with an `__init__` or dataclass fields of its own, is read from its source. Everything else is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import typing
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Optional, Union


class TargetError(Exception):
    """A `_target_` that leads nowhere; the message says what to type."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One key of a node."""

    hint: Any
    """Its type; Any where the source does not tell."""
    required: bool


@dataclasses.dataclass(frozen=True)
class Signature:
    """The keys that a target takes."""

    target: str
    parameters: Mapping[str, Parameter]
    open_ended: bool
    """Takes `**kwargs`: any key goes."""
    config: type | None = None
    """The dataclass that holds them, when the target has a typed config."""


@lru_cache(maxsize=256)
def signature_of(target: str) -> Signature:
    """Find the keys of a target; TargetError when it is not there."""
    module, name = _split(target)
    _must_define(module, name)
    if (config := _config_beside(module, name)) is not None:
        return _of_dataclass(target, config)
    if (read := _from_source(target, module, name)) is not None:
        return read
    found = _import(target, module, name)
    config = getattr(found, "Config", None)
    if isinstance(config, type) and dataclasses.is_dataclass(config):
        return _of_dataclass(target, config)
    return _of_callable(target, found)


def module_file(name: str) -> Path | None:
    """The source file of a module, found without importing its parents."""
    head, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(head)
    except (ImportError, ValueError):
        return None
    full = head
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full = f"{full}.{part}"
        spec = _find(full, list(spec.submodule_search_locations))
    if spec is None:
        return None
    if spec.origin and spec.has_location:
        return Path(spec.origin)
    locations = list(spec.submodule_search_locations or ())
    return Path(locations[0]) if locations else None


def _find(name: str, path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    """Ask every finder, as an import would, but without importing the parent (editable installs bring finders)."""
    for finder in sys.meta_path:
        try:
            found = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        except KeyError:  # a folder without __init__.py, which Python looks for in its parent, and that is not imported
            found = importlib.machinery.ModuleSpec(name, None, is_package=True)
            tail = name.rpartition(".")[2]
            found.submodule_search_locations = [str(Path(place, tail)) for place in path if Path(place, tail).is_dir()]
        if found is not None:
            return found
    return None


def hints_of(config: type) -> dict[str, Parameter]:
    """The fields of a dataclass by name."""
    hints = typing.get_type_hints(config, include_extras=True)
    return {
        field.name: Parameter(
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(config)
        if field.init
    }


def fields_in_source(target: str) -> frozenset[str] | None:
    """Names of a dataclass's fields, those of its bases too, without importing it; null where source does not tell."""
    module, _, name = target.rpartition(".")
    file = module_file(module)
    if file is None or file.suffix != ".py":
        return None
    body = _parse(file).body
    node = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == name), None)
    if node is None:
        return None
    found = frozenset(
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not ast.unparse(item.annotation).startswith(("ClassVar", "typing.ClassVar"))
    )
    for base in (ast.unparse(base) for base in node.bases):
        inherited = fields_in_source(f"{_home(body, module, file, base)}.{base}")
        if inherited is None:
            return None
        found |= inherited
    return found


def _home(body: Sequence[ast.stmt], module: str, file: Path, name: str) -> str:
    """The module that a name of another module comes from."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            parents = module.split(".")
            above = node.level - (file.name == "__init__.py")
            return ".".join([*(parents[: len(parents) - above] if node.level else []), node.module or ""]).strip(".")
    return module


def _of_dataclass(target: str, config: type) -> Signature:
    return Signature(target, hints_of(config), open_ended=False, config=config)


def _split(target: str) -> tuple[str, str]:
    module, _, name = target.rpartition(".")
    if not module or not all(part.isidentifier() for part in target.split(".")):
        raise TargetError(f"{target!r} is no import path: write it as package.module.Name")
    if module_file(module) is not None or module in sys.modules:
        return module, name
    parent, _, last = module.rpartition(".")
    while parent and module_file(parent) is None:
        parent, _, last = parent.rpartition(".")
    if not parent:
        head = module.split(".")[0]
        raise TargetError(
            f"{target!r} cannot be imported: there is no module {head!r}. Is its folder given with --config-dir, "
            "or its package installed?"
        )
    names = _submodules(parent)
    raise TargetError(f"{target!r} cannot be imported: {parent!r} has no module {last!r}{_nearest(last, names)}")


def _submodules(package: str) -> list[str]:
    file = module_file(package)
    folder = file if file and file.is_dir() else file.parent if file and file.name == "__init__.py" else None
    if folder is None:
        return []
    return sorted(p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists())


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _must_define(module: str, name: str) -> None:
    """TargetError when a module's source has no such top-level name (and no way to make one at run time)."""
    file = module_file(module)
    if file is None or file.suffix != ".py":
        return
    names: set[str] = set()
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if names & {name, "*", "__getattr__"}:
        return
    public = [n.name for n in _parse(file).body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"]
    raise TargetError(f"{module!r} has no {name!r}{_nearest(name, public)}")


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise TargetError(f"{file} cannot be read: {error}") from error


def _config_beside(module: str, name: str) -> type | None:
    """The class `NameConfig` of the module `config` beside the target's module, or null."""
    for package in dict.fromkeys((module.rpartition(".")[0], module)):
        beside = f"{package}.config"
        if not package or module_file(beside) is None:
            continue
        try:
            found = getattr(importlib.import_module(beside), f"{name}Config", None)
        except Exception as error:  # a user's module may raise anything
            raise TargetError(f"{beside} cannot be imported: {type(error).__name__}: {error}") from error
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            return found
    return None


def _import(target: str, module: str, name: str) -> Any:
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise TargetError(f"{target!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(loaded, name):
        raise TargetError(f"{module!r} has no {name!r}{_nearest(name, [n for n in vars(loaded) if n[0] != '_'])}")
    return getattr(loaded, name)


def _of_callable(target: str, found: Any) -> Signature:
    if not callable(found):
        raise TargetError(f"{target!r} is {type(found).__name__}, not a class or a function")
    try:
        function = inspect.getattr_static(found, "__init__") if isinstance(found, type) else found
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # names that exist for type checkers only
        hints = {}
    parameters: dict[str, Parameter] = {}
    open_ended = False
    positional = not isinstance(found, type)
    for parameter in inspect.signature(found).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            open_ended = True
        elif positional and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            positional = False  # the first argument of a function is what it is called with, not a setting
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            required = parameter.default is inspect.Parameter.empty
            parameters[parameter.name] = Parameter(hints.get(parameter.name, Any), required)
    return Signature(target, parameters, open_ended)


def _from_source(target: str, module: str, name: str) -> Signature | None:
    """Read a function or a plain class from source; null where only an import can tell."""
    file = module_file(module)
    if file is None or file.suffix != ".py":
        return None
    body = _parse(file).body
    definitions = {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    node = definitions.get(name)
    if isinstance(node, ast.ClassDef):
        return _class_from_source(target, node, definitions)
    if node is None or node.decorator_list:
        return None
    return _arguments(target, node.args, skip_first=True)


def _class_from_source(target: str, node: ast.ClassDef, definitions: Mapping[str, ast.stmt]) -> Signature | None:
    """Null for a class with a `Config`, with bases from elsewhere (they may bring one), or without fields."""
    fields: dict[str, Parameter] = {}
    for base in (ast.unparse(base) for base in node.bases):
        parent = definitions.get(base)
        if base in ("Loss", "Protocol", "ABC", "abc.ABC"):
            continue
        inherited = _class_from_source(target, parent, definitions) if isinstance(parent, ast.ClassDef) else None
        if inherited is None:
            return None
        fields.update(inherited.parameters)
    for item in node.body:
        if isinstance(item, ast.Assign) and any(ast.unparse(name) == "Config" for name in item.targets):
            return None
        if isinstance(item, ast.FunctionDef) and item.name == "__init__" and not item.decorator_list:
            return _arguments(target, item.args, skip_first=True)
    is_dataclass = any(ast.unparse(d).split("(")[0].endswith("dataclass") for d in node.decorator_list)
    if not is_dataclass or len(node.decorator_list) > 1:
        return None
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if not ast.unparse(item.annotation).startswith(("ClassVar", "typing.ClassVar")):
            fields[item.target.id] = Parameter(_hint(item.annotation), item.value is None)
    return Signature(target, fields, open_ended=False)


def _arguments(target: str, args: ast.arguments, *, skip_first: bool) -> Signature:
    positional = [*args.posonlyargs, *args.args]
    without_default = len(positional) - len(args.defaults)
    parameters = {
        arg.arg: Parameter(_hint(arg.annotation), index < without_default)
        for index, arg in enumerate(positional)
        if not (skip_first and index == 0)
    }
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters[arg.arg] = Parameter(_hint(arg.annotation), default is None)
    return Signature(target, parameters, open_ended=args.kwarg is not None)


_NAMES: dict[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool, "None": None, "list": list, "dict": dict, "tuple": tuple,
    "Literal": Literal, "Optional": Optional, "Union": Union, "Sequence": Sequence, "Mapping": Mapping,
}  # fmt: skip


def _hint(node: ast.expr | None) -> Any:
    """The type an annotation names, or Any where it names more than plain values."""
    try:
        return _type(node)
    except (LookupError, TypeError, ValueError):
        return Any


def _type(node: ast.AST | None) -> Any:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return _type(ast.parse(node.value, mode="eval").body)
        if node.value is None or node.value is Ellipsis:
            return node.value
    if isinstance(node, ast.Name):
        return _NAMES[node.id]
    if isinstance(node, ast.Attribute):
        return _NAMES[node.attr]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[_type(node.left), _type(node.right)]  # noqa: UP007 - made at run time
    if isinstance(node, ast.Subscript):
        origin = _type(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if origin is Literal:
            return Literal[tuple(ast.literal_eval(part) for part in parts)]
        return origin[tuple(_type(part) for part in parts)] if len(parts) > 1 else origin[_type(parts[0])]
    raise LookupError(ast.dump(node) if node else "no annotation")
