"""Rows a second of a sampling graph, beside its engine alone and beside scoring in blocking turns.

The engine alone draws all candidates of all rows by one call. The graph draws the same ones batch by batch, asks a prm
and an orm (reward functions), and writes everything to disk. In blocking turns it does so one call after the other. All
three use the same started engine, in turn, several times over. The second table has roles that sleep in the place of
those that compute: there the figures are those of the machinery alone, and scoring costs as much as is said.

`python -m tests.benchmarks sampling`
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolegraph.algorithms.sampling import Sampling
from rolegraph.algorithms.sampling_config import SamplingConfig
from rolegraph.batch import Batch
from rolegraph.cluster import Cluster
from rolegraph.config import load
from rolegraph.config.schema import RunConfig
from rolegraph.data import Dataset
from rolegraph.data import load as load_data
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.host import RoleSpec
from rolegraph.models import ensure
from rolegraph.placement import Plan, plan, requests, this_machine
from rolegraph.run import Run
from rolegraph.telemetry import Telemetry
from rolegraph.wiring import import_target, scorers_of, with_models
from tests.benchmarks.measure import median, show
from tests.rolegraph.samplers import STUBS, config_of, dataset, slots_of

ROUNDS = 3
GOAL = 0.95
MODELS = (("tiny", 256, 64), ("smollm2_10_layers", 128, 24))
"""Model, rows, tokens a candidate."""
SLEEPS = ((0.1, 0.02), (0.1, 0.1))
"""Seconds of a sampler's call of 4 rows, and of a scorer's call of 4 or 8 candidates."""


@dataclass
class Bench:
    """A started graph, and what it is to do."""

    config: RunConfig
    graph: RoleGraph
    data: Dataset

    @property
    def handles(self) -> dict[str, Any]:
        """By role."""
        return {role: self.graph.groups[role].handle for role in self.config.roles}

    async def alone(self) -> float:
        """Seconds of one call of the sampler for everything."""
        options: SamplingConfig = self.config.algorithm.config
        sampling = options.sampling(n=options.num_return_sequences, seed=0, step=0)
        started = time.monotonic()
        await self.handles["sampler"].sample(self.data.rows, sampling)
        return time.monotonic() - started

    async def whole(self, *, blocking: bool) -> float:
        """Seconds of a sampling run, files and all."""
        folder = Path(tempfile.mkdtemp())
        config = replace(self.config, deterministic=blocking)
        Sampling.begin(config, folder)
        telemetry = Telemetry(folder)
        try:
            run = Run(config, self.data, telemetry, scorers=scorers_of(config, self.handles))
            algorithm = Sampling(config.algorithm.config, run)
            for role, handle in self.handles.items():
                setattr(algorithm, role, handle)
            started = time.monotonic()
            await algorithm.run()
            return time.monotonic() - started
        finally:
            telemetry.close()
            shutil.rmtree(folder)

    async def row(self, name: str) -> tuple[object, ...]:
        """A line of the table: medians over rounds that go over all three, so that a busy moment hits them alike."""
        await self.alone()
        found: dict[str, list[float]] = {"alone": [], "graph": [], "turns": []}
        for _ in range(ROUNDS):
            found["alone"].append(await self.alone())
            found["graph"].append(await self.whole(blocking=False))
            found["turns"].append(await self.whole(blocking=True))
        alone, graph, turns = (len(self.data) / median(found[key]) for key in ("alone", "graph", "turns"))
        return name, alone, graph, turns, f"{graph / alone:.3f}", f">= {GOAL}", f"{graph / turns:.2f}"


async def started(
    stack: AsyncExitStack, config: RunConfig, placed: Plan, specs: Mapping[str, RoleSpec], data: Dataset
) -> Bench:
    """The roles, up until the stack is closed."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    options = GraphOptions(exp_name="bench-sampling", run_dir=folder, seed=config.seed)
    return Bench(config, await stack.enter_async_context(RoleGraph(placed, specs, options)), data)


async def with_engine(model: str, rows: int, tokens: int) -> tuple[object, ...]:
    """The figures of a vLLM engine and reward functions."""
    words = [
        *("algorithm=sampling", f"model={model}", "data=arithmetic", f"data.size={rows}"),
        *("orm=functions", "reward=reasoning_gym", "prm=functions", "sampler.max_num_seqs=64"),
        *("algorithm.num_return_sequences=4", "algorithm.num_sampling_batch_size=32"),
        f"algorithm.max_completion_length={tokens}",
    ]
    config = load(words).run
    path = ensure(config.model)
    config = with_models(config, path)
    data = load_data(config.data, path, config.data_needs, use_ray=True)
    placed = plan(this_machine(), requests(config.roles), config.placement)
    specs = {role: RoleSpec(import_target(spec.target), spec.config) for role, spec in config.roles.items()}
    async with AsyncExitStack() as stack:
        bench = await started(stack, config, placed, specs, data)
        return await bench.row(f"{model}: {rows} rows x 4 x {tokens} tokens")


async def with_sleepers(sample_s: float, score_s: float) -> tuple[object, ...]:
    """The figures of roles that sleep."""
    options = SamplingConfig(num_return_sequences=4, num_sampling_batch_size=16)
    config = config_of(options, STUBS)
    settings = {"sampler": {"seconds": sample_s}, "prm": score_s, "orm": score_s}
    specs = {role: RoleSpec(kind, settings[role]) for role, kind in STUBS.items()}
    placed = Plan(slots_of(dict.fromkeys(STUBS, 1)), tuple((role,) for role in STUBS), "cpu")
    found = dataset(256)
    data = Dataset(Batch(found.rows.table).share(), found.report)
    async with AsyncExitStack() as stack:
        bench = await started(stack, config, placed, specs, data)
        return await bench.row(f"{sample_s:g} s to draw, {score_s:g} s to score")


def main() -> None:
    """Print both tables."""
    header = ("", "engine alone", "graph", "in turns", "graph / alone", "goal", "graph / turns")
    cluster = Cluster.connect(this_machine().cpus)
    try:
        show("Rows a second", header, [asyncio.run(with_engine(*model)) for model in MODELS])
        show("Rows a second of roles that sleep", header, [asyncio.run(with_sleepers(*case)) for case in SLEEPS])
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
