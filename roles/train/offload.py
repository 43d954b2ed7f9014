"""Giving a trainer's device memory to the roles that share it, and taking it back bit for bit.

What moves is a tensor's storage: Megatron holds weights, gradients and their buckets as views of a few large buffers,
and all views stay valid while the storage under them is shrunk to nothing and grown again, which is also how
megatron-core's own `offload_grad_buffers` works. Its optimizer's `offload_to_cpu` replaces the tensors instead, and
would part fp32 weights, which are views of the parameter buffer, from the model.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, UntypedStorage

from rolegraph.errors import TurnError

if TYPE_CHECKING:
    from roles.train.model import Model, Policy

_log = logging.getLogger(__name__)

BLOCK_BYTES = 2**28
"""Host memory is taken in blocks: torch rounds pinned memory up to a power of two, which would double large buffers."""
SMALL_BYTES = 4096
"""Smaller storages (step counters) stay: their bytes are not worth a copy each."""


PARTS = ("model", "gradients", "optimizer")
Held = Mapping[str, Iterable[Tensor]]
"""The tensors of each part; one that several have belongs to the first of them."""


class OnDevice(Protocol):
    """A model that has a device."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""


class _Held(NamedTuple):
    storage: UntypedStorage
    size: int
    """Bytes it had, and will have."""
    blocks: list[Tensor] | None
    """Its content; null where that is of no use any more."""


class Shelf:
    """Storages without memory, and host memory with what they held.

    >>> tensor = torch.arange(2000.0)
    >>> view, shelf = tensor[1:3], Shelf(pinned=False)
    >>> shelf.put([tensor.untyped_storage()]), tensor.untyped_storage().nbytes()
    (8000, 0)
    >>> shelf.take(), view
    (8000, tensor([1., 2.]))
    """

    def __init__(self, *, pinned: bool) -> None:
        """`pinned` host memory is what copies from and to a GPU want; it is kept for the next time."""
        self._pinned = pinned
        self._held: list[_Held] = []
        self._blocks: dict[int, list[Tensor]] = {}
        """Host memory by the storage it belongs to."""

    def put(self, storages: Iterable[UntypedStorage], *, keep: bool = True) -> int:
        """Free the storages, with `keep` after a copy of what they hold; returns bytes."""
        taken = [self._copy(storage) if keep else _Held(storage, storage.nbytes(), None) for storage in storages]
        _finish_copies()
        for held in taken:
            held.storage.resize_(0)
        self._held += taken
        return sum(held.size for held in taken)

    def take(self) -> int:
        """Give all storages their memory and content back, or zeros where that was not kept; returns bytes."""
        total = 0
        while self._held:
            storage, size, blocks = self._held[-1]
            storage.resize_(size)  # may find no memory: what is left is taken the next time
            flat = _flat(storage)
            if blocks is None:
                flat.zero_()
            else:
                for part, block in zip(flat.split(BLOCK_BYTES), blocks, strict=True):
                    part.copy_(block, non_blocking=True)
            self._held.pop()
            total += size
        _finish_copies()
        return total

    def _copy(self, storage: UntypedStorage) -> _Held:
        parts = _flat(storage).split(BLOCK_BYTES)
        blocks = self._blocks.get(storage._cdata)
        if blocks is None or [len(block) for block in blocks] != [len(part) for part in parts]:
            blocks = [torch.empty(len(part), dtype=torch.uint8, pin_memory=self._pinned) for part in parts]
            self._blocks[storage._cdata] = blocks
        for part, block in zip(parts, blocks, strict=True):
            block.copy_(part, non_blocking=True)
        return _Held(storage, storage.nbytes(), blocks)


def _flat(storage: UntypedStorage) -> Tensor:
    """[bytes] uint8 over a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _finish_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Offload:
    """What of a model is on its device; one that is not trained has neither gradients nor an optimizer.

    `moves=False` (a CPU, whose memory is where the content would go) keeps the account and moves nothing. What must
    never happen: a computation that reads a storage without memory; `need` comes before each.
    """

    def __init__(self, model: OnDevice, *, moves: bool, held: Callable[[Any], Held] | None = None) -> None:
        """`held` tells which tensors of the model each part has; null: those of a model of Megatron's."""
        self._model = model
        self._held = held or _held_by_megatron
        self._moves = moves
        self._away: set[str] = set()
        self._told = False
        pinned = model.device.type == "cuda"
        self._shelves = {part: Shelf(pinned=pinned) for part in PARTS}

    def give(self, *, model: bool, optimizer: bool) -> int:
        """Free these parts, and the gradients with either; returns bytes. What is away already stays away."""
        leaving = {"model": model, "optimizer": optimizer, "gradients": model or optimizer}
        parts = [part for part, leaves in leaving.items() if leaves and part not in self._away]
        if not self._moves:
            self._away.update(parts)
            if not self._told:
                _log.info("offloading moves nothing on a CPU, where host memory is all there is")
                self._told = True
            return 0
        found = self._storages()
        _finish_copies()  # what still computes on another stream
        freed = 0
        for part in parts:
            freed += self._shelves[part].put(found[part], keep=part != "gradients")
            self._away.add(part)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        _log.debug("gave %d bytes of %s away", freed, ", ".join(parts))
        return freed

    def take(self, *, model: bool, optimizer: bool) -> None:
        """Bring these parts back; gradients come back when a step asks for them."""
        for part, comes in (("model", model), ("optimizer", optimizer)):
            if comes:
                self._bring(part)

    def need(self, *parts: str) -> None:
        """TurnError unless these parts are on the device; `gradients` are brought there, as zeros."""
        for part in parts:
            if part == "gradients":
                self._bring(part)
            elif part in self._away:
                raise TurnError(
                    f"the trainer's {part} is offloaded: call onload({part}=True, ...) before; an algorithm does so by "
                    '`async with self.turn("train")` (or "logprobs", "sync", "export")'
                )

    def _bring(self, part: str) -> None:
        if part in self._away:
            self._shelves[part].take()
            self._away.remove(part)

    def _storages(self) -> dict[str, list[UntypedStorage]]:
        """The storages of each part that have memory, each storage once: those of weights are the model's."""
        seen, held = set[int](), self._held(self._model)
        return {part: list(_distinct(held[part], self._model.device.type, seen)) for part in PARTS}


def _distinct(tensors: Iterable[Tensor], device: str, seen: set[int]) -> Iterator[UntypedStorage]:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata in seen or storage.device.type != device or storage.nbytes() < SMALL_BYTES:
            continue
        seen.add(storage._cdata)
        yield storage


def _held_by_megatron(model: Any) -> Held:
    return {
        "model": _weights(model),
        "gradients": (buffer.grad_data for buffer in _buffers(model)),
        "optimizer": _optimizer_state(model),
    }


def _policy(model: Model) -> Policy | None:
    """The model, if it is trained."""
    return cast("Policy", model) if hasattr(model, "optimizer") else None


def _buffers(model: Model) -> Iterator[Any]:
    """What Megatron packs weights and gradients into."""
    if policy := _policy(model):
        yield from policy.runs.buffers
        yield from policy.runs.expert_parallel_buffers


def _weights(model: Model) -> Iterator[Tensor]:
    yield from (buffer.param_data for buffer in _buffers(model) if buffer.param_data is not None)
    yield from model.model.parameters()
    yield from model.model.buffers()
    if policy := _policy(model):
        yield from (policy.reference or {}).values()
        yield from (policy.average or {}).values()


def _optimizer_state(model: Model) -> Iterator[Tensor]:
    """Main weights, where the model's have less precision, and moments."""
    policy = _policy(model)
    if policy is None:
        return
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))
