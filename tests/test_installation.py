"""The versions installed, those of the constraints file, and the ranges of pyproject.toml agree."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / ".ci" / "constraints-cpu.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def installed(name: str) -> str | None:
    """The version of a package, null where it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def asked(*extras: str) -> list[Requirement]:
    """What the project asks for, with extras, those of its own name spelt out."""
    found = []
    for line in [*PROJECT["dependencies"], *(r for extra in extras for r in PROJECT["optional-dependencies"][extra])]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            found += [r for r in asked(*sorted(requirement.extras)) if r not in found]
        else:
            found.append(requirement)
    return found


def constraints() -> dict[str, str]:
    """The pinned version of each package."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    # Names and public versions alone: no path, no address, and no build of torch that only one index has.
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)] == []
    pins = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines)}
    assert len(pins) == len(lines), "a package is pinned twice"
    return pins


KIND = "cpu" if installed("vllm") is None else "gpu"


@pytest.mark.parametrize("requirement", asked(KIND, "dev", "bench", "examples"), ids=lambda r: str(r.name))
def test_what_is_installed_is_what_the_project_asks_for(requirement: Requirement) -> None:
    found = installed(requirement.name)
    assert found is not None, f"{requirement.name} is not installed: run `make install`"
    assert requirement.specifier.contains(found, prereleases=True), f"{requirement}: {found} is installed"


def test_the_tried_set_holds_all_that_the_project_asks_for() -> None:
    pins = constraints()
    for requirement in asked("cpu", "dev", "bench", "examples"):
        if requirement.name == "setuptools":
            continue  # as new as it comes, like pip
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} has no line in {CONSTRAINTS.name}: write what `pip freeze` shows"
        assert requirement.specifier.contains(pin), f"{requirement}: {CONSTRAINTS.name} has {pin}"


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Run make in the repository's root, as nobody's child."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", *words, "KIND=cpu"]
    return subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.mark.parametrize(("given", "kept"), [((), True), (("CONSTRAINTS=",), False)])
def test_make_keeps_to_the_tried_set_unless_told_not_to(given: tuple[str, ...], kept: bool) -> None:
    done = make("--dry-run", "--always-make", "install", *given)
    (line,) = (line for line in done.stdout.splitlines() if "cpu,dev,bench,examples" in line)
    assert ("-c .ci/constraints-cpu.txt" in line) == kept


def test_what_failed_is_said_last_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, code in (("ruff", 0), ("mypy", 1), ("python", 0)):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/ran\nexit {code}\n')
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".installed-cpu").touch()
    done = make("test", f"VENV={tmp_path}")
    assert done.returncode == 2
    assert "make test: failed; mypy" in done.stdout.splitlines()[-2:]
    ran = (tmp_path / "ran").read_text().splitlines()
    assert ran[:3] == ["ruff check .", "ruff format --check .", "mypy "]
    assert re.fullmatch(r"python -m pytest -n 2 .* -m not engine and not ray and not slow --durations=\d+", ran[3])
    assert re.fullmatch(r"python -m pytest -n 2 .* -m engine or ray or slow --durations=\d+", ran[4])
    assert len(ran) == 5
