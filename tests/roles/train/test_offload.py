"""Offloading, made to move on a CPU: memory goes, contents come back bit for bit, and training does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph.errors import TurnError
from roles.train import offload as offloading
from roles.train.offload import Offload, Shelf
from tests.roles.train.megatron_workers import NLL, make_batch

pytestmark = pytest.mark.engine

Start = Callable[..., Any]


# ----- storages -----


@pytest.mark.parametrize("block", [7, 1000, 2**28])
def test_contents_come_back_bit_for_bit_under_all_views(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(offloading, "BLOCK_BYTES", block)
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8))  # with NaNs of all kinds
    whole = bits.clone().view(torch.float32)
    other = torch.arange(10.0)
    view, parameter = whole[5:50].view(9, 5), torch.nn.Parameter(whole[50:60])
    shelf = Shelf(pinned=False)
    for _ in range(2):
        assert shelf.put([whole.untyped_storage(), other.untyped_storage()]) == 3040
        assert view.untyped_storage().nbytes() == parameter.untyped_storage().nbytes() == 0
        assert shelf.take() == 3040
        assert torch.equal(whole.view(torch.uint8), bits)
        assert torch.equal(view.reshape(-1).view(torch.uint8), bits[20:200])
        assert torch.equal(other, torch.arange(10.0))
        whole.view(torch.uint8)[0] += 1
        bits[0] += 1
    assert parameter.data_ptr() == whole.data_ptr() + 200
    assert shelf.take() == 0


def test_what_is_not_kept_comes_back_as_zeros() -> None:
    tensor, shelf = torch.ones(100), Shelf(pinned=False)
    assert shelf.put([tensor.untyped_storage()], keep=False) == 400
    assert tensor.untyped_storage().nbytes() == 0
    assert shelf._blocks == {}
    shelf.take()
    assert torch.equal(tensor, torch.zeros(100))


def test_host_memory_is_taken_once() -> None:
    tensor, shelf = torch.ones(100), Shelf(pinned=False)
    pointers = set()
    for value in (1.0, 2.0):
        tensor.fill_(value)
        shelf.put([tensor.untyped_storage()])
        pointers.add(next(iter(shelf._blocks.values()))[0].data_ptr())
        shelf.take()
        assert torch.equal(tensor, torch.full((100,), value))
    assert len(pointers) == 1


def test_what_found_no_memory_comes_back_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    whole = [each.detach().clone() for each in layers.parameters()]
    held = Offload(SimpleNamespace(device=torch.device("cpu"), model=layers), moves=True)  # type: ignore[arg-type]

    def fails(times: int) -> Callable[[Any], Any]:
        flat, left = offloading._flat, iter(range(times, 0, -1))

        def once(storage: Any) -> Any:
            if next(left, 0) == 1:
                raise torch.OutOfMemoryError
            return flat(storage)

        return once

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(offloading, "_flat", fails(2))
        held.give(model=True, optimizer=False)
    held.need("model")  # is still there
    assert held.give(model=True, optimizer=False) == 2 * 64 * 64 * 4
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(offloading, "_flat", fails(2))
        held.take(model=True, optimizer=False)
    with pytest.raises(TurnError, match="model is offloaded"):
        held.need("model")
    held.take(model=True, optimizer=False)
    held.need("model")
    assert all(torch.equal(a, b) for a, b in zip(whole, layers.parameters(), strict=True))


# ----- the role -----


def moving(role: Any) -> Any:
    """The same role, moving its storages although it is on a CPU."""
    role._offload = Offload(role._policy, moves=True)
    return role


def bytes_held(tensors: Iterator[torch.Tensor]) -> int:
    """Of storages that offloading minds."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(size for size in sizes.values() if size >= offloading.SMALL_BYTES)


def history(role: Any, away: Callable[[Any], None]) -> dict[str, Any]:
    """A little training, with `away` wherever others might have their turn; all that can be seen of it."""
    seen: dict[str, Any] = {"metrics": []}
    for seed in range(3):
        away(role)
        role.onload(True, False)
        scored = role.logprobs(make_batch(6, seed), entropy=True)
        scored = role.logprobs(make_batch(6, seed).merge(scored), reference=True)
        role.onload(False, True)
        metrics = role.step(make_batch(6, seed), loss=NLL)
        metrics.pop("seconds")
        seen["metrics"].append(metrics)
        seen[f"ref {seed}"] = scored.table
        if seed == 1:
            role.save_reference()
    away(role)
    role.onload(True, False)
    seen["weights"] = {name: tensor.clone() for name, tensor in role._export.tensors()}
    role.onload(False, True)
    seen["moments"] = [
        value.clone()
        for part in role._policy.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
    ]
    return seen


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"use_distributed_optimizer": False},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "use_distributed_optimizer": False},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["fp32", "fp32-plain", "bf16", "bf16-plain"])
def test_training_with_turns_is_training_without(start: Start, layout: dict[str, Any]) -> None:
    plain = history(start(reference="initial", **layout), lambda role: None)
    freed: list[int] = []

    def away(role: Any) -> None:
        policy = role._policy
        held = sum(
            bytes_held(tensors)
            for tensors in (
                offloading._weights(policy),
                (buffer.grad_data for buffer in offloading._buffers(policy)),
            )
        )
        freed.append(role._offload.give(model=True, optimizer=True))
        assert freed[-1] >= held > 0 or len(freed) == 1
        for tensors in (offloading._weights(policy), offloading._optimizer_state(policy)):
            assert bytes_held(tensors) == 0
        assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in offloading._buffers(policy))

    turns = history(moving(start(reference="initial", **layout)), away)
    assert len(freed) == 4
    assert turns["metrics"] == plain["metrics"]
    for seed in range(3):
        assert turns[f"ref {seed}"].equals(plain[f"ref {seed}"])
    assert turns["weights"].keys() == plain["weights"].keys()
    assert all(torch.equal(turns["weights"][name], tensor) for name, tensor in plain["weights"].items())
    assert all(torch.equal(a, b) for a, b in zip(turns["moments"], plain["moments"], strict=True))


def test_the_optimizer_leaves_alone_and_takes_the_gradients_along(start: Start) -> None:
    role = moving(start())
    role.step(make_batch(6, 0), loss=NLL)
    policy = role._policy
    weights = bytes_held(offloading._weights(policy))
    role.offload(False, True)
    assert bytes_held(offloading._weights(policy)) == weights
    assert bytes_held(offloading._optimizer_state(policy)) == bytes_held(
        part for part in offloading._weights(policy)
    ), "fp32 main weights are the model's own; moments are gone"
    assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in offloading._buffers(policy))
    role.logprobs(make_batch(6, 1))
    role.onload(False, True)
    role.step(make_batch(6, 1), loss=NLL)


@pytest.mark.parametrize("moves", [True, False])
def test_what_is_away_is_refused_also_where_nothing_moves(start: Start, moves: bool, tmp_path: Any) -> None:
    role = start(reference="initial")
    if moves:
        moving(role)
    role.offload(True, True)
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: role.step(make_batch(6, 0), loss=NLL),
        "logprobs": lambda: role.logprobs(make_batch(6, 0)),
        "reference": lambda: role.logprobs(make_batch(6, 0), reference=True),
        "reset": role.reset_optimizer,
        "save": role.save_reference,
        "export": lambda: role.export_hf(str(tmp_path)),
        "send": lambda: role.send_weights(1000),
    }
    for name, call in calls.items():
        part = "optimizer" if name == "reset" else "model"
        with pytest.raises(
            TurnError, match=rf"the trainer's {part} is offloaded: call onload\({part}=True.*self\.turn"
        ):
            call()
    role.onload(True, False)
    role.logprobs(make_batch(6, 0))
    with pytest.raises(TurnError, match="optimizer is offloaded"):
        role.step(make_batch(6, 0), loss=NLL)
    role.onload(True, True)
    role.offload(False, False)
    role.step(make_batch(6, 0), loss=NLL)


def test_a_cpu_says_once_that_nothing_moves(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    role = start()
    with caplog.at_level("INFO", logger="roles.train.offload"):
        for _ in range(3):
            role.offload(True, True)
            role.onload(True, True)
    # By the logger: other libraries log here too wherever an earlier test has let them.
    assert [record.message for record in caplog.records if record.name == "roles.train.offload"] == [
        "offloading moves nothing on a CPU, where host memory is all there is"
    ]
