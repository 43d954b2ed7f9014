"""`placement.device_groups`: devices named group by group, the second notation for what `colocate_groups` says.

::

    placement:
      device_groups:
        nproc_per_node: 4                # nodes with fewer GPUs are passed over
        sample_group: {device: GPU, ranks: [0, 1], workers: [sampler]}
        rm_group:     {device: GPU, ranks: "list(range(2, 4))", workers: [prm, orm]}
        text_group:   {device: CPU, ranks: 2, workers: [verifier]}

A group's `ranks` are numbers of GPUs, counted through the cluster node by node from 0: a list, a number (so many, after
the last one of the GPU group before it), or either as a string: "[0, 1]", "2", "list(range(a, b))", which is parsed and
never evaluated. On a CPU they are the number of processes of each worker. Each worker is a role with processes of its
own, and the workers of one group share its devices, as the roles of a colocate group do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

NPROC = "nproc_per_node"
FIELDS = ("device", "ranks", "workers")
DEFAULT = "default"
"""The worker that is the train role of a plain pt or sft run."""
T = TypeVar("T")

_DEVICES: dict[str, Literal["cuda", "cpu"]] = {"GPU": "cuda", "CPU": "cpu"}
_OTHER_DEVICES = ("NPU", "TPU", "XPU", "HPU", "MLU", "RBLN", "NEURON_CORES")
"""What Ray can hand out and nothing here can compute on."""
MOST_DEVICES = 1_000_000

Path = tuple[str | int, ...]


class Faults(Protocol):
    """Where faults of a config go, each with the key it is about: the config's `Checker`."""

    def fault(self, path: Path, text: str) -> None:
        """Report a fault."""

    def unknown(self, key: str, names: Iterable[str], path: Path) -> None:
        """Report a key that is not there."""


@dataclass(frozen=True)
class DeviceGroup:
    """One group, checked."""

    name: str
    device: Literal["cuda", "cpu"]
    devices: tuple[int, ...]
    """GPU numbers through the cluster; none on a CPU."""
    processes: int
    """Of each worker: as many as devices, or the number that a CPU group names."""
    workers: tuple[str, ...]


@dataclass(frozen=True)
class DeviceGroups:
    """All groups of a run, in the order in which they are written."""

    groups: tuple[DeviceGroup, ...]
    nproc_per_node: int | None = None
    """Least GPUs of a node whose GPUs are counted; groups on CPUs have none to count."""
    key: str = "placement.device_groups"
    """What error messages call it."""

    @classmethod
    def from_config(cls, node: Any, path: Path, faults: Faults) -> DeviceGroups | None:
        """Read the node as it is written; what is wrong goes to `faults`, and the result is null then."""
        reader = _Reader(faults, path)
        groups = reader.read(node)
        return None if groups is None else cls(groups, reader.nproc, ".".join(map(str, path)))

    def key_of(self, group: DeviceGroup) -> str:
        """What an error message calls a group."""
        return f"{self.key}.{group.name}"

    def workers(self) -> dict[str, DeviceGroup]:
        """The group of each worker."""
        return {worker: group for group in self.groups for worker in group.workers}

    def for_roles(self, roles: Iterable[str]) -> DeviceGroups:
        """The same with the worker `default` named as the role it stands for in a run of `roles`."""
        if DEFAULT not in self.workers() or set(roles) != {"train"}:
            return self
        named = [
            DeviceGroup(
                g.name, g.device, g.devices, g.processes, tuple("train" if w == DEFAULT else w for w in g.workers)
            )
            for g in self.groups
        ]
        return DeviceGroups(tuple(named), self.nproc_per_node, self.key)

    def strangers(self, roles: Sequence[str], what: str = "run") -> Iterator[str]:
        """A sentence for each worker that is no role of a run (or program), or stands for one that is named as well."""
        named = self.for_roles(roles)
        seen: dict[str, str] = {}
        for group in named.groups:
            for worker in group.workers:
                if worker in seen:
                    yield (
                        f"{self.key_of(group)} has the role `{worker}` once more, after group {seen[worker]}: "
                        f"`{DEFAULT}` is train in a plain pt or sft run"
                    )
                seen[worker] = group.name
                if worker in roles:
                    continue
                listed = ", ".join(roles)
                if worker == DEFAULT and what == "run":
                    yield (
                        f"{self.key_of(group)} names the worker `{DEFAULT}`, which stands for the train role of a "
                        f"plain pt or sft run: name the roles of this run, {listed}"
                    )
                    continue
                close = difflib.get_close_matches(worker, roles, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else f"its roles are {listed}"
                yield f"{self.key_of(group)} names the worker `{worker}`, which takes no part in this {what}; {hint}"


class _Reader:
    """Reads the node once, in order; every fault is reported with its key."""

    def __init__(self, faults: Faults, path: Path) -> None:
        self.faults = faults
        self.path = path
        self.is_sound = True
        self.nproc: int | None = None
        self._group_of_device: dict[int, str] = {}
        self._group_of_worker: dict[str, str] = {}
        self._last = -1
        """The last GPU of the GPU group before."""

    def read(self, node: Any) -> tuple[DeviceGroup, ...] | None:
        if not isinstance(node, Mapping):
            self._fault((), f"{node!r} must be a node with a key for each group")
            return None
        if NPROC in node:
            self.nproc = self._count(node[NPROC], (NPROC,), "the least GPUs of a node, a number from 1 on")
        groups = [self._group(str(name), group) for name, group in node.items() if name != NPROC]
        if not groups:
            self._fault((), "names no group: add one, as in sample_group: {device: GPU, ranks: 1, workers: [sampler]}")
        return tuple(group for group in groups if group) if self.is_sound else None

    def _fault(self, path: Path, text: str) -> None:
        self.is_sound = False
        self.faults.fault((*self.path, *path), text)

    def _count(self, value: Any, path: Path, what: str) -> int | None:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self._fault(path, f"{value!r} must be {what}")
        return None

    def _group(self, name: str, node: Any) -> DeviceGroup | None:
        if not isinstance(node, Mapping):
            near = difflib.get_close_matches(name, [NPROC], n=1, cutoff=0.6)
            hint = f"; did you mean {NPROC}?" if near else ""
            self._fault((name,), f"{node!r} must be a node with {', '.join(FIELDS)}{hint}")
            return None
        for key in node:
            if key not in FIELDS:
                self.faults.unknown(str(key), FIELDS, (*self.path, name))
                self.is_sound = False
        for key in FIELDS:
            if key not in node:
                self._fault((name, key), f"is missing: a group has {', '.join(FIELDS)}")
        workers = self._workers(name, node["workers"]) if "workers" in node else None
        device = self._device(name, node["device"]) if "device" in node else None
        if "ranks" not in node or device is None:
            return None
        found = self._cpu_ranks(name, node["ranks"]) if device == "cpu" else self._gpu_ranks(name, node["ranks"])
        if found is None or workers is None:
            return None
        devices = () if isinstance(found, int) else found
        return DeviceGroup(name, device, devices, found if isinstance(found, int) else len(found), workers)

    def _workers(self, name: str, value: Any) -> tuple[str, ...] | None:
        if not isinstance(value, list | tuple) or not all(isinstance(worker, str) for worker in value):
            self._fault((name, "workers"), f"{value!r} must be a list of names, as in [sampler]")
            return None
        if not value:
            self._fault((name, "workers"), f"group {name} is empty: name the roles that run on its devices")
            return None
        for worker in value:
            if where := _taken(self._group_of_worker, worker, name):
                self._fault((name, "workers"), f"`{worker}` is {where}: a worker is in one group, once")
        return tuple(value)

    def _device(self, name: str, value: Any) -> Literal["cuda", "cpu"] | None:
        shown = str(value).upper()
        if isinstance(value, str) and shown in _DEVICES:
            return _DEVICES[shown]
        if shown in _OTHER_DEVICES:
            text = f"{value} is a device that Ray can hand out and nothing here computes on: use GPU or CPU"
        else:
            text = f"{value!r} is no device: use GPU or CPU"
        self._fault((name, "device"), text)
        return None

    def _cpu_ranks(self, name: str, value: Any) -> int | None:
        number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        return self._count(number, (name, "ranks"), "the number of processes of each worker on a CPU, from 1 on")

    def _gpu_ranks(self, name: str, value: Any) -> tuple[int, ...] | None:
        try:
            parsed = parse_ranks(value)
        except ValueError as error:
            self._fault((name, "ranks"), str(error))
            return None
        devices = tuple(range(self._last + 1, self._last + 1 + parsed)) if isinstance(parsed, int) else parsed
        for device in devices:
            if where := _taken(self._group_of_device, device, name):
                self._fault((name, "ranks"), f"device {device} is {where}: a device is in one group, once")
        self._last = max(devices)
        return devices


def _taken(group_of: dict[T, str], item: T, name: str) -> str | None:
    """Enter an item into group `name`; in words where it is already, null where it is in none."""
    if item in group_of:
        return "twice in this group" if group_of[item] == name else f"in group {group_of[item]} already"
    group_of[item] = name
    return None


def parse_ranks(value: Any) -> int | tuple[int, ...]:
    """The `ranks` of a GPU group: how many devices, or which; ValueError says what to write.

    >>> parse_ranks("list(range(2, 4))"), parse_ranks("[0,1]"), parse_ranks("2"), parse_ranks([3])
    ((2, 3), (0, 1), 2, (3,))
    """
    forms = 'a number of devices (2), a list of them ([0, 1]), or "list(range(0, 2))"'
    found: int | tuple[int, ...]
    if isinstance(value, str):
        found = _parse_text(value, forms)
    elif isinstance(value, list | tuple):
        if any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise ValueError(f"{list(value)!r} must be a list of device numbers, as in [0, 1]")
        found = tuple(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        found = value
    else:
        raise ValueError(f"{value!r} must be {forms}")
    if isinstance(found, int) and found < 1:
        raise ValueError(f"{value!r} names no device: a number of devices is 1 or more, and a list of one is [{found}]")
    if isinstance(found, int) and found > MOST_DEVICES:
        raise ValueError(f"{value!r} names {found} devices: more than any cluster has")
    if isinstance(found, tuple) and not found:
        raise ValueError(f"{value!r} names no device: write {forms}")
    if isinstance(found, tuple) and min(found) < 0:
        raise ValueError(f"{value!r} has a device below 0: devices count from 0, node by node")
    return found


def _parse_text(text: str, forms: str) -> int | tuple[int, ...]:
    bare = re.sub(r"\s+", "", text)
    if re.fullmatch(r"-?\d+", bare):
        return int(bare)
    if re.fullmatch(r"\[(-?\d+(,-?\d+)*,?)?\]", bare):
        return tuple(int(part) for part in bare.strip("[]").split(",") if part)
    if match := re.fullmatch(r"list\(range\((?:(-?\d+),)?(-?\d+)\)\)", bare):
        start, stop = int(match[1] or 0), int(match[2])
        if stop - start > MOST_DEVICES:
            raise ValueError(f"{text!r} names {stop - start} devices: more than any cluster has")
        return tuple(range(start, stop))
    raise ValueError(f"{text!r} must be {forms}: it is parsed, not evaluated")
