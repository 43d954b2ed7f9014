"""Checkpoints of the Megatron role, in megatron-core's distributed format: any layout of ranks reads any other's.

Weights and what the optimizer holds of them lie under the names that Megatron gives them in the whole model, each
written by one of the ranks that have it. What all ranks agree on is in `common.pt`.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roles.train import optimizer_state, shim
from roles.train.adapter import tensor_name
from roles.train.checkpoint_folder import COMMON, INCIDENTAL, broken, common_of, differences, told_apart
from roles.train.model import Policy, load_weights
from roles.train.saving import Saver, agree
from roles.train.trainer import Trainer

with shim.quick_import():
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )

shim.install()

_log = logging.getLogger(__name__)
Sharded = Any  # a ShardedTensor or a ShardedTensorFactory; megatron-core has no types

FORMAT = 1
"""Of what `common.pt` holds under `rolegraph`."""


class Checkpoint(Saver):
    """Saves and loads a policy and its trainer; every method but `is_writing` is called by all ranks."""

    def __init__(self, policy: Policy, trainer: Trainer) -> None:
        super().__init__()
        self._policy = policy
        self._trainer = trainer

    def save(self, folder: Path) -> None:
        """See `TrainRole.save`."""
        common = self._common()
        tree, _ = save_preprocess(self._tree(common), validate_access_integrity=False)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tree, keep_only_main_replica=True)
        planner = MCoreSavePlanner(can_run_decentralized_global_plan=False, flatten_state_dict=False)
        self._saving.begin(folder, mcore_to_pyt_state_dict(by_key), planner, beside=self._beside(common, folder))
        self._complete: Callable[[], None] = partial(save_config, CheckpointingConfig("torch_dist"), str(folder))

    def finish(self) -> None:
        """See `TrainRole.finish_save`."""
        self._saving.finish(getattr(self, "_complete", None))

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """See `TrainRole.load`."""
        policy = self._policy
        common = self._look(folder, weights_only)
        wanted = self._wanted(common, weights_only)
        agree(f"{folder} cannot be loaded", differences(folder, _leaves(wanted)))
        loaded, fault = {}, ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron calls what torch means to rename
                loaded = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
        except Exception as error:
            _log.debug("loading failed", exc_info=True)
            fault = f"{type(error).__name__}: {error}"
        agree(f"{folder} cannot be loaded", fault)
        if not weights_only and policy.reference_moved and not common["reference"]:
            self._forget_reference()
        with torch.no_grad():
            self._put(loaded, common, weights_only)

    def _forget_reference(self) -> None:
        """Back to the one of the start; the weights of now are overwritten on the way."""
        policy = self._policy
        if policy.adapters is not None:
            policy.reference = None  # without adapters the model is the one of the start
        else:
            load_weights(policy.bridge, policy.model, policy.source)
            policy.save_reference()
        policy.reference_moved = False

    # ----- what there is -----

    def _common(self) -> dict[str, Any]:
        policy = self._policy
        step = _agreed(optimizer_state.steps_taken(policy))
        return {
            "format": FORMAT,
            **_identity(policy),
            "layout": _layout(),
            "steps": self._trainer.steps,
            "optimizer_step": step,
            "optimizer_keys": [],
            "reference": policy.reference is not None and policy.reference_moved,
            "average": policy.average is not None,
        }

    def _tree(self, common: dict[str, Any]) -> dict[str, Any]:
        """All that is saved, as Megatron's sharded tensors; fills in the names of what the optimizer holds."""
        policy, places = self._policy, self._places()
        states = optimizer_state.whole(policy)
        common["optimizer_keys"] = sorted(_union(states))
        tree: dict[str, Any] = {
            "model": {name: _spread(place, index) for index, (name, place) in enumerate(places.items())},
            "optimizer": {
                key: _moved(places, tensors, f"optimizer.state.{key}.", alone=_is_cut(policy))
                for key, tensors in states.items()
            },
            "rng": _of_rank("rng", _random_states()),
        }
        for name, kept in (("reference", policy.reference), ("average", policy.average)):
            if kept is not None and common[name]:
                tree[name] = _moved(places, kept, f"{name}.")
        return tree

    def _places(self) -> dict[str, Sharded]:
        """Where each weight that is saved lies in the whole model, by its name in this rank's part.

        Beside adapters the model's own weights are none of them: they stay those of the Hugging Face folder.
        """
        policy = self._policy
        if policy.adapters is not None:
            names = {param: name for name, param in policy.trained.items()}
            return {
                names[param]: _adapter_place(tensor_name(module, side), param, spread)
                for module, side, param, spread in policy.adapters.matrices()
            }
        found = policy.model.sharded_state_dict()
        return {name: place for name, place in found.items() if isinstance(place, ShardedTensor | ShardedTensorFactory)}

    # ----- taking it back -----

    def _look(self, folder: Path, weights_only: bool) -> dict[str, Any]:
        """What the folder says of itself; CheckpointError where it is not whole, or not of this model."""
        common: dict[str, Any] = {}
        fault = broken(folder, "metadata.json", COMMON)
        if not fault:
            common, fault = common_of(folder / COMMON)
        if not fault:
            if common.get("format") != FORMAT:
                fault = f"it has format {common.get('format')}, and this version of rolegraph reads {FORMAT}"
            else:
                mine = _identity(self._policy)
                if weights_only:
                    del mine["dtype"]
                fault = told_apart({key: common[key] for key in mine}, mine)
        agree(f"{folder} cannot be loaded", fault)
        return common

    def _wanted(self, common: Mapping[str, Any], weights_only: bool) -> dict[str, Any]:
        """The tree to load, with host memory to load into."""
        policy, places = self._policy, self._places()
        names = [name for name in policy.trained if name in places]
        tree: dict[str, Any] = {"model": {name: _empty(place, "") for name, place in places.items()}}
        if weights_only:
            return tree
        mine = dict.fromkeys(piece.name for piece in optimizer_state.pieces(policy))
        mains = {piece.name for piece in optimizer_state.pieces(policy) if optimizer_state.MAIN in piece.tensors}
        tree["optimizer"] = {
            key: {
                name: _empty(places[name], f"optimizer.state.{key}.", torch.float32)
                for name in mine
                if key != optimizer_state.MAIN or name in mains
            }
            for key in common["optimizer_keys"]
        }
        if common["reference"]:
            tree["reference"] = {name: _empty(places[name], "reference.") for name in names}
        if common["average"]:
            tree["average"] = {name: _empty(places[name], "average.", torch.float32) for name in names}
        if common["layout"] == _layout():
            tree["rng"] = _of_rank("rng", None)
        else:
            _log.info("the checkpoint is of another layout of ranks: random generators start anew")
        return tree

    def _put(self, loaded: dict[str, Any], common: Mapping[str, Any], weights_only: bool) -> None:
        policy, trainer = self._policy, self._trainer
        state = dict(policy.model.state_dict(keep_vars=True))
        for name, value in loaded["model"].items():
            state[name].data.copy_(value)
        if weights_only:
            policy.optimizer.reload_model_params()
            return
        trainer.reset()
        keys: list[str] = common["optimizer_keys"]
        if common["optimizer_step"] is not None:
            optimizer_state.make_moments(policy, [key for key in keys if key != optimizer_state.MAIN])
        optimizer_state.put(policy, loaded.get("optimizer", {}), common["optimizer_step"])
        trainer.steps = common["steps"]
        if common["reference"]:
            policy.reference = _into(policy.reference, loaded["reference"], policy.device)
            policy.reference_moved = True
        policy.average = _into(policy.average, loaded["average"], policy.device) if common["average"] else None
        if "rng" in loaded:
            _set_random_states(loaded["rng"])


# ----- sharded tensors -----


def _adapter_place(key: str, param: Tensor, dimension: int | None) -> Sharded:
    """Where a matrix of an adapter lies, under PEFT's name for it; `dimension` is the one that ranks share, if any."""
    state = parallel_state
    rank, ranks = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    replica = (0, rank if dimension is None else 0, _data_group().rank())
    offsets = [] if dimension is None else [(dimension, rank, ranks)]
    return ShardedTensor.from_rank_offsets(key, param, *offsets, replica_id=replica)


def _spread(place: Sharded, index: int) -> Sharded:
    """The same, written by another of its replicas: each of them has as many weights to write."""
    *front, replica = place.replica_id
    param = place.data
    expert = not getattr(param, "allreduce", True)
    group = parallel_state.get_expert_data_parallel_group() if expert else _data_group()
    return dataclasses.replace(place, replica_id=(*front, (replica - index) % group.size()))


def _moved(places: Mapping[str, Sharded], tensors: Mapping[str, Tensor], prefix: str, *, alone: bool = False) -> Any:
    """Tensors of the shape of weights, under the weights' keys behind a prefix; `alone` where one replica has each."""
    found = {}
    for name, tensor in tensors.items():
        place = places[name]
        changes: dict[str, Any] = {"key": f"{prefix}{place.key}", "data": tensor}
        if isinstance(place, ShardedTensor):
            changes["dtype"] = tensor.dtype
        if alone:
            changes["replica_id"] = (*place.replica_id[:-1], 0)
        found[name] = dataclasses.replace(place, **changes)
    return found


def _empty(place: Sharded, prefix: str, dtype: torch.dtype | None = None) -> Sharded:
    """The same with memory of its own on the host, as zeros: padding is in no checkpoint of another padding."""
    data = torch.zeros(place.data.shape, dtype=dtype or place.data.dtype)
    changes = {"dtype": data.dtype} if isinstance(place, ShardedTensor) else {}
    return dataclasses.replace(place, key=f"{prefix}{place.key}", data=data, **changes)


def _of_rank(key: str, value: Any) -> ShardedObject:
    return ShardedObject(key, value, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _leaves(tree: Any) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """What `differences` asks of each tensor."""
    for leaf in nested_values(tree):
        if isinstance(leaf, ShardedTensorFactory):
            yield from _leaves(leaf.build())
        elif isinstance(leaf, ShardedTensor):
            yield leaf.key, tuple(leaf.global_shape), leaf.allow_shape_mismatch


def _into(old: dict[str, Tensor] | None, loaded: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Loaded tensors on the device, in the memory of the old ones where there are any."""
    if old is None:
        return {name: value.to(device) for name, value in loaded.items()}
    for name, value in loaded.items():
        old[name].copy_(value)
    return old


def _is_cut(policy: Policy) -> bool:
    """Whether the optimizer is distributed: its tensors then are with one rank each."""
    return any(hasattr(part, "gbuf_ranges") for part in optimizer_state.parts(policy.optimizer))


# ----- what ranks agree on -----


def _data_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _gathered(value: Any) -> list[Any]:
    values = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def _agreed(value: float | None) -> float | None:
    """The value of any rank that has one."""
    return next((each for each in _gathered(value) if each is not None), None)


def _union(states: Mapping[str, Any]) -> set[str]:
    return set().union(*_gathered(sorted(states)))


def _layout() -> dict[str, int]:
    state = parallel_state
    return {
        "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": state.get_context_parallel_world_size(),
        "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
        "ranks": dist.get_world_size(),
    }


def _identity(policy: Policy) -> dict[str, Any]:
    """What has to be the same where a checkpoint is loaded."""
    settings = policy.bridge.hf_config.to_dict()
    return {
        "model": {key: value for key, value in settings.items() if key not in INCIDENTAL},
        "adapter": None if policy.adapters is None else dataclasses.asdict(policy.adapters.info),
        "dtype": str(policy.dtype).removeprefix("torch."),
    }


# ----- random generators -----


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    states["tracker"] = {name: state for name, state in tracked.items() if torch.is_tensor(state)}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(tracker.get_states() | states["tracker"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
