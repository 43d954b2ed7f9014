"""Processes that save as one layout of ranks and load as others, for `test_checkpoint_layouts.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rolegraph.errors import CheckpointError
from rolegraph.role import Mesh, RoleContext
from roles.train.config import MegatronTrainConfig
from tests.disks import small_files
from tests.roles.train.megatron_workers import NLL, OPTIMIZER, grouped, make_batch, part
from tests.roles.train.processes import leave

BEFORE = [grouped(make_batch(8, 0)), make_batch(8, 1)]
AFTER = [make_batch(7, 2), grouped(make_batch(8, 3))]


@dataclass(frozen=True)
class Layout:
    """A mesh of ranks, and what it does: save under its own name, or load what another saved."""

    name: str
    kind: str
    dp: int = 1
    pp: int = 1
    tp: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    loads: str | None = None
    fails: bool = False
    """Whether rank 1 cannot write at first."""

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp


def run(layout: Layout, folder: Path, rank: int, port: int) -> dict[str, Any]:
    """What one rank saw."""
    from roles.train.megatron import MegatronTrain

    mesh = Mesh(dp=layout.dp, pp=layout.pp, tp=layout.tp).at(rank)
    context = RoleContext(role="train", rank=rank, world_size=layout.world, mesh=mesh, threads=1, master_port=port)
    config = MegatronTrainConfig(
        model=str(folder / layout.kind),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        warmup_steps=9,
        **{"micro_batch_size": 3} | OPTIMIZER | layout.config,
    )
    role = MegatronTrain(config, context)
    try:
        role.setup()
        seen: dict[str, Any] = {}
        if layout.loads is None:
            for batch in BEFORE:
                role.step(part(batch, mesh), loss=NLL)
                role.average_weights(0.5)
            role.save_reference()
            role.step(part(BEFORE[0], mesh), loss=NLL)
            if layout.fails:
                seen["fault"] = _failing(role, folder / f"{layout.name}-failed", rank)
            role.save(str(_made(folder / layout.name)))
        else:
            role.load(str(folder / layout.loads))
        seen["scores"] = {
            name: [column.to_numpy(zero_copy_only=False) for column in _values(make())]
            for name, make in _scorers(role, part(AFTER[0], mesh)).items()
        }
        seen["steps"] = [_numbers(role.step(part(batch, mesh), loss=NLL)) for batch in AFTER]
        role.finish_save()
        return seen | {"mesh": mesh}
    finally:
        role.teardown()


def _scorers(role: Any, batch: Any) -> dict[str, Callable[[], Any]]:
    return {
        "current": lambda: role.logprobs(batch).select(["logprobs"]),
        "reference": lambda: role.logprobs(batch, reference=True).select(["ref_logprobs"]),
        "average": lambda: role.teach(batch, weights="average").select(["teacher_token_logprobs"]),
    }


def _values(batch: Any) -> list[Any]:
    return [batch.table.column(name).combine_chunks().values for name in batch.column_names]


def _numbers(metrics: dict[str, float]) -> tuple[float, float, float]:
    return metrics["loss"], metrics["grad_norm"], metrics["lr"]


def _failing(role: Any, folder: Path, rank: int) -> str:
    """The error of a save that rank 1 cannot write."""
    _made(folder)
    with small_files(20_000) if rank == 1 else nullcontext():
        role.save(str(folder))
        try:
            role.finish_save()
        except CheckpointError as error:
            return str(error)
    return ""


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def worker(rank: int, layouts: list[Layout], ports: list[int], folder: Path) -> None:
    """One process: a rank of each layout that has so many, one layout after another."""
    for layout, port in zip(layouts, ports, strict=True):
        if rank >= layout.world:
            continue
        leave(folder / f"{layout.name}-{rank}.pkl", partial(run, layout, folder, rank, port))
