"""What the optimizer holds of each parameter, whole and in the parameter's shape, whatever ranks hold of it.

Megatron's distributed optimizer cuts a buffer of all parameters into equal parts, one a data-parallel rank; a parameter
across a border lies on several. Its own checkpoints gather all of it on every rank. Here the rank with the largest
piece of a parameter collects the others, which for nearly all parameters is nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from roles.train.model import Policy

MAIN = "fp32_param"
"""The name of a main weight, where the model's own has less precision; other names are the optimizer's (exp_avg)."""


class Piece(NamedTuple):
    """Elements [start, end) of a parameter, flattened, as this rank's optimizer holds them."""

    name: str
    start: int
    end: int
    tensors: dict[str, Tensor]
    part: Any
    """Megatron's optimizer that has it."""
    param: Tensor


def parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers on this rank that have parameters: one, and another for experts."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]


def pieces(policy: Policy) -> Iterator[Piece]:
    """This rank's pieces; before the first step they have no moments."""
    names = {param: name for name, param in policy.model.named_parameters()}
    for part in parts(policy.optimizer):
        if isinstance(part, DistributedOptimizer):
            for param, (start, end) in _ranges(part):
                yield Piece(names[param], start, end, _tensors(part, param), part, param)
            continue
        held = {id(main): main for group in part.optimizer.param_groups for main in group["params"]}
        for param, name in names.items():
            main = held.get(id(getattr(param, "main_param", param)))
            if main is not None:
                tensors = _named(main, param, part.optimizer.state.get(main, {}))
                yield Piece(name, 0, param.numel(), tensors, part, param)


def whole(policy: Policy) -> dict[str, dict[str, Tensor]]:
    """Tensors by their name and their parameter's, those that this rank is to write; called by all ranks.

    Where the optimizer is not distributed every rank has all of them.
    """
    found: dict[str, dict[str, Tensor]] = {}
    by_part: dict[int, list[Piece]] = {}
    for piece in pieces(policy):
        by_part.setdefault(id(piece.part), []).append(piece)
    for part in parts(policy.optimizer):
        group = part.data_parallel_group if isinstance(part, DistributedOptimizer) else None
        mine = {piece.name: piece for piece in by_part.get(id(part), [])}
        for name, tensors in _collected(mine, group).items():
            for key, tensor in tensors.items():
                found.setdefault(key, {})[name] = tensor
    return found


def _collected(mine: Mapping[str, Piece], group: dist.ProcessGroup | None) -> dict[str, dict[str, Tensor]]:
    """Whole tensors of the parameters of which this rank has the largest piece."""
    if group is None or group.size() == 1:
        return {name: _shaped(piece.tensors, piece.param) for name, piece in mine.items()}
    held: list[dict[str, tuple[int, int]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(held, {name: (piece.start, piece.end) for name, piece in mine.items()}, group=group)
    me, found = group.rank(), dict[str, dict[str, Tensor]]()
    # All ranks go through the same parameters in the same order, so that no two wait for each other.
    for name in sorted({name for ranges in held for name in ranges}):
        holders = {rank: ranges[name] for rank, ranges in enumerate(held) if name in ranges}
        owner = max(holders, key=lambda rank: (holders[rank][1] - holders[rank][0], -rank))
        if me not in holders:
            continue
        piece = mine[name]
        if me == owner:
            found[name] = _shaped(_receive(piece, holders, group), piece.param)
        else:
            for key in sorted(piece.tensors):
                dist.send(piece.tensors[key].contiguous(), dist.get_global_rank(group, owner), group=group)
    return found


def _receive(piece: Piece, holders: Mapping[int, tuple[int, int]], group: dist.ProcessGroup) -> dict[str, Tensor]:
    if len(holders) == 1:
        return piece.tensors
    full = {key: tensor.new_empty(piece.param.numel()) for key, tensor in piece.tensors.items()}
    for rank, (start, end) in sorted(holders.items()):
        for key in sorted(full):
            if rank == group.rank():
                full[key][start:end] = piece.tensors[key].flatten()
            else:
                dist.recv(full[key][start:end], dist.get_global_rank(group, rank), group=group)
    return full


def _shaped(tensors: Mapping[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    return {key: tensor.reshape(param.shape) for key, tensor in tensors.items()}


def put(policy: Policy, loaded: Mapping[str, Mapping[str, Tensor]], step: float | None) -> None:
    """Give the optimizer whole tensors, by their name and their parameter's, and the count of its steps."""
    for piece in pieces(policy):
        keys = [key for key in piece.tensors if key in loaded]
        chosen = {key: loaded[key][piece.name].flatten()[piece.start : piece.end] for key in keys}
        if isinstance(piece.part, DistributedOptimizer):
            held = piece.part._get_main_param_and_optimizer_states(piece.param)
            given = {("param" if key == MAIN else key): value for key, value in chosen.items()}
            # What is not given is set to what it is: Megatron wants all of it, also torch's count of steps.
            piece.part._set_main_param_and_optimizer_states(piece.param, held | given)
            continue
        for key, value in chosen.items():
            piece.tensors[key].copy_(value.reshape(piece.tensors[key].shape))
    for part in parts(policy.optimizer):
        if step is not None:
            _set_steps(part.optimizer, step)


def make_moments(policy: Policy, names: list[str]) -> None:
    """Give an optimizer that has taken no step its moments, as zeros."""
    for part in parts(policy.optimizer):
        inner = part.optimizer
        if getattr(part.config, "use_precision_aware_optimizer", False):
            part.init_state_fn(inner, part.config)
            continue
        for group in inner.param_groups:
            for main in group["params"]:
                for name in names:
                    inner.state[main].setdefault(name, torch.zeros_like(main))


def steps_taken(policy: Policy) -> float | None:
    """Steps since the optimizer was made or reset, as its bias correction counts them; null where it has taken none."""
    for part in parts(policy.optimizer):
        for state in part.optimizer.state.values():
            if "step" in state:
                return float(state["step"])
        for group in part.optimizer.param_groups:
            if group.get("step") is not None:
                return float(group["step"])
    return None


def _set_steps(inner: torch.optim.Optimizer, step: float) -> None:
    if not isinstance(inner, torch.optim.Adam):
        for group in inner.param_groups:
            group["step"] = int(step)  # Transformer Engine's AdamW counts here
        return
    for group in inner.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for main in group["params"]:
            # One tensor a parameter: torch adds to each of them, and one that is shared would count for all.
            device = main.device if on_device else "cpu"
            inner.state[main]["step"] = torch.tensor(step, dtype=torch.float32, device=device)


def _ranges(part: Any) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, (ranges["param"].start, ranges["param"].end)


def _tensors(part: Any, param: Tensor) -> dict[str, Tensor]:
    group, order = part.model_param_group_index_map[param]
    main = part.optimizer.param_groups[group]["params"][order]
    if not part.optimizer.state.get(main):
        return _named(main, param, {})
    states = dict(part._get_main_param_and_optimizer_states(param))
    return _named(states.pop("param"), param, states)


def _named(main: Tensor, param: Tensor, states: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that belong to a parameter; a main weight that is the model's own is none of the optimizer's."""
    tensors = {key: value for key, value in states.items() if key != "step" and torch.is_tensor(value)}
    shared = main.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
    return tensors if shared else {MAIN: main.detach(), **tensors}
