"""Processes for tests of several ranks, and the same training in plain transformers to compare with."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rolegraph.batch import Batch
from rolegraph.columns import Ragged, fixed_size_rows, from_fixed_size_rows
from rolegraph.interfaces import HeadInfo, LossSpec
from rolegraph.losses.divergence import generalized_jsd, topk_divergence
from rolegraph.role import Mesh, RoleContext
from roles.train.config import MegatronTrainConfig
from tests.models import VOCAB
from tests.roles.train.processes import in_rounds

TOPK = 5
NLL = LossSpec("tests.losses_for_tests.nll")
DISTILL = [
    LossSpec("rolegraph.losses.distill.DistillLoss", {"beta": 0.3, "sft_alpha": 0.2}),
    LossSpec("rolegraph.losses.distill.DistillLoss", {"beta": 1.0, "topk_mode": "tail"}),
    LossSpec("rolegraph.losses.distill.DistillLoss", {"beta": 0.0, "topk_mode": "renormalize"}),
]
PER_STEP = LossSpec("rolegraph.losses.policy.PolicyLoss", {"step_scale": "group", "loss_type": "dapo"})
TEACHER_WIDTH, TEACHER_VOCAB = 24, VOCAB + 9
"""Another width than the student's, and more rows than it has tokens."""
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta2": 0.95}


@dataclass(frozen=True)
class Case:
    """One way to spread the same training over ranks."""

    name: str
    kind: str
    """Folder name of the checkpoint."""
    dp: int = 1
    pp: int = 1
    tp: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp


def make_batch(rows: int, seed: int, *, masked: bool = False) -> Batch:
    """Random rows; some responses are empty, and with `masked` no token is trained on."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, VOCAB, size).astype(np.int32) for size in draw.integers(1, 9, rows)]
    sizes = draw.integers(1, 12, rows)
    if rows > 3:
        sizes[2] = 0
    responses = [draw.integers(0, VOCAB, size).astype(np.int32) for size in sizes]
    masks = [(draw.random(size) < 0.8).astype(np.uint8) * (not masked) for size in sizes]
    return Batch.from_columns(
        {
            "uid": [str(row) for row in range(rows)],
            "prompt_ids": prompts,
            "response_ids": responses,
            "response_mask": masks,
        }
    )


def teacher_head() -> tuple[Batch, HeadInfo]:
    """The output head of a teacher that is nothing else."""
    weight = torch.randn(TEACHER_VOCAB, TEACHER_WIDTH, generator=torch.Generator().manual_seed(5))
    info = HeadInfo(TEACHER_VOCAB, TEACHER_WIDTH, "float32", scale=0.5)
    return Batch.from_columns({"weight": fixed_size_rows(weight.numpy())}), info


def beside_teacher(batch: Batch) -> Batch:
    """The rows with a teacher's hidden states, and the top-K that follow from them at temperature 0.7."""
    lengths = batch.ragged("response_ids").lengths
    states = torch.randn(int(lengths.sum()), TEACHER_WIDTH, generator=torch.Generator().manual_seed(6))
    best = torch.log_softmax(teacher_logits(states) / 0.7, -1).topk(TOPK)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = {"hidden": states, "ids": best.indices.int(), "logprobs": best.values}
    return batch.with_columns({f"teacher_{name}": Ragged(value.numpy(), offsets) for name, value in columns.items()})


def teacher_logits(states: torch.Tensor) -> torch.Tensor:
    """[tokens, VOCAB] over the tokens that both have."""
    head, info = teacher_head()
    return states @ torch.from_numpy(from_fixed_size_rows(head["weight"]).copy())[:VOCAB].T * info.scale


def with_steps(batch: Batch) -> Batch:
    """The rows with scored steps of two tokens each, in three groups that lie on every data-parallel rank."""
    lengths = batch.ragged("response_ids").lengths
    ends = [[*range(2, int(length), 2), int(length)] if length else [] for length in lengths]
    draw = np.random.default_rng(7)
    scores = [[None if draw.random() < 0.2 else float(draw.random()) for _ in each] for each in ends]
    row = np.arange(len(batch))
    return batch.with_columns(
        {"step_ends": ends, "step_scores": scores, "group": (row % 3).astype(np.int32), "advantage": 0.1 * row}
    )


def step_advantages(batch: Batch) -> torch.Tensor:
    """[tokens] advantages as DeepSeekMath writes them (arXiv:2402.03300, section 4.1.3), step by step."""
    groups, scores = batch["group"].to_pylist(), batch["step_scores"].to_pylist()
    of_group: dict[int, list[float]] = {}
    for group, each in zip(groups, scores, strict=True):
        of_group.setdefault(group, []).extend(score for score in each if score is not None)
    values: list[float] = []
    for row, (group, each, ends) in enumerate(zip(groups, scores, batch["step_ends"].to_pylist(), strict=True)):
        mean, std = np.mean(of_group[group]), np.std(of_group[group], ddof=1) + 1e-4
        worth = [0.0 if score is None else (score - mean) / std for score in each]
        for token in range(ends[-1] if ends else 0):
            values.append(0.1 * row + sum(w for w, end in zip(worth, ends, strict=True) if end > token))
    return torch.tensor(values, dtype=torch.float64)


def grouped(batch: Batch) -> Batch:
    """The same rows, but runs of neighbours with the same prompt: groups of 3 and 2, one row alone, the first prompt
    again."""
    prompts = batch.lists("prompt_ids")
    sources = [0, 0, 0, 1, 1, 2, 0, 3, 3, 3, 3]
    chosen = [prompts[sources[row % len(sources)] % len(prompts)] for row in range(len(batch))]
    return batch.with_columns({"prompt_ids": pa.array(chosen, pa.list_(pa.int32())), "uid": ["a"] * len(batch)})


def training_batches() -> list[Batch]:
    """What every case trains on: also prompt groups, fewer rows than data-parallel ranks, and a batch without a
    trained token."""
    return [
        grouped(make_batch(8, 0)),
        make_batch(7, 1),
        make_batch(1, 2),
        make_batch(4, 3, masked=True),
        grouped(make_batch(8, 4)),
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_case(case: Case, folder: Path, rank: int, port: int) -> dict[str, Any]:
    """Train one case as one of its ranks; what this rank saw."""
    from roles.train.megatron import MegatronTrain

    mesh = Mesh(dp=case.dp, pp=case.pp, tp=case.tp).at(rank)
    context = RoleContext(role="train", rank=rank, world_size=case.world, mesh=mesh, threads=1, master_port=port)
    config = MegatronTrainConfig(
        model=str(folder / case.kind),
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        reference="initial",
        **{"micro_batch_size": 3} | OPTIMIZER | case.config,
    )
    role = MegatronTrain(config, context)
    try:
        role.setup()
        batches = training_batches()
        first = role.logprobs(part(batches[0], mesh), entropy=True)
        taught = role._trainer.teach(part(batches[0], mesh), topk=TOPK, hidden=True, temperature=0.7)
        head = role._trainer.whole_head()
        role.use_teacher_head(*teacher_head())
        with_teacher = part(beside_teacher(batches[0]), mesh)
        distilled = [role.step(with_teacher, loss=loss, temperature=0.7, lr=0.0) for loss in DISTILL]
        stepped = role.step(part(with_steps(batches[0]), mesh), loss=PER_STEP, temperature=1.0, lr=0.0)
        role.reset_optimizer()
        metrics = [role.step(part(batch, mesh), loss=NLL, temperature=1.0) for batch in batches]
        after = role.logprobs(part(batches[0], mesh), temperature=0.7)
        reference = role.logprobs(part(batches[0], mesh), reference=True)
        role.export_hf(str(folder / f"export-{case.name}"))
        return {
            "mesh": mesh,
            "held": held(role._policy),
            "metrics": metrics,
            "first": first.table,
            "taught": taught.table,
            "head": head,
            "distilled": distilled,
            "stepped": stepped,
            "after": after.table,
            "reference": reference.table,
            "manifest": role.weight_manifest(),
            "sent": {name: tensor.clone() for name, tensor in role._export.tensors()},
        }
    finally:
        role.teardown()


def held(policy: Any) -> dict[str, int]:
    """Bytes that a rank holds between two steps, by the names of the memory estimate."""
    optimizers = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    states = [state for part in optimizers for state in part.optimizer.state.values()]
    buffers = [*policy.runs.buffers, *policy.runs.expert_parallel_buffers]
    return {
        "weights": sum(param.nbytes for param in policy.model.parameters()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq")),
        "reference": sum(tensor.nbytes for tensor in (policy.reference or {}).values()),
    }


def part(batch: Batch, mesh: Mesh) -> Batch:
    """The rows of one data-parallel rank, as the group cuts them."""
    bounds = np.linspace(0, len(batch), mesh.dp + 1).round().astype(int)
    return batch.slice(int(bounds[mesh.dp_rank]), int(bounds[mesh.dp_rank + 1]))


def worker(
    slot: int, rounds: Sequence[Sequence[tuple[Case, int]]], ports: Sequence[Sequence[int]], folder: Path
) -> None:
    """One process: in each round it is a rank of the case whose slots it lies in."""
    in_rounds(run_case, slot, rounds, ports, folder)


def reference_run(folder: Path, kind: str) -> dict[str, Any]:
    """The same training with transformers and AdamW on one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], betas=(0.9, OPTIMIZER["adam_beta2"]), eps=1e-8)
    batches = training_batches()
    with torch.no_grad():
        first = _hf_logprobs(model, batches[0], 1.0)
        taught = torch.cat(_hf_tables(model, batches[0], 0.7))
    distilled = [_distilled(model, beside_teacher(batches[0]), spec) for spec in DISTILL]
    stepped = _stepped(model, with_steps(batches[0]))
    losses, norms = [], []
    for batch in batches:
        logprobs, _ = _hf_logprobs(model, batch, 1.0)
        mask = torch.tensor(batch.ragged("response_mask").values.astype(np.float32))
        loss = -(logprobs * mask).sum() / mask.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])))
        optimizer.step()
        losses.append(float(loss))
    with torch.no_grad():
        after = _hf_logprobs(model, batches[0], 0.7)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return {
        "losses": losses,
        "norms": norms,
        "first": first,
        "taught": taught,
        "distilled": distilled,
        "stepped": stepped,
        "after": after,
        "weights": weights,
    }


def _stepped(model: Any, batch: Batch) -> tuple[float, float]:
    """The policy loss with rewards of steps, and the norm of its gradient."""
    model.zero_grad()
    logprobs, _ = _hf_logprobs(model, batch, 1.0)
    mask = torch.tensor(batch.ragged("response_mask").values.astype(np.float32))
    ratio = torch.exp(logprobs - logprobs.detach())
    loss = -(ratio * step_advantages(batch).float() * mask).sum() / mask.sum()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf))
    model.zero_grad()
    return float(loss.detach()), norm


def _distilled(model: Any, batch: Batch, spec: LossSpec) -> tuple[float, float]:
    """The distillation loss from whole logits, and the norm of its gradient."""
    model.zero_grad()
    table = torch.cat(_hf_tables(model, batch, 1.0))
    mask = torch.tensor(batch.ragged("response_mask").values.astype(np.float32))
    hidden, ids, logprobs = (
        torch.from_numpy(np.array(batch.ragged(f"teacher_{name}").values)) for name in ("hidden", "ids", "logprobs")
    )
    beta, mode = spec.kwargs["beta"], spec.kwargs.get("topk_mode")
    if mode is None:
        values = generalized_jsd(table, teacher_logits(hidden), beta=beta, temperature=0.7)
    else:
        values = topk_divergence(
            table, ids.long(), logprobs, beta=beta, temperature=0.7, mode=mode, teacher_temperature=0.7
        )
    labels = torch.from_numpy(batch.ragged("response_ids").values.astype(np.int64))
    negative = -table.gather(-1, labels[:, None])[:, 0]
    loss = ((values + spec.kwargs.get("sft_alpha", 0.0) * negative) * mask).sum() / mask.sum()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf))
    model.zero_grad()
    return float(loss.detach()), norm


def _hf_logprobs(model: Any, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.cat(_hf_tables(model, batch, temperature))
    labels = torch.from_numpy(batch.ragged("response_ids").values.astype(np.int64))
    return table.gather(-1, labels[:, None])[:, 0], -(table.exp() * table).sum(-1)


def _hf_tables(model: Any, batch: Batch, temperature: float) -> list[torch.Tensor]:
    """[response tokens, vocabulary] of each row, natural log."""
    tables = []
    for prompt, response in zip(batch.lists("prompt_ids"), batch.lists("response_ids"), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        tables.append(torch.log_softmax(model(ids).logits[0].float() / temperature, -1)[len(prompt) - 1 : -1])
    return tables
