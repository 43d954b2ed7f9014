"""From a name or an import path to a callable, and from its signature to the columns it wants.

This imports users' modules; `lookup` is what checks a config without.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from rolegraph.rewards import lookup

F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Wants:
    """What a reward function takes, from its signature."""

    required: tuple[str, ...]
    """Columns it cannot do without."""
    optional: tuple[str, ...]
    """Columns it takes where the rows have them."""
    everything: bool
    """It has `**columns`: every other column is passed too."""
    is_async: bool

    def select(self, available: Iterable[str]) -> list[str]:
        """The columns to pass, of those available."""
        names = {*self.required, *self.optional}
        return [name for name in available if self.everything or name in names]

    def missing(self, available: Iterable[str]) -> list[str]:
        """Required columns that are not available."""
        return [name for name in self.required if name not in set(available)]


@overload
def reward(name: F) -> F: ...
@overload
def reward(name: str | None = None) -> Callable[[F], F]: ...
def reward(name: str | F | None = None) -> F | Callable[[F], F]:
    """Decorator that makes a function of a plugin known to `reward_funcs` by a name (its own unless given).

    Example:
        @reward("brevity")
        def brevity(completions, *, response_ids, per_token=0.01, **columns):
            return [-per_token * len(ids) for ids in response_ids]
    """
    if callable(name):
        return _register(name.__name__, name)
    return lambda function: _register(name or function.__name__, function)


def _register(name: str, function: F) -> F:
    taken = lookup.builtin().get(name) or _registered.get(name)
    # A plugin imported again (under another module name, or reloaded) replaces its own function.
    if taken is not None and taken.__qualname__ != function.__qualname__:
        raise ValueError(f"a reward function is already called {name!r} ({taken.__module__}): choose another name")
    _registered[name] = function
    return function


def resolve(target: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The callable behind a name or import path, its settings bound; a class is instantiated with them.

    Raises LookupError for an unknown name and TypeError for settings that the signature does not take.
    """
    known = {**_registered, **lookup.builtin()}
    if target in known:
        found = known[target]
    else:
        found = _imported(target, known)
    if inspect.isclass(found):
        instance: Any = found(**kwargs)
        if not callable(instance):
            raise TypeError(f"{target} is a class whose objects cannot be called: give it a __call__")
        return instance
    parameters = inspect.signature(found).parameters.values()
    names = {p.name for p in list(parameters)[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in kwargs:
            if key not in names:
                raise TypeError(f"{target} has no setting {key!r}; {lookup.nearest(key, names)}")
    return functools.partial(found, **kwargs) if kwargs else found


def _imported(target: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    module, _, attribute = target.rpartition(".")
    if not module:
        raise LookupError(f"no reward function is called {target!r}; {lookup.nearest(target, known)}")
    namespace = vars(importlib.import_module(module))
    found: Callable[..., Any] | None = namespace.get(attribute)
    if found is not None and callable(found):
        return found
    functions = [name for name, value in namespace.items() if inspect.isfunction(value)]
    raise LookupError(f"module {module} has no function {attribute!r}; {lookup.nearest(attribute, functions)}")


def wants(function: Callable[..., Any]) -> Wants:
    """Read the signature of a resolved function.

    Its first parameter takes the completions. A parameter without a default is a column the rows must have; one with a
    default is filled from the rows where they have a column of that name (those of built-in functions never are).
    """
    bound = function.keywords if isinstance(function, functools.partial) else {}
    plain = function.func if isinstance(function, functools.partial) else function
    own = any(plain is known for known in lookup.builtin().values())
    parameters = list(inspect.signature(plain).parameters.values())
    if not parameters or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        raise TypeError(f"{_called(plain)} must take the completions (a list of strings) as its first argument")
    named = [p for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in bound]
    call = plain if inspect.isfunction(plain) else type(plain).__call__
    return Wants(
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=() if own else tuple(p.name for p in named if p.default is not p.empty),
        everything=any(p.kind is p.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(call),
    )


def _called(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
