"""One actor as a group sees it: something that calls are sent to, in a Ray actor or in a thread of this process."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from rolegraph.dispatch import AnyEndpoint, returns_batch
from rolegraph.errors import RoleError
from rolegraph.host import Host, RoleSpec, tail
from rolegraph.role import RoleContext
from rolegraph.transit import decode_result, encode_arguments

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


QUICK_S = 0.05
"""Seconds in which most calls end: until then they are waited for together, then one by one."""


@dataclass(frozen=True)
class Place:
    """Where an actor came to be."""

    node_id: str
    address: str
    """IP address of the node, at which other nodes reach it."""
    port: int
    """One that was free there a moment ago."""


class Sent(Protocol):
    """A call on its way."""

    @property
    def future(self) -> Future[Any]:
        """What the call will give; `decode` makes a result of it."""

    def decode(self, value: Any) -> Any:
        """The call's result from what its future gave."""


@dataclass
class RaySent:
    """A call to a Ray actor: a reference to its result, and where that has columns one to the heavy and one to the
    streamed ones."""

    ref: ObjectRef[Any]
    columns: tuple[ObjectRef[Any], ObjectRef[Any]] | None = None

    @functools.cached_property
    def future(self) -> Future[Any]:
        """What the call will give."""
        future: Future[Any] = self.ref.future()
        return future

    def decode(self, value: Any) -> Any:
        """The call's result, its heavy columns left in the object store."""
        return value if self.columns is None else decode_result(value, *self.columns)


@dataclass(frozen=True)
class LocalSent:
    """A call to a thread of this process."""

    future: Future[Any]

    def decode(self, value: Any) -> Any:
        """The value itself."""
        return value


def block(sent: Sequence[Sent]) -> list[Any] | None:
    """Wait in this thread for calls that belong together; null as soon as one has failed.

    A program without an event loop pays no hop between threads this way.
    """
    refs = [one.ref for one in sent if isinstance(one, RaySent)]
    try:
        if len(refs) < len(sent):
            values = [one.future.result() for one in sent]
        else:
            values = _get(refs)
    except Exception:
        return None
    return [one.decode(value) for one, value in zip(sent, values, strict=True)]


def _get(refs: list[ObjectRef[Any]]) -> list[Any]:
    """All values; raises as soon as one call has failed, though those before it still run."""
    import ray
    from ray.exceptions import GetTimeoutError

    if len(refs) > 1:
        try:
            return list(ray.get(refs, timeout=QUICK_S))
        except GetTimeoutError:
            pending = refs
            while pending:
                ready, pending = ray.wait(pending, num_returns=1, fetch_local=False)
                ray.get(ready)
    return list(ray.get(refs))


class Member(Protocol):
    """One rank or replica."""

    context: RoleContext
    alive: bool
    log_file: str | None
    """Where it logs, on its node; null for a role in this process."""

    def send(self, endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sent:
        """Start a call."""

    def start(self) -> Sent:
        """Start the role's setup."""

    def stop(self) -> Sent:
        """Start the role's teardown."""

    def metrics(self) -> Sent:
        """Ask for memory and what runs now; answered while the main lane computes."""

    def where(self) -> Sent:
        """Ask for the stack of what runs and the end of the log, two texts; answered while the main lane computes."""

    def end_children(self) -> Sent:
        """Ask the member to kill its child processes."""

    def kill(self) -> None:
        """End the member at once, whatever it does."""

    def explain(self, error: BaseException, endpoint: str) -> RoleError:
        """An error of one of its calls as the driver shows it; notes when it says that the member is dead."""


class RayMember:
    """A Ray actor of `actor.RoleHost`."""

    def __init__(
        self,
        actor: ActorHandle[Any],
        context: RoleContext,
        log_file: str | None = None,
        lost_nodes: Callable[[str | None], str | None] = lambda at: None,
    ) -> None:
        self.context = context
        self.alive = True
        self.actor = actor
        self.log_file = log_file
        """On the actor's node."""
        self._lost_nodes = lost_nodes
        """Says which nodes of the run have left the cluster and who was on them, if the given one is among them."""
        self._methods: dict[AnyEndpoint, tuple[Callable[..., Any], bool]] = {}

    def send(self, endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sent:
        """Start a call: references travel as arguments of their own, so that Ray fetches what they name."""
        if endpoint not in self._methods:
            self._methods[endpoint] = self._method(endpoint)
        method, has_heavy = self._methods[endpoint]
        payload, refs = encode_arguments(endpoint.name, args, kwargs)
        out = method(payload, *refs)
        return RaySent(out[0], (out[1], out[2])) if has_heavy else RaySent(out)

    def _method(self, endpoint: AnyEndpoint) -> tuple[Callable[..., Any], bool]:
        lane = "queue" if endpoint.options.dispatch == "queue" else endpoint.options.lane
        has_heavy = returns_batch(endpoint)
        method = getattr(self.actor, lane)
        return (method.options(num_returns=3) if has_heavy else method).remote, has_heavy

    def locate(self) -> Sent:
        """Ask for the actor's `Place`."""
        return RaySent(self.actor.locate.remote())

    def settle(self, **known: Any) -> None:
        """Complete the context with what is known only once actors are placed."""
        self.context = replace(self.context, **known)

    def start(self) -> Sent:
        """Start the role's setup."""
        return RaySent(self.actor.start.remote(self.context))

    def stop(self) -> Sent:
        """Start the role's teardown."""
        return RaySent(self.actor.stop.remote())

    def metrics(self) -> Sent:
        """Ask for memory and what runs now."""
        return RaySent(self.actor.metrics.remote())

    def where(self) -> Sent:
        """Ask for the stack of what runs and the end of the log."""
        return RaySent(self.actor.where.remote())

    def end_children(self) -> Sent:
        """Ask the actor to kill its child processes."""
        return RaySent(self.actor.end_children.remote())

    def kill(self) -> None:
        """End the actor's process at once."""
        import ray

        self.alive = False
        ray.kill(self.actor)

    def explain(self, error: BaseException, endpoint: str) -> RoleError:
        """The actor's own error; or what Ray knows about its death."""
        from ray.exceptions import (
            ActorUnschedulableError,
            NodeDiedError,
            OutOfMemoryError,
            RayActorError,
            RayTaskError,
        )

        # The last ones are what Ray says of actors that it killed to save a node's memory, or that a node took along.
        deaths = (RayActorError, OutOfMemoryError, NodeDiedError, ActorUnschedulableError)
        cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
        if isinstance(cause, RoleError):
            return cause
        lost, has_died = None, isinstance(cause, deaths)
        with contextlib.suppress(Exception):  # a cluster that cannot be asked has another error to tell
            lost = self._lost_nodes(self.context.node if has_died else None)
        if isinstance(cause, deaths):
            self.alive = False
            message = f"the actor died: {lost or self._exit(cause)}"
        else:
            message = f"the call failed in Ray: {type(cause or error).__name__}: {cause or error}"
            message = f"{lost}; {message}" if lost else message
        context = self.context
        return RoleError(
            message, at=time.time(), role=context.role, rank=context.rank, node=context.node, endpoint=endpoint
        )

    def _exit(self, error: Exception) -> str:
        return "\n".join(part for part in (_exit_detail(error), tail(self.log_file)) if part)


def _exit_detail(error: Exception) -> str:
    """What Ray says about an actor's end, in one paragraph."""
    lines = [line.strip() for line in str(error).splitlines()]
    keep = [line for line in lines if line and not line.startswith(("class_name:", "actor_id:", "namespace:"))]
    return " ".join(keep)


def _known(value: Any) -> LocalSent:
    done: Future[Any] = Future()
    done.set_result(value)
    return LocalSent(done)


class LocalMember:
    """A role in this process: its main lane is one thread, its control lane another."""

    def __init__(self, spec: RoleSpec, context: RoleContext) -> None:
        self.context = context
        self.alive = True
        self.log_file: str | None = None
        self._spec = spec
        self._host = Host(context)
        self._lanes = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=f"{context.role}-{lane}") for lane in ("main", "control")
        }

    def send(self, endpoint: AnyEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sent:
        """Start a call in its lane's thread."""
        return LocalSent(self._lanes[endpoint.options.lane].submit(self._run, endpoint.name, args, kwargs))

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._host.guard(name):
            return self._host.run(name, args, kwargs)

    def start(self) -> Sent:
        """Start the role's setup."""
        spec, context = self._spec, self.context
        return LocalSent(self._lanes["main"].submit(self._host.start, lambda: spec.role_class(spec.config, context)))

    def stop(self) -> Sent:
        """Start the role's teardown."""
        return LocalSent(self._lanes["main"].submit(self._host.stop))

    def metrics(self) -> Sent:
        """Ask for memory and what runs now."""
        return LocalSent(self._lanes["control"].submit(self._host.metrics))

    def where(self) -> Sent:
        """The stack of what runs; what it prints is the driver's output."""
        return _known((self._host.stack(), ""))

    def end_children(self) -> Sent:
        """Nothing to do: the process is the driver's."""
        return _known(None)

    def kill(self) -> None:
        """Take no more calls; a thread that computes cannot be ended."""
        self.alive = False
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)

    def explain(self, error: BaseException, endpoint: str) -> RoleError:
        """The role's own error."""
        if isinstance(error, RoleError):
            return error
        return RoleError(repr(error), at=time.time(), role=self.context.role, rank=0, endpoint=endpoint)
