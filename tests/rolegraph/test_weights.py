"""The wire between trainer and engines, and the driver's side of a sync; no engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rolegraph.errors import RoleError, WeightSyncError
from rolegraph.interfaces import AdapterInfo, TensorInfo, TransferGroup
from rolegraph.weights import WeightReceiver, WeightSender, WeightSync, free_port
from rolegraph.wire import pack, unpack


def group_of(ranks: int, timeout_s: float = 20.0) -> TransferGroup:
    return TransferGroup("gloo", "127.0.0.1", free_port(), ranks, {0: 1}, timeout_s)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind of tensor the wire has to carry."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(50, 8, generator=draw),
        "half": torch.randn(7, 3, generator=draw).bfloat16(),
        "scalar": torch.randn((), generator=draw),
        "odd": torch.arange(5, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "view": torch.randn(6, 10, generator=draw).t()[2:7],
        "last": torch.randn(33, generator=draw),
    }


def manifest_of(tensors: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]


def in_threads(*actions: Callable[[], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(actions)) as pool:
        return [pool.submit(action) for action in actions]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1000, 10**6])
def test_packing_returns_the_same_tensors_whatever_the_bucket(bucket_bytes: int) -> None:
    sent = weights()
    got: dict[str, torch.Tensor] = {}
    for specs, flat in pack(sent.items(), bucket_bytes):
        if len(specs) > 1:
            assert flat.numel() <= max(bucket_bytes, 64) + 64
        got |= {name: tensor.clone() for name, tensor in unpack(specs, flat)}
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def test_a_tensor_larger_than_a_bucket_is_not_copied() -> None:
    big = torch.randn(1000)
    [(specs, flat)] = list(pack([("big", big)], bucket_bytes=64))
    assert flat.data_ptr() == big.data_ptr()
    assert specs == [("big", "float32", (1000,), 0)]


def test_two_receivers_get_every_weight_and_may_keep_it() -> None:
    sent = [weights(0), weights(1)]
    group = group_of(3)

    def send() -> None:
        sender = WeightSender(group)
        for version in sent:
            sender.send(version.items(), 256)
        sender.close()

    def receive(rank: int) -> list[dict[str, torch.Tensor]]:
        receiver = WeightReceiver(group, rank)
        return [dict(receiver.receive(manifest_of(version))) for version in sent]

    _, *received = in_threads(send, lambda: receive(1), lambda: receive(2))
    for future in received:
        for got, want in zip(future.result(), sent, strict=True):
            assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda infos: [replace(infos[0], shape=(50, 9)), *infos[1:]], r"sent embed as float32 \[50, 8\].*\[50, 9\]"),
        (lambda infos: [replace(infos[0], dtype="bfloat16"), *infos[1:]], r"sent embed as float32.*bfloat16"),
        (lambda infos: infos[1:], "the weight embed, which it had not announced"),
        (lambda infos: [*infos, TensorInfo("extra", (1,), "float32")], "did not send 1 of 8 weights: extra"),
    ],
)
def test_what_was_not_announced_is_named_and_the_sender_does_not_hang(change: Any, message: str) -> None:
    sent, group = weights(), group_of(2)

    def receive() -> None:
        receiver = WeightReceiver(group, 1)
        try:
            for _ in receiver.receive(change(manifest_of(sent))):
                pass
        finally:
            receiver.close()

    def send() -> None:
        sender = WeightSender(group)
        for _ in range(3):  # after a whole set, the next one meets a closed receiver
            sender.send(sent.items(), 128)

    started = time.monotonic()
    sending, receiving = in_threads(send, receive)
    with pytest.raises(WeightSyncError, match=message):
        receiving.result()
    with pytest.raises(WeightSyncError, match="an engine left"):
        sending.result()
    assert time.monotonic() - started < 10


def test_a_fault_of_the_gather_reaches_the_receiver() -> None:
    group = group_of(2)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", torch.zeros(4)
        raise MemoryError("no room for layer 7")

    sending, receiving = in_threads(
        lambda: WeightSender(group).send(broken(), 8),
        lambda: list(WeightReceiver(group, 1).receive([TensorInfo("embed", (4,), "float32")])),
    )
    with pytest.raises(MemoryError):
        sending.result()
    with pytest.raises(WeightSyncError, match="no room for layer 7"):
        receiving.result()


def test_a_silent_sender_is_given_up_after_the_timeout() -> None:
    group = group_of(2, timeout_s=1.5)
    done = threading.Event()

    def silent() -> None:
        sender = WeightSender(group)
        done.wait(20)
        sender.close()

    def receive() -> float:
        receiver = WeightReceiver(group, 1)
        started = time.monotonic()
        try:
            with pytest.raises(WeightSyncError, match=r"the trainer left the weight transfer, or was silent for 1.5 s"):
                list(receiver.receive([]))
        finally:
            done.set()
        return time.monotonic() - started

    _, receiving = in_threads(silent, receive)
    assert receiving.result() < 10


def test_a_peer_that_never_joins_is_given_up_after_the_timeout() -> None:
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not join the transfer group .* within 1 s"):
        WeightSender(group_of(2, timeout_s=1.0))


def test_a_sender_whose_process_dies_is_noticed_at_once() -> None:
    group = group_of(2, timeout_s=60)
    code = (
        "import os, sys, torch\n"
        "from rolegraph.weights import WeightSender\nfrom rolegraph.interfaces import TransferGroup\n"
        f"sender = WeightSender({group!r})\n"
        "def tensors():\n"
        "    yield 'a', torch.zeros(64)\n"
        "    sys.stdin.read()\n"
        "    os._exit(3)\n"
        "sender.send(tensors(), 1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        receiver = WeightReceiver(group, 1)
        stream = receiver.receive([TensorInfo("a", (64,), "float32"), TensorInfo("b", (64,), "float32")])
        assert next(stream)[0] == "a"
        assert process.stdin is not None
        process.stdin.close()
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match="the trainer left"):
            next(stream)
        assert time.monotonic() - started < 20
        assert process.wait(timeout=20) == 3
    finally:
        process.kill()
        process.wait()


class FakeTrain:
    """A trainer whose endpoints run in threads, as a handle's would in actors."""

    def __init__(self) -> None:
        self.tensors = weights()
        self.sender: WeightSender | None = None
        self.fault: Exception | None = None

    async def weight_manifest(self, *, adapter: bool = False) -> list[TensorInfo]:
        return manifest_of(self.sent(adapter))

    def sent(self, adapter: bool) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if not adapter or name == "embed"}

    async def adapter_info(self) -> AdapterInfo:
        return AdapterInfo(2, 4.0, ("embed",))

    async def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", free_port()

    async def connect_weights(self, group: TransferGroup) -> None:
        self.sender = await asyncio.to_thread(WeightSender, group)

    async def send_weights(self, bucket_bytes: int, *, adapter: bool = False) -> float:
        assert self.sender is not None
        if self.fault is not None:
            raise self.fault
        await asyncio.to_thread(self.sender.send, self.sent(adapter).items(), bucket_bytes)
        return 0.0

    async def disconnect_weights(self) -> None:
        if self.sender is not None:
            self.sender.close()


class FakeRollout:
    """A group of replicas, each with `workers` engine processes."""

    def __init__(self, replicas: int, workers: int) -> None:
        self.sizes = dict.fromkeys(range(replicas), workers)
        """Workers of the living replicas."""
        self.receivers: list[WeightReceiver] = []
        self.got: list[dict[str, torch.Tensor]] = []
        self.version = 0
        self.fault: Exception | None = None
        self.dying = ""
        """When replica 1 is to die: asked or receiving."""

    def die(self, when: str) -> None:
        if self.dying == when:
            self.dying = ""
            del self.sizes[1]
            self.receivers.pop(1).close()
            raise RoleError("the actor died", role="rollout", rank=1)

    async def transfer_workers(self) -> list[tuple[int, int]]:
        self.die("asked")
        return list(self.sizes.items())

    async def connect_weights(self, group: TransferGroup) -> None:
        ranks = [group.offsets[replica] + i for replica, size in self.sizes.items() for i in range(size)]
        self.receivers = await asyncio.gather(*(asyncio.to_thread(WeightReceiver, group, rank) for rank in ranks))

    async def receive_weights(
        self, manifest: list[TensorInfo], bucket_bytes: int, version: int, *, adapter: AdapterInfo | None = None
    ) -> list[float]:
        self.adapter = adapter
        self.die("receiving")
        if self.fault is not None:
            await self.disconnect_weights()
            raise self.fault
        parts = (asyncio.to_thread(lambda r=r: dict(r.receive(manifest))) for r in self.receivers)
        self.got = await asyncio.gather(*parts)
        self.version = version
        return [0.0]

    async def disconnect_weights(self) -> None:
        for receiver in self.receivers:
            receiver.close()


async def test_a_sync_reaches_every_worker_of_every_group_and_counts_versions() -> None:
    train, rollout, teacher = FakeTrain(), FakeRollout(2, 1), FakeRollout(1, 2)
    sync = WeightSync(train, [rollout, teacher], bucket_bytes=300, timeout_s=20)  # type: ignore[arg-type, list-item]
    assert await sync.sync() > 0
    train.tensors = weights(seed=5)
    await sync.sync()
    assert sync.version == rollout.version == teacher.version == 2
    assert len(rollout.got) == len(teacher.got) == 2
    for got in [*rollout.got, *teacher.got]:
        assert all(torch.equal(got[name], tensor) for name, tensor in train.tensors.items())
    await sync.close()


async def test_an_adapter_travels_alone_where_engines_hold_the_weights() -> None:
    train, rollout = FakeTrain(), FakeRollout(1, 1)
    sync = WeightSync(train, [rollout], timeout_s=15, adapter=True)  # type: ignore[arg-type, list-item]
    await sync.sync()
    assert rollout.adapter == await train.adapter_info()
    assert list(rollout.got[0]) == ["embed"]
    await sync.close()


async def test_an_evaluation_gets_the_weights_of_now_and_counts_no_version() -> None:
    train, rollout = FakeTrain(), FakeRollout(1, 1)
    sync = WeightSync(train, [rollout], timeout_s=20)  # type: ignore[arg-type, list-item]
    await sync.sync()
    train.tensors = weights(seed=5)
    await sync.refresh()
    assert sync.version == rollout.version == 1
    assert all(torch.equal(rollout.got[0][name], tensor) for name, tensor in train.tensors.items())
    await sync.sync()
    assert sync.version == rollout.version == 2
    await sync.close()


@pytest.mark.parametrize("guilty", ["train", "rollout"])
async def test_a_failed_sync_names_the_role_and_the_next_one_recovers(guilty: str) -> None:
    train, rollout = FakeTrain(), FakeRollout(2, 1)
    sync = WeightSync(train, [rollout], timeout_s=15)  # type: ignore[arg-type, list-item]
    await sync.sync()
    role = train if guilty == "train" else rollout
    role.fault = RuntimeError("disk on fire")
    with pytest.raises(WeightSyncError, match=rf"weight sync 2 failed\n  {guilty}: disk on fire"):
        await sync.sync()
    assert sync.version == 1
    role.fault = None
    train.tensors = weights(seed=3)
    await sync.sync()
    assert sync.version == rollout.version == 2
    assert torch.equal(rollout.got[1]["embed"], train.tensors["embed"])
    await sync.close()


async def test_a_replica_that_died_is_left_out_of_the_next_sync() -> None:
    train, rollout = FakeTrain(), FakeRollout(3, 1)
    sync = WeightSync(train, [rollout], timeout_s=15)  # type: ignore[arg-type, list-item]
    await sync.sync()
    rollout.receivers.pop(1).close()
    del rollout.sizes[1]
    train.tensors = weights(seed=3)
    await sync.sync()
    assert sync.version == 2
    assert len(rollout.got) == 2
    assert all(torch.equal(got["embed"], train.tensors["embed"]) for got in rollout.got)
    await sync.close()


@pytest.mark.parametrize("when", ["asked", "receiving"])
async def test_a_replica_that_dies_during_a_sync_costs_one_more_try(when: str) -> None:
    train, rollout = FakeTrain(), FakeRollout(3, 1)
    sync = WeightSync(train, [rollout], timeout_s=15)  # type: ignore[arg-type, list-item]
    await sync.sync()
    rollout.dying = when
    train.tensors = weights(seed=3)
    await sync.sync()
    assert sync.version == rollout.version == 2
    assert list(rollout.sizes) == [0, 2]
    assert all(torch.equal(got["embed"], train.tensors["embed"]) for got in rollout.got)
    await sync.close()


async def test_a_trainer_waits_for_a_new_replica_no_longer_than_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    train, rollout = FakeTrain(), FakeRollout(1, 1)
    waits: dict[str, list[float]] = {"train": [], "rollout": []}

    def noting(role: FakeTrain | FakeRollout, name: str) -> None:
        connect = role.connect_weights

        async def connect_and_note(group: TransferGroup) -> None:
            waits[name].append(group.timeout_s)
            await connect(group)

        monkeypatch.setattr(role, "connect_weights", connect_and_note)

    noting(train, "train")
    noting(rollout, "rollout")
    monkeypatch.setattr("rolegraph.weights.group_of", lambda _: SimpleNamespace(rank=lambda rank: rollout))
    sync = WeightSync(train, [rollout], timeout_s=15)  # type: ignore[arg-type, list-item]
    await sync.sync()
    await sync.bring(rollout, 0)  # type: ignore[arg-type]
    assert waits["train"] == [15, 15], "it may die before it has joined"
    assert waits["rollout"] == [15, 3600], "the trainer may be in the middle of its steps"
    assert rollout.version == sync.version == 1


def test_importing_the_drivers_side_is_light() -> None:
    code = "import sys, rolegraph.weights; print(sorted({'torch', 'ray', 'vllm', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
