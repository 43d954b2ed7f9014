"""How long a checkpoint keeps training waiting, beside `torch.save` of the same state, which does so until its end.

The real model in float32, on one rank, in a process of its own; medians over saves after the first, whose host memory
has to be paged in. Steps while a save is written are set beside steps alone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rolegraph.models import ModelConfig, ensure
from tests.benchmarks.measure import median, run, show

MAKER = "rolegraph.models.smollm2.make"
SAVES = 4


def side(model: str) -> None:
    """Save in turn by both in this process, and print what it took."""
    import torch

    from rolegraph.interfaces import LossSpec
    from rolegraph.role import RoleContext
    from roles.train import optimizer_state
    from roles.train.config import MegatronTrainConfig
    from roles.train.megatron import MegatronTrain
    from tests.benchmarks.train_step import CASES, rows
    from tests.roles.train.megatron_workers import free_port

    context = RoleContext(role="train", threads=os.cpu_count() or 1, master_port=free_port())
    role = MegatronTrain(MegatronTrainConfig(model=model, lr=1e-6), context)
    role.setup()
    batch, loss = rows(CASES[1]).slice(0, 4), LossSpec("tests.losses_for_tests.nll")

    def step() -> Any:
        return role.step(batch, loss=loss)

    step()
    found: dict[str, list[float]] = {name: [] for name in ("step", "blocked", "step_beside", "written", "torch")}
    folder = Path(tempfile.mkdtemp())
    try:
        for number in range(SAVES):
            found["step"].append(_timed(step))
            path = folder / str(number)
            path.mkdir()
            began = time.perf_counter()
            role.save(str(path))
            found["blocked"].append(time.perf_counter() - began)
            found["step_beside"].append(_timed(step))
            role.finish_save()
            found["written"].append(time.perf_counter() - began)
            size = sum(file.stat().st_size for file in path.iterdir())
            shutil.rmtree(path)
            state = {"model": role._policy.model.state_dict(), "optimizer": optimizer_state.whole(role._policy)}
            found["torch"].append(_timed(partial(_saved, state, folder / "state.pt")))
            (folder / "state.pt").unlink()
    finally:
        shutil.rmtree(folder)
    assert torch.isfinite(torch.tensor(found["blocked"])).all()
    print("FIGURES " + json.dumps({name: values[1:] for name, values in found.items()} | {"mib": size / 2**20}))


def _saved(state: Any, path: Path) -> None:
    """A plain save that is on the disk when it ends, as a checkpoint is."""
    import torch

    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Print what a save costs the steps, beside the plain one."""
    from roles.train.megatron import MegatronTrain

    model = ensure(ModelConfig(maker=MAKER))
    environment = [f"{name}={value}" for name, value in MegatronTrain.environment.items()]
    finished = run(["env", *environment, sys.executable, "-m", "tests.benchmarks.checkpoint", model])
    line = next(line for line in finished.output.splitlines() if line.startswith("FIGURES "))
    figures = json.loads(line.removeprefix("FIGURES "))
    mib = figures.pop("mib")
    seconds = {name: median(values) for name, values in figures.items()}
    table = [
        ("save() of the role keeps training waiting", seconds["blocked"], seconds["torch"] / seconds["blocked"]),
        ("until it is written, one step beside it", seconds["written"], seconds["torch"] / seconds["written"]),
        ("torch.save, until it is on the disk", seconds["torch"], 1.0),
        ("a step while a checkpoint is written", seconds["step_beside"], seconds["step"] / seconds["step_beside"]),
        ("a step alone", seconds["step"], 1.0),
    ]
    show(f"a checkpoint of smollm2_135m, {mib:.0f} MiB", ("", "s", "torch.save, or a step alone, / it"), table)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        side(sys.argv[1])
    else:
        main()
