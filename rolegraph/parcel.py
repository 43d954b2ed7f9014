"""The user's own code on other nodes: folders as small archives, unpacked where a node does not have them.

Ray would ship a folder by `runtime_env`, and start a pool of workers for each set of folders and variables. Here the
archives are one object in Ray's store, and an actor takes it before it imports the role.

Shipped are folders given by `--config-dir`, whole; and folders that code was imported from or that hold a plugin, their
Python files and packages only, for such a folder may be anybody's home. What is installed is expected on every node.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import sysconfig
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolegraph.errors import ConfigError

LIMIT_BYTES = 32 * 2**20
"""Most that is shipped in all, before compression: code is small, and what is larger is data."""
SKIPPED = frozenset(("__pycache__", "node_modules", "site-packages", "outputs", "multirun", "wandb"))
"""Folders that hold no code of the user's; hidden ones and virtual environments are left out as well."""


@dataclass(frozen=True)
class Folder:
    """A folder of code as it travels."""

    path: str
    """Where it is on the driver's node."""
    whole: bool
    """All its files, or its Python files and packages only."""
    digest: str
    """Of the names and the contents of its files."""
    archive: bytes


def files_of(folder: Path, *, whole: bool) -> list[Path]:
    """The files that travel, in a fixed order."""
    return sorted(_walk(folder) if whole else _code(folder))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder and can be read."""
    try:
        return [entry for entry in os.scandir(folder) if os.access(entry.path, os.R_OK)]
    except PermissionError:
        return []


def _walk(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.is_dir():
            if not _is_skipped(Path(entry.path)):
                yield from _walk(Path(entry.path))
        elif entry.is_file() and not entry.name.startswith("."):
            yield Path(entry.path)


def _code(folder: Path) -> Iterator[Path]:
    """Python files, everything in the packages beside them, and the same of folders that hold Python files."""
    for entry in _entries(folder):
        path = Path(entry.path)
        if entry.is_file() and path.suffix == ".py":
            yield path
        elif entry.is_dir() and not _is_skipped(path):
            if (path / "__init__.py").is_file():
                yield from _walk(path)
            elif any(path.glob("*.py")):
                yield from _code(path)


def _is_skipped(folder: Path) -> bool:
    name = folder.name
    return name in SKIPPED or name.startswith(".") or (folder / "pyvenv.cfg").exists() or folder.is_symlink()


def digest_of(folder: Path, files: Iterable[Path]) -> str:
    """A digest of the names below `folder` and the contents of files."""
    seen = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        seen.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        seen.update(content)
    return seen.hexdigest()[:16]


def pack(whole: Sequence[str], code: Sequence[str], limit_bytes: int = LIMIT_BYTES) -> tuple[Folder, ...]:
    """Pack folders to be shipped; ConfigError names the largest files when they are too large together."""
    wanted = {str(Path(path).resolve()): False for path in code} | {str(Path(path).resolve()): True for path in whole}
    found = {path: files_of(Path(path), whole=is_whole) for path, is_whole in wanted.items() if Path(path).is_dir()}
    _check_size([file for files in found.values() for file in files], limit_bytes)
    packed = []
    for path, files in found.items():
        if files:
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
                for file in files:
                    archive.write(file, file.relative_to(path))
            packed.append(Folder(path, wanted[path], digest_of(Path(path), files), buffer.getvalue()))
    return tuple(packed)


def _check_size(files: Sequence[Path], limit_bytes: int) -> None:
    sizes = {file: file.stat().st_size for file in files}
    if (total := sum(sizes.values())) <= limit_bytes:
        return
    largest = sorted(sizes, key=lambda file: -sizes[file])[:3]
    shown = ", ".join(f"{file} ({sizes[file] / 2**20:.1f} MiB)" for file in largest)
    raise ConfigError(
        f"the run uses other nodes, and the code to be copied there is {total / 2**20:.1f} MiB, more than "
        f"{limit_bytes / 2**20:g}: move what is no code out of those folders (the largest files: {shown}), or set "
        "placement.ship_code=false where every node has the same folders"
    )


_moved: dict[str, str] = {}
"""Folders of the driver's node, and where this process has them."""


def unpack(folders: Iterable[Folder]) -> None:
    """Make the folders available here: as they are where the node has the same, else in a folder of this user."""
    for folder in folders:
        here = Path(folder.path)
        try:
            same = here.is_dir() and digest_of(here, files_of(here, whole=folder.whole)) == folder.digest
        except OSError:
            same = False
        if not same:
            _moved[folder.path] = str(_unpacked(folder))


def local_path(path: str) -> str:
    """Where a path of the driver's node is here: the same, unless its folder was shipped."""
    for folder, moved in _moved.items():
        if path == folder or path.startswith(folder + os.sep):
            return moved + path[len(folder) :]
    return path


def _unpacked(folder: Folder) -> Path:
    """The folder's files below the system's temporary folder; unpacked once a node and content."""
    home = Path(tempfile.gettempdir(), f"rolegraph-code-{os.getuid()}")
    home.mkdir(mode=0o700, exist_ok=True)
    if home.stat().st_uid != os.getuid() or home.is_symlink():
        raise PermissionError(f"{home} belongs to somebody else: remove it, or set TMPDIR where Ray is started")
    target = home / f"{folder.digest}-{hashlib.sha256(folder.path.encode()).hexdigest()[:8]}" / Path(folder.path).name
    if target.is_dir():
        return target
    fresh = home / f"{uuid.uuid4().hex}.part"
    with zipfile.ZipFile(io.BytesIO(folder.archive)) as archive:
        archive.extractall(fresh / target.name)
    try:
        fresh.rename(target.parent)
    except OSError:
        # Another actor of this node was first.
        if not target.is_dir():
            raise
    return target


def imported_from() -> list[str]:
    """Folders outside the installation that this program has imported modules from."""
    found: dict[str, None] = {}
    for name, module in list(sys.modules.items()):
        # This package is installed on every node, also where it is installed as a link to its sources.
        if "." in name or name in ("__main__", "rolegraph", "roles"):
            continue
        # A package without an __init__.py has a path and no file.
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        if file and (file.endswith(".py") or Path(file).is_dir()) and (root := _root(Path(file))) is not None:
            found[root] = None
    return list(found)


def code_folder(name: str) -> str | None:
    """The folder that a plugin's file or module is imported from; null for what is installed, or not there."""
    from rolegraph.config.targets import module_file  # brings what configs are made with; actors need none of it

    if name.endswith(".py"):
        return str(Path(name).expanduser().resolve().parent)
    head = name.partition(".")[0]
    file = module_file(head) if head not in ("rolegraph", "roles") else None
    return _root(file) if file is not None else None


def _root(file: Path) -> str | None:
    """The folder on the import path for a top-level module's file; null where that belongs to the installation."""
    path = file.resolve()
    installed = {Path(folder).resolve() for folder in sysconfig.get_paths().values()}
    installed |= {Path(folder).resolve() for folder in sys.path if Path(folder).name.endswith("-packages")}
    if any(path.is_relative_to(folder) for folder in installed):
        return None
    return str(path.parent.parent if path.stem == "__init__" else path.parent)
