"""Seconds until what was killed works again, beside those of a plain start of the same role on the same cluster.

A replica of the rollout is killed beside another one, and counted until it may draw; the train group is killed, started
again and has loaded a checkpoint. Both take a process, imports, a model and an engine, as the plain start does: the
ratio says what noticing the death, cleaning up and bringing up to date add to that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from rolegraph.batch import Batch
from rolegraph.cluster import Cluster
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.host import RoleSpec
from rolegraph.interfaces import RolloutRole, SamplingParams, TrainRole
from rolegraph.models import ModelConfig, ensure
from rolegraph.placement import Inventory, Node, PlacementConfig, Plan, plan, requests
from rolegraph.recovery import Care
from roles.rollout.config import VLLMRolloutConfig
from roles.rollout.vllm import VLLMRollout
from roles.train.config import MegatronTrainConfig
from roles.train.megatron import MegatronTrain
from tests.benchmarks.measure import show

CORES = 4.0


def placed(spec: RoleSpec, role: str) -> Plan:
    """A role on cores of this machine."""
    return plan(Inventory((Node("here", (), CORES),)), requests({role: spec}), PlacementConfig(device="cpu"))


def rollout_spec(model: str, replicas: int) -> RoleSpec:
    """Engines that draw with the tiny model."""
    return RoleSpec(VLLMRollout, VLLMRolloutConfig(replicas=replicas, cpus=1, model=model, max_model_len=128, seed=0))


async def replica(model: str, folder: Path) -> tuple[float, float]:
    """Seconds of the plain start of one replica, and until one that was killed works again."""
    alone, both = rollout_spec(model, 1), rollout_spec(model, 2)
    options = GraphOptions("recovery-plain", str(folder))
    async with RoleGraph(placed(alone, "rollout"), {"rollout": alone}, options) as graph:
        plain = graph.startup["rollout"]
    prompts = Batch.from_columns({"uid": [f"p{n}" for n in range(8)], "prompt_ids": [[5, 6, 7]] * 8})
    sampling = SamplingParams(n=1, max_tokens=16, ignore_eos=True, seed=1)
    options = GraphOptions("recovery", str(folder))
    async with RoleGraph(placed(both, "rollout"), {"rollout": both}, options, care=Care()) as graph:
        group: Any = graph.group("rollout")
        os.kill((await group.metrics())[1]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        rows = await graph.handle("rollout", RolloutRole).generate(prompts, sampling)
        assert len(rows) == len(prompts)
        while len(group.alive) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return plain, time.monotonic() - killed


async def trainer(model: str, folder: Path) -> tuple[float, float]:
    """Seconds of the plain start of a train group, and until one that was killed has loaded its checkpoint."""
    spec = RoleSpec(MegatronTrain, MegatronTrainConfig(ranks=1, cpus=1, model=model, seed=0))
    saved = folder / "checkpoint"
    saved.mkdir()
    options = GraphOptions("recovery-train", str(folder))
    async with RoleGraph(placed(spec, "train"), {"train": spec}, options) as graph:
        train: Any = graph.handle("train", TrainRole)
        await train.save(str(saved))
        await train.finish_save()
        group: Any = graph.group("train")
        os.kill((await group.metrics())[0]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        group.members[:] = await graph.start_again("train")
        await train.load(str(saved))
        return graph.startup["train"], time.monotonic() - killed


def main() -> None:
    """Print a row a role."""
    model = ensure(ModelConfig(maker="rolegraph.models.tiny.make"))
    cluster = Cluster.connect(CORES)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = {
                "rollout, one of two replicas": asyncio.run(replica(model, Path(folder))),
                "train, with its checkpoint": asyncio.run(trainer(model, Path(folder))),
            }
    finally:
        cluster.stop()
    rows = [(name, plain, again, again / plain) for name, (plain, again) in found.items()]
    show("seconds until what was killed works again (tiny)", ("", "plain start", "after a kill", "ratio"), rows)


if __name__ == "__main__":
    main()
