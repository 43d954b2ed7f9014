"""Ranks that train adapters, each in a process, and the same training with PEFT and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolegraph.batch import Batch
from rolegraph.role import Mesh, RoleContext
from roles.train.adapter import first_a
from roles.train.config import MegatronTrainConfig
from tests.roles.train.megatron_workers import NLL, OPTIMIZER, Case, _hf_logprobs, grouped, held, make_batch, part
from tests.roles.train.processes import in_rounds

LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 12.0}
SEED = 11


def batches() -> list[Batch]:
    return [grouped(make_batch(8, 0)), make_batch(7, 1), make_batch(1, 2), grouped(make_batch(8, 4))]


def run_case(case: Case, folder: Path, rank: int, port: int) -> dict[str, Any]:
    """Train one case as one of its ranks; what this rank saw."""
    from roles.train.megatron import MegatronTrain

    mesh = Mesh(dp=case.dp, pp=case.pp, tp=case.tp).at(rank)
    context = RoleContext(role="train", rank=rank, world_size=case.world, mesh=mesh, threads=1, master_port=port)
    config = MegatronTrainConfig(
        model=str(folder / case.kind),
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        seed=SEED,
        **{"micro_batch_size": 3} | OPTIMIZER | LORA | case.config,
    )
    role = MegatronTrain(config, context)
    try:
        role.setup()
        return train(role, mesh, folder / f"export-{case.name}")
    finally:
        role.teardown()


def train(role: Any, mesh: Mesh, out: Path) -> dict[str, Any]:
    """The training, scores and files of one rank."""
    given = batches()
    seen: dict[str, Any] = {"mesh": mesh}
    seen["first"] = role.logprobs(part(given[0], mesh)).table
    seen["metrics"] = [role.step(part(batch, mesh), loss=NLL, temperature=1.0) for batch in given]
    seen["after"] = role.logprobs(part(given[0], mesh)).table
    seen["reference"] = role.logprobs(part(given[0], mesh), reference=True).table
    seen["held"] = held(role._policy)
    role.export_hf(str(out / "merged"))
    role.export_hf(str(out / "adapter"), adapter=True)
    seen["manifest"] = role.weight_manifest(adapter=True)
    seen["sent"] = {name: tensor.clone() for name, tensor in role._adapters.tensors()}
    seen["again"] = role.logprobs(part(given[0], mesh)).table
    role.save_reference()
    role.average_weights(0.5)
    role.step(part(given[1], mesh), loss=NLL, temperature=1.0)
    seen["saved"] = role.logprobs(part(given[0], mesh), reference=True).table
    return seen


def worker(
    slot: int, rounds: Sequence[Sequence[tuple[Case, int]]], ports: Sequence[Sequence[int]], folder: Path
) -> None:
    """One process: in each round it is a rank of the case whose slots it lies in."""
    in_rounds(run_case, slot, rounds, ports, folder)


def reference_run(folder: Path, kind: str, **settings: Any) -> dict[str, Any]:
    """The same training with PEFT, transformers and AdamW on one process."""
    import peft
    from transformers import AutoModelForCausalLM

    adapter = MegatronTrainConfig(**LORA | settings).adapter
    assert adapter is not None
    base = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32)
    config = peft.LoraConfig(
        r=adapter.rank, lora_alpha=int(adapter.alpha), target_modules=list(adapter.targets), task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config)
    for name, param in model.named_parameters():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").split(".lora_A.")[0]
            param.data.copy_(first_a(SEED, module, *param.shape))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=OPTIMIZER["lr"],
        betas=(0.9, OPTIMIZER["adam_beta2"]),
        eps=1e-8,
        weight_decay=OPTIMIZER["weight_decay"],
    )
    given = batches()
    losses, norms = [], []
    for batch in given:
        logprobs, _ = _hf_logprobs(model, batch, 1.0)
        mask = torch.tensor(batch.ragged("response_mask").values.astype(np.float32))
        loss = -(logprobs * mask).sum() / mask.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, OPTIMIZER["clip_grad"])))
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        after = _hf_logprobs(model, given[0], 1.0)[0]
        with model.disable_adapter():
            first = _hf_logprobs(model, given[0], 1.0)[0]
    sizes = {name: tuple(param.shape) for name, param in peft.get_peft_model_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "first": first, "after": after, "sizes": sizes}
