"""Ranks of the role on transformers in processes of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rolegraph.role import Mesh, RoleContext
from roles.train.config import HuggingFaceTrainConfig
from tests.roles.train import megatron_workers as shared
from tests.roles.train.megatron_workers import part
from tests.roles.train.processes import leave

SETTINGS: dict[str, Any] = {"micro_batch_size": 3, "reference": "initial", **shared.OPTIMIZER}


def make_role(folder: Path, kind: str, rank: int, world: int, port: int, **settings: Any) -> Any:
    from roles.train.huggingface import HuggingFaceTrain

    mesh = Mesh(dp=world).at(rank)
    context = RoleContext(role="train", rank=rank, world_size=world, mesh=mesh, threads=1, master_port=port)
    return HuggingFaceTrain(HuggingFaceTrainConfig(model=str(folder / kind), **SETTINGS | settings), context)


def run(folder: Path, kind: str, rank: int, world: int, port: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What `megatron_workers.run_case` sees, of this rank; the state before the last step is saved."""
    role = make_role(folder, kind, rank, world, port, **settings)
    try:
        role.setup()
        mesh, batches = role.context.mesh, shared.training_batches()
        first = role.logprobs(part(batches[0], mesh), entropy=True)
        taught = role.teach(part(batches[0], mesh), weights="initial", topk=shared.TOPK, hidden=True, temperature=0.7)
        role.use_teacher_head(*shared.teacher_head())
        with_teacher = part(shared.beside_teacher(batches[0]), mesh)
        distilled = [role.step(with_teacher, loss=loss, temperature=0.7, lr=0.0) for loss in shared.DISTILL]
        role.use_teacher_head("initial")
        own = [role.step(part(batch, mesh).merge(taught), loss=shared.DISTILL[0], lr=0.0) for batch in batches[:1]]
        stepped = role.step(part(shared.with_steps(batches[0]), mesh), loss=shared.PER_STEP, temperature=1.0, lr=0.0)
        role.reset_optimizer()
        metrics = [role.step(part(batch, mesh), loss=shared.NLL) for batch in batches[:-1]]
        saved = folder / f"saved-{kind}"
        saved.mkdir(exist_ok=True)
        role.save(str(saved))
        metrics.append(role.step(part(batches[-1], mesh), loss=shared.NLL))
        role.finish_save()
        after = role.logprobs(part(batches[0], mesh), temperature=0.7)
        reference = role.logprobs(part(batches[0], mesh), reference=True)
        role.export_hf(str(folder / f"export-{kind}"))
        return {
            "metrics": metrics,
            "first": first.table,
            "taught": taught.table,
            "distilled": distilled,
            "own": own,
            "stepped": stepped,
            "after": after.table,
            "reference": reference.table,
            "held": held(role),
        }
    finally:
        role.teardown()


def held(role: Any) -> dict[str, int]:
    """Bytes that a rank holds between two steps, by the names of the memory estimate."""
    from roles.train.huggingface_model import local

    policy = role._policy
    states = [local(state[name]) for state in policy.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": sum(local(param).nbytes for param in policy.model.parameters()),
        "optimizer": sum(state.nbytes for state in states),
        "reference": sum(tensor.nbytes for tensor in (policy.reference or {}).values()),
    }


def worker(folder: Path, kinds: dict[str, dict[str, Any]], rank: int, world: int, ports: list[int]) -> None:
    for (kind, settings), port in zip(kinds.items(), ports, strict=True):
        leave(folder / f"{kind}-{rank}.pkl", partial(run, folder, kind, rank, world, port, settings))
