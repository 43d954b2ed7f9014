"""Decorated classes on Ray: several actors a group, shared devices, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rolegraph.batch import Batch
from rolegraph.decorators import initialize
from rolegraph.errors import PlanError, RoleError
from rolegraph.host import descendants
from tests.rolegraph.fakes import is_running, wait_gone
from tests.rolegraph.workers import Broken, Calculator, MyTrainer, arguments

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]

TWO = {
    "nproc_per_node": 4,
    "group1": {"device": "CPU", "ranks": 2, "workers": ["model1"]},
    "group2": {"device": "cpu", "ranks": "2", "workers": ["model2", "calc"]},
}


@pytest.fixture
def free(ray_cluster: None) -> Iterator[dict[str, Any]]:
    """What the cluster has free; it has the same afterwards."""
    before = ray.available_resources()
    yield before
    deadline = time.monotonic() + 10
    while (after := ray.available_resources()) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    wanted = {kind: before.get(kind) for kind in ("CPU", "GPU")}
    assert {kind: after.get(kind) for kind in ("CPU", "GPU")} == wanted


@pytest.mark.usefixtures("free")
def test_on_cpu_groups_the_program_gives_what_it_gives_locally(tmp_path: Path) -> None:
    with initialize(use_ray=False):
        expected = MyTrainer(arguments()).train()
    with initialize(TWO, output_dir=tmp_path, env={"TOLD": "yes"}):
        trainer = MyTrainer(arguments())
        calc = Calculator(1)  # shares the cores of model2, in processes of its own
        assert trainer.prepared == [None, None]
        assert trainer.train() == expected
        told = trainer.what_is_here()
        assert len({one["pid"] for one in told} | {os.getpid()}) == 3
        assert [(one["where"], one["size"], one["has_bias"]) for one in told] == [("model1", 7, False)] * 2
        assert {one["told"] for one in told} == {"yes"}
        assert len(trainer.forward_model2([1])) == 2
        both = trainer.step(0)
        assert trainer.update(5) == both[0] // 2 + 5
        assert trainer.step(0) == [both[0] + 10, both[1]], "first asked rank 0 alone"
        check_every_kind(calc)
        with pytest.raises(RoleError, match=r"role model2 rank 1 on .* in fail_on\(\): ValueError: 4 cannot") as caught:
            trainer.fail_on([1, 2, 3, 4], 4)
        assert "workers.py" in caught.value.remote_traceback.splitlines()[1]
        with pytest.raises(RoleError, match=r"ask_model2\(\).*called in an actor of group model1: only the driver"):
            trainer.ask_model2()
        with pytest.raises(RoleError, match=r"role model2 rank [01] on .* in die\(\): the actor died"):
            trainer.die()
    assert {file.name for file in (tmp_path / "logs").iterdir()} >= {"model1-0.log", "model2-1.log", "calc-0.log"}


def check_every_kind(calc: Calculator) -> None:
    """Two actors dispatch and collect as declared."""
    assert calc.squares([3, 1, 2]) == [2, 5, 10]
    assert calc.scaled({"a": [1, 2], "b": [3, 4]}, scale=2) == [{"a": 2, "b": 6}, {"a": 6, "b": 12}]
    assert calc.weighted([1, 2, 3], np.ones(3), (5, 6)) == [8.0, 11.0, 14.0]
    assert calc.weighted([1], np.ones(3), (5, 6)) == [8.0]
    assert calc.halves([4, 6, 8]) == ([2.0, 3.0, 4.0], ["4", "6", "8"])
    assert calc.halves([]) == ([], [])
    batch = calc.tokens(Batch.from_columns({"n": [1, 2, 3]}))
    assert not batch.is_local, "token columns stay in the object store"
    assert batch.fetch_sync()["ids"].to_pylist() == [[1, 2], [2, 3], [3, 4]]
    assert calc.tokens(batch.slice(1)).fetch_sync()["ids"].to_pylist() == [[2, 3], [3, 4]]


@pytest.mark.usefixtures("free")
def test_groups_on_gpus_and_an_exception_in_the_program(tmp_path: Path) -> None:
    groups = {
        "one": {"device": "GPU", "ranks": 1, "workers": ["model1", "calc"]},
        "two": {"device": "GPU", "ranks": "[1]", "workers": ["model2", "broken"]},
    }
    with pytest.raises(KeyError), initialize(groups, output_dir=tmp_path):
        trainer, calc = MyTrainer(arguments()), Calculator(1)
        assert (calc.squares([2]), trainer.forward_model2([1])) == ([5], [1.5])
        with pytest.raises(RoleError, match=r"role broken rank 0 on .* in setup\(\): OSError: no such weights"):
            Broken()
        assert trainer.forward_model2([2]) == [2.5], "the others live on"
        raise KeyError("of the program")


@pytest.mark.usefixtures("free")
def test_groups_that_do_not_fit_fail_at_once() -> None:
    started = time.perf_counter()
    with pytest.raises(PlanError, match=r"(?s)device_groups.g asks for devices 2, 3, and the cluster has.*need.*have"):
        initialize({"g": {"device": "GPU", "ranks": 4, "workers": ["calc"]}})
    assert time.perf_counter() - started < 3


DRIVER = """
import sys, time
from rolegraph.decorators import initialize, take_device_groups
from tests.rolegraph.workers import MyTrainer, arguments

initialize(take_device_groups(), output_dir=sys.argv[1])
trainer = MyTrainer(arguments())
print("ready", flush=True)
if sys.argv[2] == "raise":
    raise KeyError("of the program")
while True:
    trainer.train()
"""


@pytest.mark.parametrize("end", ["interrupt", "raise"])
def test_a_program_without_a_block_leaves_nothing_behind(end: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("RAY_ADDRESS", None)
    groups = '{"g": {"device": "CPU", "ranks": 1, "workers": ["model1", "model2"]}}'
    command = [sys.executable, "-c", DRIVER, str(tmp_path), end, "--device_groups", groups]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)
    assert driver.stdout is not None
    try:
        line = driver.stdout.readline()
        assert line.startswith("ready"), line + driver.stdout.read()
        family = descendants(driver.pid)
        if end == "interrupt":
            assert len(family) > 5
            driver.send_signal(signal.SIGINT)
        out = driver.stdout.read()
        driver.wait(timeout=20)
        assert ("KeyboardInterrupt" if end == "interrupt" else "KeyError: 'of the program'") in out
        assert wait_gone(family, seconds=3) == []
        assert not [pid for pid in family if is_running(pid)]
    finally:
        driver.kill()
