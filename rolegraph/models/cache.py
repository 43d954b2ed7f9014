"""From a `ModelConfig` to a Hugging Face folder on this machine, made or fetched on first use."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rolegraph.errors import ConfigError
from rolegraph.models.config import ModelConfig

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""What a run reads of a model on the hub: not its other weight formats."""


def cache_dir() -> Path:
    """Where made models are kept: `ROLEGRAPH_CACHE`, by default `~/.cache/rolegraph`."""
    return Path(os.environ.get("ROLEGRAPH_CACHE") or "~/.cache/rolegraph").expanduser().absolute()


def ensure(config: ModelConfig) -> str:
    """The folder of the model, which is made or downloaded first where it is not there yet.

    Safe to call from many processes at once: one makes the model, the others wait for it; a maker that is killed
    leaves nothing that a later run would take for the model.

    Raises:
        ConfigError: the settings name no model, or the model cannot be had (with what to do about it).
    """
    problems = config.problems()
    if problems:
        raise ConfigError("; ".join(problems))
    if config.maker is not None:
        return _made(config)
    assert config.path is not None
    return _found(config.path, config.revision)


def _made(config: ModelConfig) -> str:
    import filelock

    assert config.maker is not None
    maker = _maker(config.maker)
    try:
        bound = inspect.signature(maker).bind("", **config.args)
    except TypeError as error:
        names = list(inspect.signature(maker).parameters)[1:]
        raise ConfigError(f"model.args of {config.maker}: {error}; it takes {', '.join(names) or 'none'}") from None
    bound.apply_defaults()
    # The maker's own source is part of the key: a newer version of it never meets a model of the older one.
    module = importlib.util.find_spec(maker.__module__)
    source = Path(module.origin).read_bytes() if module and module.origin else b""
    key = json.dumps([config.maker, bound.arguments], sort_keys=True, default=str).encode() + source
    name = config.maker.split(".")[-2]
    root = cache_dir() / "models"
    folder = root / f"{name}-{hashlib.sha256(key).hexdigest()[:12]}"
    if folder.is_dir():
        return str(folder)
    root.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _make(maker, folder, config)
    return str(folder)


def _make(maker: Callable[..., object], folder: Path, config: ModelConfig) -> None:
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        maker(str(work), **config.args)
        if not (work / "config.json").is_file():
            raise ConfigError(f"model.maker={config.maker} wrote no config.json into the folder it was given")
        work.chmod(0o755)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _maker(path: str) -> Callable[..., object]:
    module, _, name = path.rpartition(".")
    try:
        maker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model.maker={path!r} cannot be imported: {error}") from error
    if not callable(maker):
        raise ConfigError(f"model.maker={path!r} is a {type(maker).__name__}, not a function make(folder, **args)")
    return maker  # type: ignore[no-any-return]


def _found(path: str, revision: str | None) -> str:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path={path!r} is a folder without config.json: name a Hugging Face model folder")
        return str(folder.absolute())
    if folder.is_file():
        raise ConfigError(f"model.path={path!r} is a file: name the Hugging Face folder of the model")
    if path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        raise ConfigError(f"model.path={path!r} does not exist, and a name on the hub looks like `owner/model`")
    return _download(path, revision)


def _download(name: str, revision: str | None) -> str:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(_HUB_FILES)))
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ConfigError(
            f"model.path={name!r} is no folder here, it is not in the Hugging Face cache, and {why}: "
            "download the model where there is a network, or give the folder of one (or try model=tiny)"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(f"model.path={name!r} cannot be fetched from the Hugging Face hub: {error}") from error
