"""Roles and their endpoints: the class a user writes, and the types its handle has on the driver.

A role is a plain class whose endpoints are plain methods. On the driver a *handle* of the same type stands for all
actors of the role; the same endpoint read from a handle is awaitable::

    class Scorer(Role):
        @endpoint(dispatch="slice", collect="flatten")
        def score(self, rows: list[int]) -> list[float]:
            return [row / 2 for row in rows]

    scores = await scorer.score([1, 2, 3])     # `scorer` is a handle: list[float]
    scores = scorer.score.sync([1, 2, 3])      # the same without an event loop

Inside a role, `Scorer.score(self, rows)` runs the plain method (an endpoint of its own or of its base class).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, cast, overload

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
R = TypeVar("R", bound="Role")
H = TypeVar("H")

Lane = Literal["main", "control"]
DispatchFn = Callable[..., Any]
"""`f(n, i, *args, **kwargs)` returns actor i's `(args, kwargs)`, or its only argument."""
Dispatch = Literal["all", "slice", "dp", "queue"] | DispatchFn


@dataclass(frozen=True)
class Mesh:
    """The parallel sizes of a role and one rank's coordinates in them.

    Ranks are numbered in Megatron's default order: tp fastest, then cp, dp, and pp slowest. `ep` divides dp * cp.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp_rank: int = 0
    pp_rank: int = 0
    tp_rank: int = 0
    cp_rank: int = 0

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.pp * self.tp * self.cp

    def at(self, rank: int) -> Mesh:
        """The same sizes with the coordinates of `rank`."""
        rest, tp_rank = divmod(rank, self.tp)
        rest, cp_rank = divmod(rest, self.cp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return replace(self, dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank, cp_rank=cp_rank)


@dataclass(frozen=True)
class RoleContext:
    """What an actor knows about its place in the run."""

    role: str = "role"
    rank: int = 0
    world_size: int = 1
    mesh: Mesh = field(default_factory=Mesh)
    device: Literal["cpu", "cuda"] = "cpu"
    device_ids: tuple[str, ...] = ()
    """Physical devices of this actor, numbers or UUIDs; the process sees only these, numbered from 0."""
    node: str = "127.0.0.1"
    """What messages call the node: its address, with a part of its id where several nodes share that."""
    address: str = "127.0.0.1"
    """IP address of the node."""
    local_rank: int = 0
    """This rank's place among the role's ranks on its node, in the order of the ranks."""
    local_world_size: int = 1
    """The role's ranks on this node."""
    threads: int = 1
    """Threads to compute with, to be set in the thread or process where the work runs."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    seed: int = 0
    deterministic: bool = False
    run_dir: str = "."
    exp_name: str = "rolegraph"


EVAL_ROLE = "eval_"
"""How the names of roles begin that score eval sets by reward functions of these sets' own."""


def is_teacher(role: str) -> bool:
    """Whether a role of this name teaches: a run may have several, `teacher_math` beside `teacher`."""
    return family(role) == "teacher"


def is_scorer(role: str) -> bool:
    """Whether a role of this name gives rewards: `prm`, `orm`, and further outcome roles such as `orm_judge`."""
    return family(role) in ("prm", "orm")


def family(role: str) -> str:
    """What a role of this name is: `teacher` for `teacher_math`, `orm` for `orm_judge`; others are what they say."""
    return next((name for name in ("teacher", "orm") if role.startswith(f"{name}_")), role)


@dataclass(frozen=True)
class EndpointOptions:
    """How a call on the group becomes calls on its actors; see `endpoint`."""

    dispatch: Dispatch = "all"
    execute: Literal["all", "first"] = "all"
    collect: Literal["none", "flatten"] | Callable[[Sequence[Any]], Any] = "none"
    cost: str | None = None
    lane: Lane = "main"


class Calls(Protocol):
    """What stands behind a handle: a group of actors, or of one role in this process."""

    def submit(self, endpoint: Endpoint[Any, ..., Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start the call now; returns an awaitable of the collected result."""

    def submit_sync(self, endpoint: Endpoint[Any, ..., Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call and block until its collected result is there."""


class BoundEndpoint(Generic[P, H]):
    """An endpoint of a handle: call it to get an awaitable, call its `sync` to block."""

    __slots__ = ("_calls", "_endpoint")

    def __init__(self, endpoint: Endpoint[Any, ..., Any, H], calls: Calls) -> None:
        self._endpoint = endpoint
        self._calls = calls

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[H]:
        return cast(Awaitable[H], self._calls.submit(self._endpoint, args, kwargs))

    def sync(self, *args: P.args, **kwargs: P.kwargs) -> H:
        """Call and wait: for programs without an event loop."""
        return cast(H, self._calls.submit_sync(self._endpoint, args, kwargs))


class Endpoint(Generic[R, P, T, H]):
    """A method of a role that its group can be asked for.

    Calling the class's endpoint, `RoleCls.name(role, ...)`, runs the plain method. T is what the method returns, H what
    the handle's awaitable gives.
    """

    def __init__(self, fn: Callable[Concatenate[R, P], T], options: EndpointOptions) -> None:
        self.fn = fn
        self.options = options
        self.name = fn.__name__
        self.overrides: Endpoint[Any, ..., Any, Any] | None = None
        functools.update_wrapper(cast(Any, self), fn)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @property
    def annotation(self) -> Any:
        """The annotated result of the method, or of the one it overrides where it has none itself."""
        if "return" in self.fn.__annotations__ or self.overrides is None:
            return self.fn.__annotations__.get("return")
        return self.overrides.annotation

    @overload
    def __get__(self, obj: None, owner: type) -> Self: ...
    @overload
    def __get__(self, obj: R, owner: type) -> BoundEndpoint[P, H]: ...
    def __get__(self, obj: R | None, owner: type) -> Any:
        if obj is None:
            return self
        calls = obj.__dict__.get("_calls")
        # A role object without a group behind it is the role itself, in its actor: there the method is a method.
        return functools.partial(self.fn, obj) if calls is None else BoundEndpoint(self, calls)

    def __call__(self, role: R, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.fn(role, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<endpoint {self.name} {self.options}>"


@overload
def endpoint(
    *, execute: Literal["first"], lane: Lane = "main"
) -> Callable[[Callable[Concatenate[R, P], T]], Endpoint[R, P, T, T]]: ...
@overload
def endpoint(
    *, collect: Literal["flatten"], dispatch: Dispatch = "all", cost: str | None = None, lane: Lane = "main"
) -> Callable[[Callable[Concatenate[R, P], T]], Endpoint[R, P, T, T]]: ...
@overload
def endpoint(
    *, collect: Literal["none"], dispatch: Dispatch = "all", cost: str | None = None, lane: Lane = "main"
) -> Callable[[Callable[Concatenate[R, P], T]], Endpoint[R, P, T, list[T]]]: ...
@overload
def endpoint(
    *, collect: Callable[[Sequence[T]], U], dispatch: Dispatch = "all", cost: str | None = None, lane: Lane = "main"
) -> Callable[[Callable[Concatenate[R, P], T]], Endpoint[R, P, T, U]]: ...
@overload
def endpoint(
    *, dispatch: Literal["dp", "queue"], cost: str | None = None, lane: Lane = "main"
) -> Callable[[Callable[Concatenate[R, P], T]], Endpoint[R, P, T, T]]: ...
@overload
def endpoint(
    *, dispatch: Literal["all", "slice"] | DispatchFn = "all", lane: Lane = "main"
) -> Callable[[Callable[Concatenate[R, P], T]], Endpoint[R, P, T, list[T]]]: ...
def endpoint(
    *,
    dispatch: Dispatch = "all",
    execute: Literal["all", "first"] = "all",
    collect: Any = None,
    cost: str | None = None,
    lane: Lane = "main",
) -> Any:
    """Declare how a call on the group becomes calls on its actors.

    dispatch: `all` gives every actor the same arguments. `slice` cuts `Batch` and list arguments into contiguous parts
        whose sizes differ by at most one and replicates the rest; actors without items are not called. `dp` cuts over
        the data-parallel axis of the mesh, peers get the same part, balanced by the `cost` column where one is named;
        every rank is called, for ranks meet in collectives. `queue` lets replicas pull rows as they have room. A
        callable `f(n, i, *args, **kwargs)` returns actor i's `(args, kwargs)`, or its only argument.
    execute: `first` calls rank 0 alone with all arguments and gives its bare result.
    collect: `none` gives a list, one result an actor; `flatten` joins batches, lists and tuples in row order; a
        callable gets the list of results. `dp` and `queue` flatten unless told otherwise.
    lane: `control` endpoints run in a thread of their own and answer while the main lane computes.
    """
    if collect is None:
        collect = "flatten" if dispatch in ("dp", "queue") else "none"
    _check_options(dispatch, execute, collect, cost, lane)
    options = EndpointOptions(dispatch, execute, collect, cost, lane)

    def wrap(fn: Any) -> Any:
        return Endpoint(fn, options)

    return wrap


def _check_options(dispatch: Any, execute: Any, collect: Any, cost: str | None, lane: Any) -> None:
    """Refuse values outside the table when the class is written, not when it is called."""
    for name, value, known, free in (
        ("dispatch", dispatch, ("all", "slice", "dp", "queue"), True),
        ("execute", execute, ("all", "first"), False),
        ("collect", collect, ("none", "flatten"), True),
        ("lane", lane, ("main", "control"), False),
    ):
        if value not in known and not (free and callable(value)):
            wanted = ", ".join(known) + (" or a callable" if free else "")
            raise TypeError(f"endpoint({name}={value!r}): use {wanted}")
    if cost is not None and dispatch != "dp":
        raise TypeError(f"endpoint(cost={cost!r}): a cost column balances dispatch='dp' only, not {dispatch!r}")
    if dispatch == "queue" and collect == "none":
        raise TypeError("endpoint(dispatch='queue', collect='none'): which replica served a row is chance; flatten")


class Role:
    """One instance is one Ray actor: one rank of an SPMD role, or one replica of an engine."""

    Config: ClassVar[type[Any]]
    """The dataclass of the role's config."""
    queue_in_flight: ClassVar[int] = 32
    """Calls of a `queue` endpoint that one replica works on at a time."""
    queue_rows: ClassVar[int] = 1
    """Rows of one such call."""
    queue_rows_alone: ClassVar[int] = 1
    """The same where only one replica lives, if more: there is nobody to share with, and calls cost."""
    can_be_replaced: ClassVar[bool] = True
    """Whether a new actor that knows the config alone stands in for one that died; else what it had learnt is lost."""
    environment: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Environment variables of the role's processes, beside those that every role gets; set when they are started.

    Without Ray they are set in the process that runs already, too late for what reads them as it starts.
    """

    def __init__(self, config: Any, context: RoleContext) -> None:
        self.config = config
        self.context = context

    def setup(self) -> None:
        """Load models and start engines; runs once, in the main lane, before any endpoint."""

    def teardown(self) -> None:
        """Free what `setup` made; runs once when the graph stops."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a plain method that overrides an endpoint be one, with the options of the base."""
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            base = next((vars(c)[name] for c in cls.__mro__[1:] if name in vars(c)), None)
            if not isinstance(base, Endpoint):
                continue
            if not isinstance(value, Endpoint):
                if not callable(value):
                    raise TypeError(f"{cls.__name__}.{name} overrides an endpoint with {value!r}, not with a method")
                value = Endpoint(value, base.options)
                value.__set_name__(cls, name)
                setattr(cls, name, value)
            value.overrides = base


def make_handle(role_class: type[R], calls: Calls) -> R:
    """A handle of type `role_class`: its endpoints go to `calls`. No `__init__` runs and no attribute is set."""
    handle = object.__new__(role_class)
    handle.__dict__["_calls"] = calls
    return handle


def endpoints(role_class: type[Role]) -> dict[str, Endpoint[Any, ..., Any, Any]]:
    """Every endpoint of a role class by name, overrides resolved."""
    found = {name: getattr(role_class, name) for name in dir(role_class) if not name.startswith("__")}
    return {name: value for name, value in found.items() if isinstance(value, Endpoint)}
