"""The package as it is shipped: its layout, its imports, and a wheel in an empty folder."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_files(*folders: str) -> list[Path]:
    """Source files below some folders of the repository."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def imported(file: Path) -> set[str]:
    """Modules that a file imports anywhere, TYPE_CHECKING blocks too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_setup_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in python_files("rolegraph", "roles")}
    assert sorted(listed) == sorted({*found, "rolegraph.conf"})


def test_every_package_has_an_init() -> None:
    for file in python_files("rolegraph", "roles"):
        assert (file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py"


@pytest.mark.parametrize("file", python_files("rolegraph"), ids=lambda file: str(file.relative_to(ROOT)))
def test_the_framework_imports_neither_roles_nor_engines(file: Path) -> None:
    forbidden = {"roles", "vllm", "megatron", "mbridge"}
    if "algorithms" in file.parts or "losses" in file.parts:
        forbidden |= {"ray"}
    assert not {name.split(".")[0] for name in imported(file)} & forbidden


def of_this_project(file: Path) -> set[str]:
    """The modules of this project, without the names in them, that a file imports."""
    return {name for name in imported(file) if name.split(".")[0] in ("rolegraph", "roles") and is_module(name)}


def is_module(name: str) -> bool:
    """Whether a name is a module or package of the repository."""
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def within(name: str, packages: set[str]) -> bool:
    """Whether a module is one of `packages` or below one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_algorithms_see_interfaces_batches_and_pure_functions() -> None:
    pure = ("interfaces", "batch", "errors", "role", "losses", "staleness", "turns", "journal", "json_rows", "results")
    pure += ("config.schema", "config.turn_rules", "data.column_types", "checkpoints.state", "checkpoints.resume")
    known = {f"rolegraph.{name}" for name in ("algorithms", "run", *pure)}
    for file in python_files("rolegraph/algorithms"):
        assert [name for name in of_this_project(file) if name != "rolegraph" and not within(name, known)] == [], file
        # The run is a type in annotations; at run time it comes as an argument.
        assert "from rolegraph.run" not in re.sub(r"if TYPE_CHECKING:\n(    .*\n)+", "", file.read_text())


KNOWN = {
    "teacher": {"train", "rollout"},
    "reward": {"train", "rollout"},
    "orm": {"reward", "rollout"},
    "prm": {"reward"},
    "sampler": {"reward", "rollout"},
}
"""Kinds of roles that build on others."""


def test_roles_know_neither_the_driver_nor_each_other() -> None:
    driver = {f"rolegraph.{name}" for name in ("algorithms", "run", "graph", "group", "cluster", "cli", "explain")}
    kinds = {file.parent.name for file in python_files("roles") if file.parent.name != "roles"}
    for file in python_files("roles"):
        # Teachers run the models of trainers and the engines of rollouts; reward roles share what they read and ask.
        known = KNOWN.get(file.parent.name, set())
        others = {f"roles.{kind}" for kind in kinds - known if kind not in file.relative_to(ROOT).parts}
        assert [name for name in of_this_project(file) if within(name, driver | others)] == [], file


def test_public_names_are_there_and_cost_nothing_before_they_are_used() -> None:
    program = (
        "import sys, rolegraph; light = not {'numpy', 'pyarrow', 'ray'} & set(sys.modules); "
        "print(light, all(getattr(rolegraph, name).__name__ == name for name in rolegraph.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_config_files_name_things_that_exist() -> None:
    import yaml

    from rolegraph.config.targets import signature_of

    for file in (ROOT / "conf").rglob("*.yaml"):
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        for node in (tree, tree.get("algorithm") or {}):
            if isinstance(node, dict) and "_target_" in node:
                assert signature_of(node["_target_"]).config is not None, file


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    """Build, install beside the packages of this environment, and plan from a folder with nothing in it."""
    source = tmp_path / "source"  # a copy, so that nothing is left in the repository or taken from an earlier build
    source.mkdir()
    for name in ("rolegraph", "roles", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([sys.executable, "-m", *build], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("rolegraph-*.whl")
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    site = next(home.glob("lib/python*/site-packages"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    # After its own site-packages, so that the wheel is found before this environment's editable install.
    (site / "zz_environment.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()

    def rolegraph(*words: str) -> subprocess.CompletedProcess[str]:
        program = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in str(f)]; "
        program += "from rolegraph.cli import main; main()"
        command = [str(home / "bin" / "python"), "-c", program, *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=empty, check=False)

    where = subprocess.run(
        [str(home / "bin" / "python"), "-c", "import rolegraph.conf; print(rolegraph.conf.__file__)"],
        capture_output=True, text=True, cwd=empty, check=True,
    )  # fmt: skip
    assert str(site) in where.stdout
    assert "rolegraph run" in rolegraph("--help").stdout
    planned = rolegraph("plan", "experiment=quickstart", "placement.device=cpu")
    assert planned.returncode == 0, planned.stderr
    assert "rollout" in planned.stdout
    refused = rolegraph("run", "algorithm=grpo", "+algorithm.epsilonn=1")
    assert refused.returncode == 2
    assert "algorithm.epsilon?" in refused.stderr
    assert not list(empty.iterdir())
