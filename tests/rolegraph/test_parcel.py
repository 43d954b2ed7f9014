"""Code that travels: what is packed, what is refused, and where it is unpacked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rolegraph import parcel
from rolegraph.errors import ConfigError
from rolegraph.parcel import code_folder, files_of, imported_from, local_path, pack, unpack
from rolegraph.rewards.config import RewardConfig
from rolegraph.rewards.pool import VerifierPool


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of its own, and nothing unpacked yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(parcel, "_moved", {})
    return tmp_path


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    return folder


def names(folder: Path, *, whole: bool) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in files_of(folder, whole=whole)]


CODE = ["loose/b.py", "mine.py", "pkg/__init__.py", "pkg/sub/a.py", "pkg/words.txt"]
DATA = ["data/rows.json", "loose/corpus.txt", "notes.txt"]
LEFT = [".git/config", ".hidden", "pkg/__pycache__/a.pyc", "venv/pyvenv.cfg", "venv/x.py", "outputs/run/metrics.jsonl"]


def test_a_config_folder_travels_whole_without_what_is_no_code(tmp_path: Path) -> None:
    assert names(write(tmp_path / "mine", *CODE, *DATA, *LEFT), whole=True) == sorted(CODE + DATA)


def test_of_a_folder_that_code_comes_from_only_modules_and_packages_travel(tmp_path: Path) -> None:
    assert names(write(tmp_path / "home", *CODE, *DATA, *LEFT), whole=False) == CODE


def test_a_folder_that_is_missing_here_is_unpacked_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "mine.py", "pkg/__init__.py")
    packed = pack([str(folder)], [])
    folder.rename(tmp_path / "gone")
    unpack(packed)
    moved = Path(local_path(str(folder)))
    assert moved != folder
    assert moved.name == "mine"
    assert (moved / "pkg" / "__init__.py").read_text() == "# pkg/__init__.py\n"
    assert local_path(str(folder / "mine.py")) == str(moved / "mine.py")
    assert local_path(f"{folder}-other") == f"{folder}-other"
    before = (moved / "mine.py").stat().st_mtime_ns
    unpack(packed)
    assert (moved / "mine.py").stat().st_mtime_ns == before
    assert [path.name for path in moved.parent.parent.iterdir() if path.suffix == ".part"] == []


def test_a_folder_that_is_here_is_used_where_it_is_unless_it_differs(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "mine.py")
    packed = pack([str(folder)], [])
    unpack(packed)
    assert local_path(str(folder)) == str(folder)
    (folder / "mine.py").write_text("# an older copy\n")
    unpack(packed)
    assert Path(local_path(str(folder / "mine.py"))).read_text() == "# mine.py\n"


def test_what_is_too_large_is_refused_with_the_largest_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", "mine.py")
    (folder / "weights.bin").write_bytes(bytes(3 * 2**20))
    with pytest.raises(ConfigError) as caught:
        pack([str(folder)], [], limit_bytes=2 * 2**20)
    message = str(caught.value)
    assert "the code to be copied there is 3.0 MiB, more than 2" in message
    assert f"{folder}/weights.bin (3.0 MiB)" in message
    assert "placement.ship_code=false" in message
    assert pack([], [str(folder)], limit_bytes=2 * 2**20)[0].path == str(folder), "data beside code stays at home"


def test_a_folder_of_somebody_else_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "mine", "mine.py")
    packed = pack([str(folder)], [])
    folder.rename(tmp_path / "gone")
    taken = tmp_path / "tmp" / f"rolegraph-code-{parcel.os.getuid()}"
    (tmp_path / "theirs").mkdir()
    taken.symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        unpack(packed)


def test_plugins_lead_to_their_folders_and_installed_modules_to_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "plugins", "scores.py", "judges/__init__.py")
    monkeypatch.syspath_prepend(str(folder))
    assert code_folder(str(folder / "scores.py")) == str(folder)
    assert code_folder("scores") == str(folder)
    assert code_folder("judges.strict") == str(folder)
    for installed in ("json", "numpy", "rolegraph.rewards.functions", "roles.orm", "no_such_module"):
        assert code_folder(installed) is None


def test_folders_that_a_program_imported_from(tmp_path: Path) -> None:
    write(tmp_path / "project", "mine.py", "main.py")
    (tmp_path / "project" / "main.py").write_text(
        "import json, numpy, mine\nfrom rolegraph.parcel import imported_from\nprint(imported_from())\n"
    )
    env = {"PYTHONPATH": str(Path(parcel.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path / "project", env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([str(tmp_path / "project")])
    assert str(Path(__file__).parents[2]) in imported_from(), "the tests are no part of the installation"


def test_a_reward_plugin_is_found_where_it_was_unpacked(tmp_path: Path) -> None:
    folder = write(tmp_path / "plugins", "helper_of_plus.py")
    (folder / "helper_of_plus.py").write_text("ONE = 1.0\n")
    (folder / "plus_plugin.py").write_text(
        "from rolegraph.rewards import reward\nfrom helper_of_plus import ONE\n\n\n"
        "@reward('plus')\ndef plus(completions):\n    return [len(text) + ONE for text in completions]\n"
    )
    config = RewardConfig(reward_funcs=["plus"], external_plugins=[str(folder / "plus_plugin.py")])
    packed = pack([], [str(code_folder(plugin)) for plugin in config.external_plugins])
    folder.rename(tmp_path / "gone")
    unpack(packed)
    with VerifierPool(config) as pool:
        assert pool.score(["abc"], {})["plus"].values == [4.0]
