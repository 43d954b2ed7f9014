"""What a call through a group costs beside the same by hand with plain Ray and Arrow: medians and ratios.

Run it as `python -m tests.benchmarks core`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from rolegraph.batch import Batch, Ragged
from rolegraph.futures import run_sync
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.group import group_of
from rolegraph.host import RoleSpec
from rolegraph.placement import Plan, Slot
from rolegraph.role import Mesh, Role, endpoint
from tests.benchmarks.measure import median, show

ROWS, PROMPT, RESPONSE, RUNS = 1024, 256, 512, 15


class Echo(Role):
    """Gives back what it got."""

    @endpoint()
    def noop(self) -> None:
        return None

    @endpoint(dispatch="slice", collect="flatten")
    def identity(self, batch: Batch) -> Batch:
        return batch


@ray.remote
class PlainEcho:
    """The same without a framework."""

    def noop(self) -> None:
        return None

    def identity(self, table: pa.Table) -> pa.Table:
        return table


def columns() -> dict[str, Any]:
    """1,024 rows of 256 prompt tokens, 512 response tokens and as many logprobs: 5.2 MB."""

    def ragged(width: int, dtype: type) -> Ragged:
        return Ragged(np.arange(ROWS * width).astype(dtype), np.arange(ROWS + 1, dtype=np.int32) * width)

    return {
        "uid": [f"row-{i}" for i in range(ROWS)],
        "prompt_ids": ragged(PROMPT, np.int32),
        "response_ids": ragged(RESPONSE, np.int32),
        "rollout_logprobs": ragged(RESPONSE, np.float32),
    }


def compact_by_hand(table: pa.Table, start: int, stop: int) -> pa.Table:
    """What a careful user writes: a part that pickles only its own rows."""
    arrays = {"uid": pa.array(table["uid"].slice(start, stop - start).to_pylist())}
    for name in table.column_names[1:]:
        whole = table[name].chunk(0)
        offsets = whole.offsets.to_numpy()[start : stop + 1]
        values = whole.values.to_numpy()[offsets[0] : offsets[-1]]
        arrays[name] = pa.ListArray.from_arrays(pa.array(offsets - offsets[0]), pa.array(values))
    return pa.table(arrays)


def interleaved(*calls: Callable[[], object], runs: int = RUNS) -> list[list[float]]:
    """Milliseconds of each call, the calls taking turns so that a busy machine is busy for all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for run in range(runs + 3):
        for call, seen in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            if run >= 3:
                seen.append(1000 * (time.perf_counter() - started))
    return times


def measure() -> list[tuple[str, float, float, float | None]]:
    """(what, ours in ms, by hand in ms, goal of the ratio) of every comparison."""
    mesh = Mesh(dp=2)
    slots = tuple(Slot("echo", rank, "this machine", "cpu", (), 0.0, 1, mesh.at(rank)) for rank in range(2))
    plan = Plan({"echo": slots}, (("echo",),), "cpu")
    with RoleGraph(plan, {"echo": RoleSpec(Echo)}, GraphOptions(exp_name="benchmark")) as graph:
        echo = graph.handle("echo", Echo)
        one = group_of(echo).rank(0)
        actors = [PlainEcho.options(num_cpus=0).remote() for _ in range(2)]
        batch, table = Batch.from_columns(columns()), Batch.from_columns(columns()).table
        half = ROWS // 2

        def by_hand() -> pa.Table:
            parts = [compact_by_hand(table, 0, half), compact_by_hand(table, half, ROWS)]
            return pa.concat_tables(ray.get([a.identity.remote(p) for a, p in zip(actors, parts, strict=True)]))

        shared = echo.identity.sync(batch)
        refs = [ray.put(compact_by_hand(table, 0, half)), ray.put(compact_by_hand(table, half, ROWS))]

        # No goal here: ours brings the light columns to the driver besides, by hand nothing comes.
        def refs_by_hand() -> None:
            out = [a.identity.remote(ref) for a, ref in zip(actors, refs, strict=True)]
            ray.wait(out, num_returns=2, fetch_local=False)

        def awaited(call: Callable[[], Awaitable[object]]) -> Callable[[], None]:
            async def ten() -> None:
                for _ in range(10):
                    await call()

            return lambda: run_sync(ten())

        rows = []
        for what, ours, plain, goal, runs in (
            ("no-op, one actor", one.noop.sync, lambda: ray.get(actors[0].noop.remote()), 1.3, 200),
            ("no-op, both actors", echo.noop.sync, lambda: ray.get([a.noop.remote() for a in actors]), 1.3, 200),
            ("no-op, ten awaited", awaited(one.noop), awaited(actors[0].noop.remote), 1.3, 20),
            ("identity, there and back", lambda: echo.identity.sync(batch).fetch_sync(), by_hand, 1.2, RUNS),
            ("identity, references", lambda: echo.identity.sync(shared), refs_by_hand, None, RUNS),
        ):
            mine, theirs = interleaved(ours, plain, runs=runs)
            rows.append((what, median(mine), median(theirs), goal))
        return rows


def main() -> None:
    """Print the table."""
    show(
        f"Calls through a group of actors; the batch has {ROWS} rows of {PROMPT} + {RESPONSE} tokens",
        ("call", "rolegraph, ms", "by hand, ms", "ratio", "goal"),
        [
            (what, f"{ours:.2f}", f"{plain:.2f}", f"{ours / plain:.2f}", f"<= {goal}" if goal else "-")
            for what, ours, plain, goal in measure()
        ],
    )


if __name__ == "__main__":
    main()
