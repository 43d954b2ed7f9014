"""The wire between a trainer and the engines: frames of packed tensors over a process group of their own.

The sender is rank 0. A frame is a header (kind, bytes of description, bytes of data), the description, and the data. A
bucket's description lists its tensors, so the receiver checks what arrives instead of trusting that both sides cut the
stream alike; a sender that fails says so in a frame, and a receiver that fails closes its link, so that nobody waits
for a time-out to learn of it.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rolegraph.errors import WeightSyncError
from rolegraph.interfaces import TensorInfo, TransferGroup

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Spec = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and byte offset of one tensor in its bucket."""

_END, _BUCKET, _FAULT = 0, 1, 2
_ALIGN = 64


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int, device: str = "cpu"
) -> Iterator[tuple[list[Spec], torch.Tensor]]:
    """Cut a stream of tensors into buckets of about `bucket_bytes`: their specs, and one flat uint8 tensor.

    The flat tensor is valid until the next one is asked for. A tensor larger than a bucket is one of its own.
    """
    import torch

    bucket_bytes = _padded(max(bucket_bytes, 1))
    buffer = torch.empty(0, dtype=torch.uint8, device=device)
    specs: list[Spec] = []
    used = 0
    for name, tensor in tensors:
        tensor = tensor.detach()
        size = tensor.numel() * tensor.element_size()
        if specs and used + size > bucket_bytes:
            yield specs, buffer[:used]
            specs, used = [], 0
        info = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if not specs and size >= bucket_bytes and tensor.is_contiguous() and tensor.device.type == device:
            yield [(*info, 0)], tensor.reshape(-1).view(torch.uint8)
            continue
        if buffer.numel() < used + size:  # only at the start of a bucket: a filled one was sent above
            buffer = torch.empty(max(bucket_bytes, _padded(size)), dtype=torch.uint8, device=device)
        buffer[used : used + size].view(tensor.dtype).copy_(tensor.reshape(-1))
        specs.append((*info, used))
        used += _padded(size)
    if specs:
        yield specs, buffer[:used]


def _padded(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN


def unpack(specs: Iterable[Spec], flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as views of it."""
    import torch

    for name, dtype_name, shape, offset in specs:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        yield name, flat[offset : offset + size].view(dtype).view(shape)


class Link:
    """One process's membership of a transfer group: broadcasts from rank 0, each with a time-out.

    Raises WeightSyncError when a peer is gone or silent for `group.timeout_s`; the link is then of no further use.
    """

    def __init__(self, group: TransferGroup, rank: int, device: str = "cpu") -> None:
        self.group = group
        self.rank = rank
        self.device = device if group.backend == "nccl" else "cpu"
        """Where headers and descriptions must be."""
        self.data_device = "cpu" if group.backend == "gloo" else device
        """Where buckets must be."""
        self._timeout = timedelta(seconds=group.timeout_s)
        self._pg: Any = None
        self._store: Any = None
        try:
            self._pg = self._join()
            if group.backend != "nccl":  # which connects at its first collective
                self._finish(self._pg.barrier())  # gloo's first rank may be ready before the others are
        except Exception as error:
            self.close()
            raise WeightSyncError(
                f"rank {rank} of {group.world_size} could not join the transfer group at {group.host}:{group.port} "
                f"within {group.timeout_s:g} s: {error}"
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send `tensor` from rank 0 into `tensor` of every other rank."""
        from torch.distributed import BroadcastOptions

        if self._pg is None:
            raise WeightSyncError("the transfer group is closed; connect again")
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            self._finish(self._pg.broadcast([tensor], options))
        except Exception as error:
            self.close()
            peers = "the trainer" if self.rank else "an engine"
            raise WeightSyncError(
                f"{peers} left the weight transfer, or was silent for {self.group.timeout_s:g} s: {error}"
            ) from error

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._pg is None:
            raise WeightSyncError("the transfer group is closed; connect again")
        try:
            self._finish(self._pg.barrier())
        except Exception as error:
            self.close()
            raise WeightSyncError(f"a rank left the weight transfer: {error}") from error

    def close(self) -> None:
        """Leave; the peers' pending collectives fail at once."""
        group, self._pg, self._store = self._pg, None, None
        if group is None:
            return
        # abort drops NCCL's connections without waiting for a stuck kernel; gloo closes its sockets when collected.
        try:
            group.abort()
        except Exception:
            log.debug("a transfer group could not be aborted", exc_info=True)
        del group

    def _join(self) -> Any:
        from torch import distributed

        dist: Any = distributed  # the stubs lack half of what is used here

        group = self.group
        self._store = dist.TCPStore(
            group.host, group.port, group.world_size, self.rank == 0, self._timeout, wait_for_workers=False
        )
        store = dist.PrefixStore("weights", self._store)
        if group.backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            return ProcessGroupNCCL(store, self.rank, group.world_size, nccl)
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [gloo.create_device(hostname=_address_towards(group.host, group.port))]
        return gloo(store, self.rank, group.world_size, options)

    def _finish(self, work: Any) -> None:
        if self.group.backend == "nccl":
            # NCCL's own wait returns before the transfer is done, and its watchdog would end the process.
            deadline = time.monotonic() + self.group.timeout_s
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise TimeoutError("no progress on the device")
                time.sleep(0.0005)
        work.wait(self._timeout)


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`: its own name may resolve to another interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def free_port() -> int:
    """A port nobody listens on, for the sender's rendezvous."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


class WeightSender:
    """The trainer's end: made on its rank 0, once a transfer group.

    >>> sender = WeightSender(group)                       # doctest: +SKIP
    >>> sender.send(bridge.export(), bucket_bytes=2**27)   # doctest: +SKIP
    """

    def __init__(self, group: TransferGroup, device: str = "cpu") -> None:
        """Join as rank 0, waiting for every receiver; `device` is where nccl finds its buffers."""
        self._link = Link(group, 0, device)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> int:
        """Broadcast a whole set of weights; returns bytes.

        A fault of the iterator reaches the receivers as such and is raised again here. After any fault the link is
        closed.
        """
        sent = 0
        buckets = pack(tensors, bucket_bytes, self._link.data_device)
        try:
            while True:
                try:
                    bucket = next(buckets, None)
                except Exception as error:
                    self._frame(_FAULT, f"{type(error).__name__}: {error}")
                    raise
                if bucket is None:
                    break
                specs, flat = bucket
                self._frame(_BUCKET, specs, flat)
                sent += flat.numel()
            self._frame(_END, [])
        except BaseException:
            self.close()
            raise
        return sent

    def close(self) -> None:
        """Leave the group."""
        self._link.close()

    def _frame(self, kind: int, description: object, data: torch.Tensor | None = None) -> None:
        import torch

        link = self._link
        if data is not None and link.group.backend == "ipc":
            description = {"specs": description, "handle": _export_handle(data)}
        text = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
        header = torch.tensor([kind, text.numel(), 0 if data is None else data.numel()], dtype=torch.int64)
        link.broadcast(header.to(link.device))
        link.broadcast(text.to(link.device))
        if data is None:
            return
        if link.group.backend == "ipc":
            link.barrier()  # the receivers have copied the bucket, so its memory may change
        else:
            link.broadcast(data)


class WeightReceiver:
    """An engine worker's end."""

    def __init__(self, group: TransferGroup, rank: int, device: str = "cpu") -> None:
        """Join as `rank` (from 1 on), waiting for all others."""
        self._link = Link(group, rank, device)
        self._pool = _BufferPool(self._link.data_device)

    def receive(self, manifest: Sequence[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as they arrive; a tensor stays valid while it is referenced.

        Raises WeightSyncError naming the tensor that is unknown, misshapen or missing, or the sender's fault. The
        caller closes the receiver when it stops before the end.
        """
        expected = {info.name: info for info in manifest}
        while (bucket := self._bucket()) is not None:
            specs, flat = bucket
            for spec in specs:
                _check(spec, expected.pop(spec[0], None))
            yield from unpack(specs, flat)
            del flat
        if expected:
            names = ", ".join(list(expected)[:5])
            raise WeightSyncError(f"the trainer did not send {len(expected)} of {len(manifest)} weights: {names}")

    def close(self) -> None:
        """Leave the group."""
        self._link.close()

    def _bucket(self) -> tuple[list[Spec], torch.Tensor] | None:
        import torch

        link = self._link
        header = torch.zeros(3, dtype=torch.int64, device=link.device)
        link.broadcast(header)
        kind, text_bytes, data_bytes = (int(value) for value in header.tolist())
        text = torch.empty(text_bytes, dtype=torch.uint8, device=link.device)
        link.broadcast(text)
        description = json.loads(bytes(text.cpu().numpy().tobytes()))
        if kind == _FAULT:
            raise WeightSyncError(f"the trainer failed while it gathered its weights: {description}")
        if kind == _END:
            return None
        flat = self._pool.take(data_bytes)
        if link.group.backend == "ipc":
            flat.copy_(_import_handle(description["handle"]))
            torch.cuda.synchronize()
            link.barrier()
            description = description["specs"]
        else:
            link.broadcast(flat)
        return [(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in description], flat


def _check(spec: Spec, info: TensorInfo | None) -> None:
    name, dtype, shape, _ = spec
    if info is None:
        raise WeightSyncError(f"the trainer sent the weight {name}, which it had not announced or has sent before")
    if shape != tuple(info.shape) or dtype != info.dtype:
        raise WeightSyncError(
            f"the trainer sent {name} as {dtype} {list(shape)}, but had announced {info.dtype} {list(info.shape)}"
        )


class _BufferPool:
    """Host buffers for buckets, used again once nothing refers to them: a page's first touch costs more than the copy.

    An engine may keep a received tensor until the rest of its layer has arrived, so a buffer cannot simply be
    overwritten by the next bucket. Device memory comes from torch's own pool.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._arrays: list[Any] = []

    def take(self, size: int) -> torch.Tensor:
        import numpy as np
        import torch

        if self._device != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        for i in range(len(self._arrays)):
            # Two references: the list's, and getrefcount's argument. A tensor over the array holds another.
            if sys.getrefcount(self._arrays[i]) == 2 and self._arrays[i].size >= size:
                return torch.from_numpy(self._arrays[i])[:size]
        self._arrays = [array for array in self._arrays if sys.getrefcount(array) > 3][-4:]
        self._arrays.append(np.empty(size, dtype=np.uint8))
        return torch.from_numpy(self._arrays[-1])


def _export_handle(data: torch.Tensor) -> dict[str, Any]:
    """What another process on this machine needs to open `data` (CUDA), as JSON."""
    import base64
    import pickle

    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(data)
    torch.cuda.synchronize(data.device)
    uuid = str(torch.cuda.get_device_properties(data.device).uuid)
    return {"device": uuid, "arguments": base64.b64encode(pickle.dumps(arguments)).decode()}


def _import_handle(handle: dict[str, Any]) -> torch.Tensor:
    import base64
    import pickle

    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if handle["device"] not in visible:
        raise WeightSyncError(
            f"the trainer's device {handle['device']} is not among the engine's ({', '.join(visible)}): "
            "ipc is for roles that share a device; use nccl or gloo"
        )
    arguments = list(pickle.loads(base64.b64decode(handle["arguments"])))
    arguments[6] = visible.index(handle["device"])  # the device's number differs between the processes
    tensor: torch.Tensor = rebuild_cuda_tensor(*arguments)
    return tensor
