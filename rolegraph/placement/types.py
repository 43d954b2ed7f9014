"""What is asked of placement and what it answers: plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge

from rolegraph.placement.device_groups import DeviceGroups
from rolegraph.placement.environment import environment_problems
from rolegraph.role import Mesh

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class PlacementConfig:
    """The `placement` node: which roles share devices, and on what kind of device they run."""

    colocate_groups: Literal["all"] | tuple[tuple[str, ...], ...] = ()
    """Lists of roles that share devices and take turns; every other role gets its own. all: one group of all roles."""
    device_groups: DeviceGroups | None = None
    """Devices by number and the roles on them, the other notation; see `rolegraph.placement.device_groups`."""
    nproc_per_node: Annotated[int, Ge(1)] | None = None
    """Least GPUs of a node that `device_groups` counts; may stand inside `device_groups` as well."""
    offload_model: bool = False
    """A trainer that shares its devices moves weights and reference weights to host memory, and drops its gradients,
    while others have their turn. On a CPU there is nothing to gain, and nothing moves."""
    offload_optimizer: bool = False
    """The same for optimizer state, which only a training step needs."""
    offload_teacher_model: bool = False
    """A teacher that shares its devices moves its weights to host memory while others have their turn."""
    offload_reward_model: bool = False
    """The same for the model of a prm or orm role; reward functions and services take no device."""
    sleep_level: int = 0
    """What an engine that shares its devices does while others have their turn. 0: keeps weights and KV cache. 1: moves
    the weights to host memory and frees the KV cache. 2: frees both; the next weight sync brings the weights back."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: GPUs where the machine has some, else CPU cores."""
    timeout_s: float = 30.0
    """Seconds to wait for the devices before giving up with the need/have table."""
    setup_timeout_s: float | None = None
    """Seconds that a role gets from the start of its processes until all are set up; null: a line a minute says what
    is still starting, and a model takes as long to load as it takes."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables of the processes of all roles: names with strings or numbers."""
    ship_code: bool = True
    """Copy folders of the user's code (--config-dir, plugins, what the program imported outside its installation) to
    nodes that do not have them; false where every node sees the same folders."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings by themselves."""
        if self.sleep_level not in (0, 1, 2):
            yield (
                f"placement.sleep_level={self.sleep_level} must be 0 (engines stay awake), 1 (weights move to host "
                "memory) or 2 (weights are dropped)"
            )
        if self.timeout_s <= 0:
            yield f"placement.timeout_s={self.timeout_s} must be more than 0 seconds"
        yield from self._notations()
        if self.setup_timeout_s is not None and self.setup_timeout_s <= 0:
            yield f"placement.setup_timeout_s={self.setup_timeout_s} must be more than 0 seconds, or null to wait"
        yield from environment_problems(self.env)
        seen: dict[str, int] = {}
        for index, group in enumerate(self.colocated):
            key = f"placement.colocate_groups[{index}]"
            if len(set(group)) < 2:
                yield f"{key}={list(group)} names fewer than two roles: roles share devices with each other"
            for role in dict.fromkeys(group):
                if role in seen:
                    yield f"{key} names role `{role}`, which is in group {seen[role]} already: one group a role"
                seen.setdefault(role, index)

    def _notations(self) -> Iterator[str]:
        """Keys of the two notations that do not go together."""
        if self.device_groups is None:
            if self.nproc_per_node is not None:
                yield "placement.nproc_per_node belongs to placement.device_groups, and there are none: remove it"
            return
        if self.colocate_groups:
            yield (
                "placement.device_groups and placement.colocate_groups are two notations for one thing: keep one "
                "(placement=separate has no colocate groups)"
            )
        if self.device != "auto":
            yield f"placement.device={self.device}, and each group of placement.device_groups says its own: remove it"
        inside = self.device_groups.nproc_per_node
        if None not in (inside, self.nproc_per_node) and inside != self.nproc_per_node:
            yield (
                f"placement.nproc_per_node={self.nproc_per_node}, and placement.device_groups.nproc_per_node={inside}: "
                "keep one"
            )

    @property
    def colocated(self) -> tuple[tuple[str, ...], ...]:
        """The colocate groups as lists of roles; none where they are `all` and the roles are not known yet."""
        return () if self.colocate_groups == "all" else self.colocate_groups

    def for_roles(self, roles: Sequence[str]) -> PlacementConfig:
        """The same with `all` as the list of `roles`; a role alone shares with nobody."""
        if self.colocate_groups != "all":
            return self
        return replace(self, colocate_groups=(tuple(roles),) if len(roles) > 1 else ())

    @property
    def named_devices(self) -> DeviceGroups | None:
        """The device groups with the least GPUs of a node, wherever that stands."""
        if self.device_groups is None or self.nproc_per_node is None:
            return self.device_groups
        return replace(self.device_groups, nproc_per_node=self.nproc_per_node)

    def sharing(self, roles: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """The roles that share devices, of a run of `roles`, in whichever notation they are given."""
        if self.device_groups is None:
            return self.colocated
        return tuple(group.workers for group in self.device_groups.for_roles(roles).groups)


@dataclass(frozen=True)
class Node:
    """One machine: its address, the ids of its GPUs, its cores, and what is known of their memory."""

    name: str
    gpus: tuple[int, ...] = ()
    cpus: float = 1.0
    gpu_name: str = ""
    """What the GPUs are called; empty where nothing told."""
    gpu_memory: int | None = None
    """Bytes of each GPU; null where nothing told."""
    memory: int | None = None
    """Bytes of the machine's own memory; null where nothing told."""


@dataclass(frozen=True)
class Inventory:
    """What there is to place roles on."""

    nodes: tuple[Node, ...]

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def cpus(self) -> float:
        """Cores of all nodes."""
        return sum(node.cpus for node in self.nodes)


@dataclass(frozen=True)
class RoleRequest:
    """What one role asks for; null numbers are derived."""

    role: str
    count: int | None = None
    """Ranks of an SPMD role, replicas of another."""
    gpus: int | None = None
    """Devices of all ranks together; 0: none, whatever the machine has."""
    cpus: float | None = None
    """Cores a rank where it runs on a CPU; 0: none of its own."""
    is_spmd: bool = True
    """One rank a device and model-parallel axes over ranks; else a replica owns all devices of its engine."""
    light: bool = False
    """Needs cores for moments only, and never a device."""
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    """Copies of the model inside one engine; the data-parallel size of an SPMD role follows from its ranks."""

    @property
    def model_parallel(self) -> int:
        """Devices of one copy of the model, or of one engine."""
        return self.tensor * self.context * self.pipeline * (1 if self.is_spmd else self.data)

    @property
    def block(self) -> int:
        """Devices (or ranks, on CPUs) that stay on one node: a tensor-parallel group, or an engine."""
        return self.tensor if self.is_spmd else self.model_parallel

    @property
    def uses_gpu(self) -> bool:
        """Whether the role takes devices on a machine that has some."""
        return self.gpus != 0

    @property
    def devices(self) -> int:
        """GPUs of all ranks together, on a machine that has some."""
        if self.gpus is not None:
            return self.gpus
        per_rank = 1 if self.is_spmd else self.model_parallel
        return self.count * per_rank if self.count else self.model_parallel

    @property
    def actors(self) -> int:
        """Ranks, or replicas."""
        if self.count:
            return self.count
        if self.gpus:
            return self.gpus if self.is_spmd else self.gpus // self.model_parallel
        return self.model_parallel if self.is_spmd else 1

    @property
    def cores(self) -> float:
        """Cores that the role names, all ranks together; 0 when it names none."""
        return (self.cpus or 0.0) * self.actors

    def mesh(self, world_size: int) -> Mesh:
        """The parallel sizes of `world_size` actors."""
        if not self.is_spmd:
            return Mesh(dp=world_size)
        data = world_size // self.model_parallel
        return Mesh(dp=data, pp=self.pipeline, tp=self.tensor, cp=self.context, ep=self.expert)

    @property
    def key(self) -> str:
        """The config key of the number of ranks."""
        return f"{self.role}.{'ranks' if self.is_spmd else 'replicas'}"

    @property
    def tensor_key(self) -> str:
        """The config key of the tensor-parallel size."""
        return f"{self.role}.{'tensor_model_parallel_size' if self.is_spmd else 'tensor_parallel_size'}"


@dataclass(frozen=True)
class Slot:
    """Where one actor runs."""

    role: str
    rank: int
    node: str
    device: Device
    device_ids: tuple[int, ...]
    """GPU ids of the node; several for an engine that spans them, none on a CPU."""
    cores: float
    """Cores of this actor and its children, while it is its group's turn."""
    threads: int
    mesh: Mesh
    """Parallel sizes and this rank's coordinates; of a replica, the other replicas are its data-parallel peers."""
    share: float = 1.0
    """Part of the memory of each of its GPUs that is this role's; see `rolegraph.placement.shares`. 1 on a CPU."""
    named_cores: float = 0.0
    """Of a rank on GPUs, the cores that its config asks for: these are reserved beside the GPUs."""


@dataclass(frozen=True)
class Plan:
    """The slots of every role, in rank order, and which roles share devices."""

    roles: Mapping[str, tuple[Slot, ...]]
    groups: tuple[tuple[str, ...], ...]
    """Every role once: colocated ones together, each other one alone."""
    device: Device

    def group_of(self, role: str) -> tuple[str, ...]:
        """The roles that share devices with `role`, itself among them."""
        return next(group for group in self.groups if role in group)

    def is_shared(self, role: str) -> bool:
        """Whether another role uses the same devices."""
        return len(self.group_of(role)) > 1
