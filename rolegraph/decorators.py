"""`worker` and `function`: a plain class whose methods run in the actors of named groups.

::

    @worker(group=["sampler", "scorer"])
    class BestOf:
        def __init__(self, args):
            self._load_sampler(args.model)          # runs in the actors of `sampler`, and nowhere else
            self._load_scorer(args.reward)

        @function(group="sampler")
        def _load_sampler(self, model): ...

        @function(group="sampler", dispatch="slice", collect="flatten")
        def sample(self, prompts): ...

        @function(group="scorer", dispatch="slice", collect="flatten")
        def score(self, answers): ...

        def run(self):                              # the driver's loop: plain, blocking calls
            return self.score(self.sample(self.prompts))

    with initialize(device_groups={"g": {"device": "CPU", "ranks": 2, "workers": ["sampler", "scorer"]}}):
        BestOf(args).run()

Constructing the class runs `__init__` on the driver and in every actor. While it runs, a call to a function of a group
is made in that group's own actors and passed over everywhere else, where it gives None. Afterwards a call on the driver
goes to the group and blocks until its result is there; in an actor the functions of its own group are plain methods and
those of others an error. What is no `@function` is a plain method wherever it is called.
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, cast, overload

from rolegraph.errors import RoleGraphError
from rolegraph.host import RoleSpec
from rolegraph.role import DispatchFn, Endpoint, EndpointOptions, Role, endpoints
from rolegraph.session import Session, current, declare, initialize, take_device_groups

__all__ = ["Function", "Session", "function", "initialize", "take_device_groups", "worker"]

C = TypeVar("C", bound=type)
S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
H = TypeVar("H")

Dispatch = Literal["all", "slice"] | DispatchFn
_GROUPS = "_rolegraph_groups"
"""Of a decorated class: its groups."""
_PLACE = "_rolegraph_place"
"""Of an object of one: where it is."""


@dataclass
class Place:
    """Where an object of a decorated class is: on the driver, or in an actor of one group."""

    group: str | None
    """Null on the driver."""
    is_constructing: bool = True
    calls: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """On the driver, once constructed: each function's call on its group."""


class Function(Generic[S, P, T, H]):
    """A method that the actors of a group run.

    T is what the method returns, H what its call on the driver gives.
    """

    def __init__(self, fn: Callable[Concatenate[S, P], T], group: str, options: EndpointOptions) -> None:
        self.fn = fn
        self.group = group
        self.options = options
        self.name = fn.__name__
        functools.update_wrapper(cast(Any, self), fn)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, obj: None, owner: type) -> Self: ...
    @overload
    def __get__(self, obj: S, owner: type) -> Callable[P, H]: ...
    def __get__(self, obj: S | None, owner: type) -> Any:
        if obj is None:
            return self
        place: Place | None = obj.__dict__.get(_PLACE)
        if place is None:
            raise RoleGraphError(
                f"{owner.__name__}.{self.name}() is a function of group {self.group}, and {owner.__name__} is not "
                f'decorated: put @worker(group="{self.group}") on the class'
            )
        if place.group == self.group:
            return functools.partial(self.fn, obj)
        if place.is_constructing:
            return _passed_over
        if place.group is None:
            return place.calls[self.name]
        raise RoleGraphError(
            f"{owner.__name__}.{self.name}() is a function of group {self.group}, called in an actor of group "
            f"{place.group}: only the driver calls other groups"
        )

    def __call__(self, obj: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.fn(obj, *args, **kwargs)


def _passed_over(*_: Any, **__: Any) -> None:
    """A call to another group's function during construction."""


@overload
def function(
    group: str, *, execute: Literal["first"], dispatch: Dispatch = "all", collect: Literal["none", "flatten"] = "none"
) -> Callable[[Callable[Concatenate[S, P], T]], Function[S, P, T, T]]: ...
@overload
def function(
    group: str, *, collect: Literal["flatten"], dispatch: Dispatch = "all", execute: Literal["all"] = "all"
) -> Callable[[Callable[Concatenate[S, P], T]], Function[S, P, T, T]]: ...
@overload
def function(
    group: str, *, collect: Callable[[Sequence[T]], U], dispatch: Dispatch = "all", execute: Literal["all"] = "all"
) -> Callable[[Callable[Concatenate[S, P], T]], Function[S, P, T, U]]: ...
@overload
def function(
    group: str, *, dispatch: Dispatch = "all", execute: Literal["all"] = "all", collect: Literal["none"] = "none"
) -> Callable[[Callable[Concatenate[S, P], T]], Function[S, P, T, list[T]]]: ...
def function(
    group: str,
    *,
    dispatch: Dispatch = "all",
    execute: Literal["all", "first"] = "all",
    collect: Any = "none",
) -> Any:
    """Declare that the actors of `group` run a method.

    dispatch: `all` gives every actor the same arguments. `slice` cuts `Batch` and list arguments into contiguous parts
        whose sizes differ by at most one and replicates everything else (tuples, dicts, arrays); actors without items
        are not called. A callable `f(n, i, *args, **kwargs)` returns actor i's `(args, kwargs)`, or its only argument.
    execute: `first` calls rank 0 alone with all arguments and gives its bare result.
    collect: `none` gives a list, one result an actor; `flatten` joins batches, lists and tuples in row order; a
        callable gets the list of results.
    """
    if not isinstance(group, str) or not group:
        raise TypeError(f'function(group={group!r}): name one group, as in @function(group="model1")')
    for name, value, known, free in (
        ("dispatch", dispatch, ("all", "slice"), True),
        ("execute", execute, ("all", "first"), False),
        ("collect", collect, ("none", "flatten"), True),
    ):
        if value not in known and not (free and callable(value)):
            raise TypeError(f"function({name}={value!r}): use {', '.join(known)}{' or a callable' if free else ''}")
    options = EndpointOptions(dispatch, execute, collect)

    def wrap(fn: Any) -> Any:
        return Function(fn, group, options)

    return wrap


def worker(group: str | Sequence[str]) -> Callable[[C], C]:
    """Let a class have functions in these groups, which `device_groups` lists as workers.

    Raises TypeError where the class has a function of another group, or none of one of these. A subclass is decorated
    too; a method there that overrides a function is one, of the same group and options.
    """
    groups = (group,) if isinstance(group, str) else tuple(group)
    if not groups or not all(isinstance(name, str) and name for name in groups) or len(set(groups)) < len(groups):
        raise TypeError(
            f'worker(group={group!r}): name its groups, each once, as in @worker(group=["model1", "model2"])'
        )

    def decorate(cls: C) -> C:
        _lift_overrides(cls)
        _check(cls, groups)
        declare(groups)
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            if _PLACE in self.__dict__:  # in an actor, or by a subclass that is under construction
                init(self, *args, **kwargs)
            else:
                _construct(self, init, args, kwargs)

        setattr(cls, _GROUPS, groups)
        cls.__init__ = construct  # type: ignore[misc]
        return cls

    return decorate


def functions_of(cls: type) -> dict[str, Function[Any, ..., Any, Any]]:
    """The functions of a class by name, those of its bases too."""
    found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return {name: value for name, value in found.items() if isinstance(value, Function)}


def _lift_overrides(cls: type) -> None:
    """Make a plain method that overrides a function one itself."""
    for name, value in list(vars(cls).items()):
        base = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
        if isinstance(base, Function) and not isinstance(value, Function):
            if not callable(value):
                raise TypeError(f"{cls.__name__}.{name} overrides a function with {value!r}, not with a method")
            lifted: Function[Any, ..., Any, Any] = Function(value, base.group, base.options)
            lifted.name = name
            setattr(cls, name, lifted)


def _check(cls: type, groups: Sequence[str]) -> None:
    functions = functions_of(cls)
    for name, found in functions.items():
        if found.group not in groups:
            close = difflib.get_close_matches(found.group, groups, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"add it, or use one of {', '.join(groups)}"
            raise TypeError(
                f"{cls.__name__}.{name} is a function of group {found.group!r}, which @worker lacks: {hint}"
            )
        if hasattr(Role, name) and not name.startswith("__"):
            raise TypeError(
                f"{cls.__name__}.{name}: actors have a `{name}` of their own; give the function another name"
            )
    if idle := [name for name in groups if name not in {found.group for found in functions.values()}]:
        raise TypeError(f"{cls.__name__} has no function of group {idle[0]!r}: add @function(group={idle[0]!r})")


def _construct(self: Any, init: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Construct on the driver, then start the actors, which construct in their turn."""
    cls = type(self)
    groups: tuple[str, ...] = getattr(cls, _GROUPS)
    if _GROUPS not in vars(cls):
        raise RoleGraphError(
            f"{cls.__name__} is a subclass of a decorated class and not decorated itself: put "
            f"@worker(group={list(groups)}) on it"
        )
    session = current(cls.__name__)
    session.claim(cls.__name__, groups)
    try:
        # Before the driver's own construction, which may change them.
        arguments = [session.frozen(cls.__name__, args, kwargs) for _ in groups]
        place = Place(group=None)
        self.__dict__[_PLACE] = place
        init(self, *args, **kwargs)
        made = {group: Construction(cls, given) for group, given in zip(groups, arguments, strict=True)}
        running = session.launch({group: RoleSpec(_role_class(cls, group), config) for group, config in made.items()})
    except BaseException:
        session.disclaim(groups)
        raise
    place.calls = {
        name: functools.partial(session.call, group, found)
        for group, actors in running.items()
        for name, found in endpoints(actors.role_class).items()
    }
    place.is_constructing = False


@dataclass(frozen=True)
class Construction:
    """How a group's actors make their objects."""

    worker_class: type
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


class GroupRole(Role):
    """The actor of one group of a decorated class: makes an object of it, and runs the group's functions on that."""

    config: Construction

    def setup(self) -> None:
        """Construct the object, with the calls of this group alone."""
        made = self.config
        args, kwargs = made.arguments()
        self.worker = made.worker_class.__new__(made.worker_class, *args, **kwargs)
        place = Place(self.context.role)
        self.worker.__dict__[_PLACE] = place
        self.worker.__init__(*args, **kwargs)
        place.is_constructing = False


def _role_class(worker_class: type, group: str) -> type[GroupRole]:
    """The role of a group: its endpoints are the group's functions."""
    members: dict[str, Any] = {
        name: Endpoint(_forward(worker_class, name), found.options)
        for name, found in functions_of(worker_class).items()
        if found.group == group
    }
    return type(worker_class.__name__, (GroupRole,), members)


def _forward(worker_class: type, name: str) -> Callable[..., Any]:
    """A role's method that runs the function of its object.

    The function is looked up in the actor: pickled here, it would take copies of its module's globals along.
    """

    def forward(role: GroupRole, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(role.worker), name)(role.worker, *args, **kwargs)

    fn = getattr(worker_class, name).fn
    forward.__name__ = name
    forward.__annotations__ = {}
    annotation = getattr(fn, "__annotations__", {}).get("return")
    if annotation is not None:
        try:
            annotation = typing.get_type_hints(fn)["return"]
        except Exception:  # a name that only type checkers see
            annotation = str(annotation)
        forward.__annotations__ = {"return": annotation}
    return forward
