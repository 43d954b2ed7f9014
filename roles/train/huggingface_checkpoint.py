"""Checkpoints of a sharded model of transformers, as torch's distributed ones: any number of ranks reads any other's.

Every tensor lies there once, whole, under the name of its parameter; each rank writes and reads its own part of it.
What all ranks agree on is in `common.pt`.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load

from roles.train.checkpoint_folder import COMMON, INCIDENTAL, broken, common_of, differences, told_apart
from roles.train.huggingface_model import HFPolicy, like
from roles.train.saving import Saver, agree
from roles.train.trainer import Trainer

_log = logging.getLogger(__name__)

FORMAT = "huggingface-1"
"""Of what `common.pt` holds under `rolegraph`."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class HFCheckpoint(Saver):
    """Saves and loads a policy and its trainer; every method but `is_writing` is called by all ranks."""

    def __init__(self, policy: HFPolicy, trainer: Trainer) -> None:
        super().__init__()
        self._policy = policy
        self._trainer = trainer

    def save(self, folder: Path) -> None:
        """See `TrainRole.save`."""
        policy, common = self._policy, self._common()
        state = self._named("model", policy.trained)
        state |= self._moments(common["optimizer_names"])
        for kind in ("reference", "average"):
            if common[kind]:
                state |= self._kept(kind, getattr(policy, kind))
        state |= {f"rng.{name}.{dist.get_rank()}": value for name, value in _random_states().items()}
        self._saving.begin(folder, state, DefaultSavePlanner(), beside=self._beside(common, folder))

    def finish(self) -> None:
        """See `TrainRole.finish_save`."""
        self._saving.finish()

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """See `TrainRole.load`; a fault of the storage in the middle leaves weights of both sides."""
        policy = self._policy
        common = self._look(folder, weights_only)
        policy.reshard()
        with torch.no_grad():
            self._read(folder, self._named("model", policy.trained))
            if not weights_only:
                self._load_rest(folder, common)

    def _load_rest(self, folder: Path, common: Mapping[str, Any]) -> None:
        policy, trainer = self._policy, self._trainer
        trainer.reset()
        trainer.steps = common["steps"]
        names, params = common["optimizer_names"], policy.trained
        for name in names:
            moments = {moment: torch.zeros_like(params[name]) for moment in MOMENTS}
            # A tensor of its own each: torch counts them up one by one.
            step = torch.tensor(common["optimizer_step"], device=policy.device)
            policy.optimizer.state[params[name]] = {"step": step, **moments}
        self._read(folder, self._moments(names))
        if common["reference"]:
            policy.reference = policy.reference or policy.copies()
            self._read(folder, self._kept("reference", policy.reference))
        elif policy.reference is not None and policy.reference_moved:
            policy.reference = policy.initial()
        policy.reference_moved = common["reference"]
        if common["average"]:
            policy.average = policy.average or policy.copies()
            self._read(folder, self._kept("average", policy.average))
        else:
            policy.average = None
        if common["ranks"] == dist.get_world_size():
            states = {f"rng.{name}.{dist.get_rank()}": value for name, value in _random_states().items()}
            self._read(folder, states)
            _set_random_states({key.split(".")[1]: value for key, value in states.items()})
        else:
            _log.info("the checkpoint is of another number of ranks: random generators start anew")

    def _common(self) -> dict[str, Any]:
        policy = self._policy
        state = policy.optimizer.state
        names = [name for name, param in policy.trained.items() if param in state]
        return {
            "format": FORMAT,
            **_identity(policy),
            "ranks": dist.get_world_size(),
            "steps": self._trainer.steps,
            "optimizer_step": float(state[policy.trained[names[0]]]["step"]) if names else None,
            "optimizer_names": names,
            "reference": policy.reference is not None and policy.reference_moved,
            "average": policy.average is not None,
        }

    def _look(self, folder: Path, weights_only: bool) -> dict[str, Any]:
        """What the folder says of itself; CheckpointError where it is not whole, or not of this model."""
        common: dict[str, Any] = {}
        fault = broken(folder, COMMON)
        if not fault:
            common, fault = common_of(folder / COMMON)
        if not fault:
            mine = _identity(self._policy)
            if weights_only:
                del mine["dtype"]
            if common.get("format") != FORMAT:
                fault = f"it has format {common.get('format')}, and train=huggingface reads {FORMAT}"
            elif not (fault := told_apart({key: common[key] for key in mine}, mine)):
                shapes = self._named("model", self._policy.trained).items()
                fault = differences(folder, ((key, tuple(value.shape), False) for key, value in shapes))
        agree(f"{folder} cannot be loaded", fault)
        return common

    def _named(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{kind}.{name}": tensor.detach() for name, tensor in tensors.items()}

    def _moments(self, names: Sequence[str]) -> dict[str, Tensor]:
        """What the optimizer holds of these weights."""
        params, state = self._policy.trained, self._policy.optimizer.state
        return {
            f"optimizer.{moment}.{name}": state[params[name]][moment].detach() for moment in MOMENTS for name in names
        }

    def _kept(self, kind: str, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of weights, as tensors that are cut as those are."""
        weights = dict(self._policy.model.named_parameters())
        return self._named(kind, {name: like(weights[name], shard) for name, shard in shards.items()})

    def _read(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Into the memory of these tensors."""
        if not state:
            return
        fault = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what torch means to rename, and that one rank is no group
                load(dict(state), checkpoint_id=folder)
        except Exception as error:
            _log.debug("loading failed", exc_info=True)
            fault = f"{type(error).__name__}: {error}"
        agree(f"{folder} cannot be loaded", fault)


def _identity(policy: HFPolicy) -> dict[str, Any]:
    """What has to be the same where a checkpoint is loaded."""
    settings = policy.settings.to_dict()
    return {
        "model": {key: value for key, value in settings.items() if key not in INCIDENTAL},
        "adapter": None if policy.adapter is None else dataclasses.asdict(policy.adapter),
        "dtype": str(policy.dtype).removeprefix("torch."),
    }


def _random_states() -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
