"""A role's Ray actor. Imported at run time only: it needs Ray."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rolegraph.host import Host, RoleSpec, end_children, forward_sys_path, free_port, tail, torch_env
from rolegraph.member import Place
from rolegraph.parcel import local_path, unpack
from rolegraph.role import Endpoint, Role, RoleContext, endpoints
from rolegraph.transit import Payload, decode_arguments, encode_result


@dataclass(frozen=True)
class Launch:
    """All that an actor needs to become a rank of its role.

    Class and config come pickled by themselves: unpickling them imports the user's code, and that must see the
    environment and the import path first.
    """

    spec: bytes
    context: RoleContext
    env: dict[str, str]
    sys_path: list[str]
    log_file: str | None = None
    code: ray.ObjectRef[Any] | None = None
    """Folders of the user's code (`parcel.Folder`), where ranks run on nodes that may lack them."""


class RoleHost:
    """Runs one role object in three lanes, each a Ray concurrency group: main (one thread), queue, control."""

    def __init__(self, launch: Launch) -> None:
        if launch.log_file is not None:
            _log_to(Path(launch.log_file))
        # Ray hides all GPUs from actors that reserve none; here the placement group's bundle has reserved them.
        os.environ.update(launch.env)
        if launch.code is not None:
            unpack(ray.get(launch.code))
        forward_sys_path([local_path(path) for path in launch.sys_path])
        self._launch = launch
        self._host = Host(launch.context)
        self._with_heavy: dict[str, bool] = {}

    @ray.method(concurrency_group="control")
    def locate(self) -> Place:
        """Where this actor came to be."""
        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port())

    @ray.method(concurrency_group="main")
    def start(self, context: RoleContext) -> float:
        """Import the role, build it and set it up; returns seconds."""
        self._host.context = context
        os.environ.update(torch_env(context))
        return self._host.start(self._make)

    def _make(self) -> Role:
        spec: RoleSpec = pickle.loads(self._launch.spec)
        return spec.role_class(spec.config, self._host.context)

    @ray.method(concurrency_group="main")
    def main(self, payload: Payload, *objects: Any) -> Any:
        """Run an endpoint in the main lane: one at a time, in the order of the calls."""
        return self._run(payload, objects)

    @ray.method(concurrency_group="queue")
    def queue(self, payload: Payload, *objects: Any) -> Any:
        """Run a `queue` endpoint, several at a time."""
        return self._run(payload, objects)

    @ray.method(concurrency_group="control")
    def control(self, payload: Payload, *objects: Any) -> Any:
        """Run an endpoint that must answer while the main lane computes."""
        return self._run(payload, objects)

    @ray.method(concurrency_group="control")
    def metrics(self) -> dict[str, Any]:
        """Memory, and what runs now; see `Host.metrics`."""
        return self._host.metrics()

    @ray.method(concurrency_group="control")
    def where(self) -> tuple[str, str]:
        """The stack of what runs now, and the end of this process's log."""
        return self._host.stack(), tail(self._launch.log_file)

    @ray.method(concurrency_group="main")
    def stop(self) -> None:
        """Tear the role down."""
        self._host.stop()

    @ray.method(concurrency_group="control")
    def end_children(self) -> None:
        """Kill all child processes at once; the actor itself is killed next, and would leave them behind."""
        end_children()

    def _run(self, payload: Payload, objects: tuple[Any, ...]) -> Any:
        name = payload[0]
        with self._host.guard(name):
            args, kwargs = decode_arguments(payload, objects)
            result = self._host.run(name, args, kwargs)
            return encode_result(result) if self._returns_batch(name) else result

    def _returns_batch(self, name: str) -> bool:
        if name not in self._with_heavy:
            from rolegraph.dispatch import returns_batch

            found = getattr(type(self._host.role), name)
            self._with_heavy[name] = isinstance(found, Endpoint) and returns_batch(found)
        return self._with_heavy[name]


def actor_class(role_class: type[Role]) -> Any:
    """The Ray actor class of a role: `RoleHost` under the role's name, which dashboard and process list show."""
    has_queue = any(found.options.dispatch == "queue" for found in endpoints(role_class).values())
    lanes = {"main": 1, "queue": role_class.queue_in_flight if has_queue else 1, "control": 2}
    named = type(role_class.__name__, (RoleHost,), {})
    return ray.remote(concurrency_groups=lanes)(named)


def _log_to(path: Path) -> None:
    """Send this process's output, its children's too, to a file of the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
