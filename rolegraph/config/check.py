"""Filling a composed tree with the defaults of its dataclasses, and checking it against their types.

Nothing is raised at the first fault: all are collected, each with the full key it is about.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from rolegraph.config.provenance import Path_, join
from rolegraph.config.targets import Signature, TargetError, hints_of, signature_of

TARGET = "_target_"


@dataclass(frozen=True)
class Problem:
    """One fault and the key it is about; an empty path when it is about the whole."""

    path: Path_
    text: str


class Unresolved:
    """Stands for a value whose interpolation failed; its fault is reported already."""


UNRESOLVED = Unresolved()


def plain(value: Any) -> Any:
    """A default as YAML would state it: dataclasses as mappings, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


def fill(node: Any, config: type) -> Any:
    """`node` with the defaults of `config` for the keys it does not state, nested dataclasses too."""
    if not isinstance(node, Mapping):
        return node
    filled = dict(node)
    parameters = hints_of(config)
    for field in dataclasses.fields(config):
        if field.name not in parameters:
            continue
        nested = _dataclass_in(parameters[field.name].hint)
        if field.name not in filled:
            if field.default is not dataclasses.MISSING:
                filled[field.name] = plain(field.default)
            elif field.default_factory is not dataclasses.MISSING:
                filled[field.name] = plain(field.default_factory())
        elif nested is not None and not _is_target_pair(nested):
            filled[field.name] = fill(filled[field.name], nested)
    return filled


def fill_target(node: Any) -> Any:
    """`node` with the defaults of its target's typed config, where it has one."""
    if not isinstance(node, Mapping) or not isinstance(node.get(TARGET), str):
        return node
    try:
        config = signature_of(node[TARGET]).config
    except TargetError:
        return node  # reported by the check
    return fill(node, config) if config else node


def resolve(node: Any, problems: list[Problem], path: Path_ = ()) -> Any:
    """Plain containers with all interpolations resolved; what cannot be is reported."""
    if isinstance(node, DictConfig):
        return {str(key): _item(node, key, problems, (*path, str(key))) for key in node}
    if isinstance(node, ListConfig):
        return [_item(node, index, problems, (*path, index)) for index in range(len(node))]
    return node


def _item(node: Any, key: Any, problems: list[Problem], path: Path_) -> Any:
    try:
        value = node._get_node(key)
        value = "???" if value is not None and value._is_missing() else node[key]
    except OmegaConfBaseException as error:
        problems.append(Problem(path, str(error).splitlines()[0]))
        return UNRESOLVED
    return resolve(value, problems, path)


class Checker:
    """Turns plain values into typed ones; faults gather in `problems`."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        # Faults that leave a value out; an unknown key does not, so the rules can still be checked.
        self._wrong = 0

    def fault(self, path: Path_, text: str) -> None:
        """Report one fault."""
        self.problems.append(Problem(path, text))
        self._wrong += 1

    def target(self, node: Mapping[str, Any], path: Path_) -> tuple[str, Any] | None:
        """A node with `_target_`: its import path, and its config (or keyword arguments); null when it is faulty."""
        before = self._wrong
        name = node[TARGET]
        if not isinstance(name, str):
            self.fault((*path, TARGET), f"{name!r} is no import path: write it as package.module.Name")
            return None
        try:
            signature = signature_of(name)
        except TargetError as error:
            self.fault((*path, TARGET), str(error))
            return None
        values = {key: value for key, value in node.items() if key != TARGET}
        if signature.config is not None:
            config = self.dataclass(values, signature.config, path)
            return None if self._wrong > before else (name, config)
        kwargs = self._arguments(values, signature, path)
        return None if self._wrong > before else (name, kwargs)

    def _arguments(self, values: Mapping[str, Any], signature: Signature, path: Path_) -> dict[str, Any]:
        kwargs = {}
        for key, value in values.items():
            if key in signature.parameters:
                kwargs[key] = self.value(value, signature.parameters[key].hint, (*path, key))
            elif signature.open_ended:
                kwargs[key] = self.value(value, Any, (*path, key))
            else:
                self.unknown(key, signature.parameters, path, f"of {signature.target}")
        self._missing(values, signature.parameters, path)
        return kwargs

    def dataclass(self, node: Any, config: type, path: Path_, skip: Iterable[str] = ()) -> Any:
        """An instance of `config`, or null when some value is faulty."""
        if node is UNRESOLVED:
            self._wrong += 1
            return None
        if not isinstance(node, Mapping):
            self.fault(path, f"{_show(node)} must be a node with keys: {', '.join(hints_of(config))}")
            return None
        before = self._wrong
        parameters = hints_of(config)
        values = {}
        for key, value in node.items():
            if key in skip:
                continue
            if key in parameters:
                values[key] = self.value(value, parameters[key].hint, (*path, key), own=hasattr(config, "problems"))
            else:
                self.unknown(key, [*parameters, *skip], path)
        self._missing(node, parameters, path)
        if self._wrong > before:
            return None
        try:
            made = config(**values)
        except (TypeError, ValueError) as error:
            self.fault(path, str(error))
            return None
        if hasattr(made, "problems"):
            node = getattr(config, "node", None)
            self.problems += [Problem((), _named(text, node, join(path))) for text in made.problems()]
        return made

    def unknown(self, key: str, names: Iterable[str], path: Path_, where: str = "") -> None:
        """Report a key that is not there, with the nearest that is."""
        names = [name for name in names if name != TARGET]
        close = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
        owner = where or (f"of {join(path)}" if path else "at the top level")
        hint = f"did you mean {join((*path, close[0]))}?" if close else f"the keys {owner} are {', '.join(names)}"
        text = f"unknown key; {hint}" if names else f"unknown key; {owner.removeprefix('of ')} takes no keys"
        self.problems.append(Problem((*path, key), text))

    def _missing(self, node: Mapping[str, Any], parameters: Mapping[str, Any], path: Path_) -> None:
        for key, parameter in parameters.items():
            if parameter.required and key not in node:
                self.fault((*path, key), f"is missing: set {join((*path, key))}=...")

    def value(self, value: Any, hint: Any, path: Path_, *, own: bool = False) -> Any:
        """One value of type `hint`. `own`: its dataclass checks free-form nodes with a `_target_` by itself."""
        if value is UNRESOLVED:
            self._wrong += 1
            return None
        if value == "???" and isinstance(value, str):
            return self.fault(path, f"must be given: set {join(path)}=...")
        if looks := _looks_like(value, hint):
            return self.fault(path, looks)
        if (reader := _reader_in(hint)) is not None:
            return None if value is None and _admits_null(hint) else reader.from_config(value, path, self)
        config = _dataclass_in(hint)
        if config is not None and isinstance(value, str) and str in _members(hint):
            return value  # a path, where a node would do as well
        if config is not None and (isinstance(value, Mapping) or not _admits_null(hint) or value is not None):
            return self._nested(value, config, path)
        inner = _inner(hint)
        if inner is not None and _dataclass_in(inner) is not None:
            if isinstance(value, list):
                return [self.value(item, inner, (*path, index), own=own) for index, item in enumerate(value)]
            if isinstance(value, Mapping):
                return {key: self.value(item, inner, (*path, str(key)), own=own) for key, item in value.items()}
        self._free(value, path, own=own)
        return self._leaf(value, hint, path)

    def _nested(self, value: Any, config: type, path: Path_) -> Any:
        if not _is_target_pair(config):
            return self.dataclass(value, config, path)
        if isinstance(value, str):
            value = {TARGET: value}
        if not isinstance(value, Mapping) or TARGET not in value:
            return self.fault(path, f"{_show(value)} must name a class or a function: set {join((*path, TARGET))}=...")
        found = self.target(value, path)
        if found is None:
            return None
        name, given = found
        if not isinstance(given, Mapping):  # a typed config: back to the keys that were stated
            given = {key: getattr(given, key) for key in value if key != TARGET and hasattr(given, key)}
        return config(name, given)

    def _free(self, value: Any, path: Path_, *, own: bool) -> None:
        """Check what a field without a type of its own holds: nodes with a `_target_`, strings that mean null."""
        if isinstance(value, Mapping) and TARGET in value and not own:
            self.target(value, path)
        elif isinstance(value, Mapping | list):
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                where = (*path, key if isinstance(key, int) else str(key))
                if item == "None":
                    self.fault(where, "'None' is a string: type null for no value")
                self._free(item, where, own=own)

    def _leaf(self, value: Any, hint: Any, path: Path_) -> Any:
        if hint is Any:
            return value
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            return self.fault(path, f"{value!r} is no plain value")
        try:
            return _adapter(_Key(hint)).validate_json(text, strict=True)
        except ValidationError as error:
            self.fault(path, _explain(value, hint, error, path))
            return None


def _named(text: str, node: str | None, where: str) -> str:
    """A sentence about the keys of `node`, which stands elsewhere in this config."""
    if node is None or node == where:
        return text
    return re.sub(rf"(?<![\w.]){re.escape(node)}(?=\.\w)", lambda _: where, text)


class _Key:
    """A type as a cache key, by what it says: Literal[1] equals Literal[True], and some types are not hashable."""

    def __init__(self, hint: Any) -> None:
        self.hint = hint

    def __hash__(self) -> int:
        return hash(repr(self.hint))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and repr(self.hint) == repr(other.hint)


@lru_cache(maxsize=512)
def _adapter(key: _Key) -> TypeAdapter[Any]:
    return TypeAdapter(key.hint)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    if typing.get_origin(hint) is Annotated:
        return _members(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in _members(part))
    return (hint,)


def _admits_null(hint: Any) -> bool:
    return any(member in (None, type(None), Any) for member in _members(hint))


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass whose fields are the keys of a node of this type."""
    found = (m for m in _members(hint) if isinstance(m, type) and dataclasses.is_dataclass(m))
    return next((m for m in found if not hasattr(m, "from_config")), None)


def _reader_in(hint: Any) -> Any:
    """The class that reads a node of this type by itself: `from_config(node, path, checker)`."""
    return next((m for m in _members(hint) if isinstance(m, type) and hasattr(m, "from_config")), None)


def _is_target_pair(config: type) -> bool:
    """Whether a dataclass is an import path and its arguments (a LossSpec), stated in YAML by `_target_`."""
    return [field.name for field in dataclasses.fields(config)] == ["target", "kwargs"]


def _inner(hint: Any) -> Any:
    """The element type of a list, or the value type of a mapping."""
    for member in _members(hint):
        args = [arg for arg in typing.get_args(member) if arg is not Ellipsis]
        if args and typing.get_origin(member) is not Literal:
            return args[-1]
    return None


def _looks_like(value: Any, hint: Any) -> str | None:
    """A string that was meant as null, true or false, where the type has room for those."""
    if not isinstance(value, str):
        return None
    members = _members(hint)
    if any(typing.get_origin(m) is Literal and value in typing.get_args(m) for m in members):
        return None
    if _admits_null(hint) and hint is not Any and value.lower() in ("none", "null", "nil", "~"):
        return f"{value!r} is a string: type null for no value"
    switches = {"on": "true", "yes": "true", "true": "true", "off": "false", "no": "false", "false": "false"}
    if bool in members and value.lower() in switches:
        return f"{value!r} is a string: type {switches[value.lower()]}"
    if _admits_null(hint) and str not in members and hint is not Any and value.lower() in ("off", "no", "false", ""):
        return f"{value!r} is a string: type null for no value"
    return None


def _show(value: Any) -> str:
    kinds = {str: "a string", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a node"}
    if value is None:
        return "null"
    return f"{json.dumps(value, default=str, ensure_ascii=False)} ({kinds.get(type(value), type(value).__name__)})"


def describe(hint: Any) -> str:
    """A type in words."""
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    words = []
    for member in _members(hint):
        origin = typing.get_origin(member)
        if origin is Literal:
            words.append("one of " + ", ".join("null" if a is None else str(a) for a in typing.get_args(member)))
        elif member in names:
            words.append(names[member])
        elif origin in (list, tuple, Sequence) or (isinstance(origin, type) and issubclass(origin, Sequence)):
            words.append(f"a list of {describe(_inner(member)).removeprefix('a ').removeprefix('an ')} values")
        elif origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
            words.append("a node with keys of its own")
        else:
            words.append(getattr(member, "__name__", str(member)))
    return " or ".join(dict.fromkeys(words))


def _explain(value: Any, hint: Any, error: ValidationError, path: Path_) -> str:
    """What is wrong with a value and what to type instead."""
    constraint = next((e for e in error.errors() if e["type"].startswith(("greater", "less", "multiple"))), None)
    if constraint is not None:
        return f"{value!r}: {constraint['msg'].replace('Input s', 's')}"
    text = f"{_show(value)} must be {describe(hint)}"
    members = _members(hint)
    if str in members and isinstance(value, int | float | bool):
        shown = json.dumps(value)
        return f"{text}: put quotes inside quotes, as in '{join(path)}=\"{shown}\"'"
    literal = [str(a) for m in members if typing.get_origin(m) is Literal for a in typing.get_args(m)]
    if isinstance(value, str) and literal and (close := difflib.get_close_matches(value, literal, n=1, cutoff=0.5)):
        return f"{text}; did you mean {close[0]}?"
    if isinstance(value, str) and not literal and (float in members or int in members):
        return f"{text}: type it without quotes or unit" if value[:1].isdigit() else text
    return text
