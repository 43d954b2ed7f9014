"""Composing the tree with Hydra, and remembering what it was composed from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rolegraph.config.provenance import Origins, Override, Source, location
from rolegraph.errors import ConfigError
from rolegraph.placement.option import OPTION, parse_option

CONFIG_PATH = "pkg://rolegraph.conf"
CONFIG_NAME = "config"


@dataclass(frozen=True)
class Composed:
    """The tree as Hydra composed it, interpolations unresolved, plain containers only."""

    tree: dict[str, Any]
    origins: Origins
    choices: Mapping[str, Any]
    """The chosen option of each config group."""


def register_resolvers() -> None:
    """Make `${rolegraph.run_dir:FOLDER,TIME}` known to OmegaConf."""
    OmegaConf.register_new_resolver("rolegraph.run_dir", _run_dir, replace=True)


def _run_dir(folder: str, time: str, *, _root_: DictConfig) -> str:
    """`output_dir`, or FOLDER/NAME/TIME with the name of the experiment or of the algorithm."""
    if chosen := _root_.get("output_dir"):
        return str(chosen)
    choices = _root_.hydra.runtime.choices
    name = _root_.get("ray_exp_name") or choices.get("experiment") or choices.get("algorithm") or "run"
    return os.path.join(folder, re.sub(r"[^\w.-]+", "-", str(name)), time)


def search_path(config_dir: str | None) -> ConfigSearchPath:
    """Our tree, after the user's folder."""
    path = create_automatic_config_search_path(None, None, CONFIG_PATH)
    if config_dir is not None:
        folder = os.path.abspath(config_dir)
        if not os.path.isdir(folder):
            raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
        path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
    return path


def rewrite(overrides: Sequence[str], config_dir: str | None = None, config_name: str = CONFIG_NAME) -> list[str]:
    """Let `key=value` reach keys whose defaults live in dataclasses, and quote values that Hydra's grammar rejects.

    Hydra knows only keys that some YAML states; `++` adds or overrides. Deletions and group choices stay as they are,
    but that a choice at another place, as in `model@teacher.model=NAME`, needs no `+`.
    """
    loader = _loader(config_dir)
    repository = loader.repository
    if searchpath := [o for o in overrides if o.lstrip("+").startswith("hydra.searchpath=")]:
        try:
            repository = loader._parse_overrides_and_create_caching_repo(CONFIG_NAME, searchpath)[1]
        except HydraException as error:
            raise ConfigError(_one_line(error)) from error
    return _placed([_rewrite_one(override, repository) for override in overrides], loader, repository, config_name)


_PLACED = re.compile(r"\+{0,2}(?P<group>[^=@~+]+)@(?P<package>[^=@~+:]+)=(?P<choice>.*)", flags=re.DOTALL)
"""A group's choice at another place of the config, as in `model@teacher.model=smollm2_135m`."""


def _placed(overrides: list[str], loader: _Loader, repository: Any, config_name: str) -> list[str]:
    """Let `GROUP@PACKAGE=CHOICE` be typed with and without `+`, whether some file makes such a choice already or not.

    Hydra adds one by `+` and changes one without, and refuses either where it should have been the other.
    """
    matches = [_PLACED.fullmatch(override) for override in overrides]
    matches = [match if match and repository.group_exists(match["group"]) else None for match in matches]
    if not any(matches):
        return overrides
    others = [override for override, match in zip(overrides, matches, strict=True) if match is None]
    try:
        defaults = loader.compute_defaults_list(config_name, others, RunMode.RUN).defaults
    except HydraException:  # what is wrong with the others is reported when all are composed
        defaults = []
    made = {default.override_key for default in defaults}
    return [
        override if match is None else _place(match, made) for override, match in zip(overrides, matches, strict=True)
    ]


def _place(match: re.Match[str], made: set[str | None]) -> str:
    group, package, choice = match.group("group", "package", "choice")
    if choice == "null":
        return f"~{group}@{package}"
    return f"{'' if f'{group}@{package}' in made else '+'}{group}@{package}={choice}"


def _rewrite_one(override: str, repository: Any) -> str:
    if override.startswith(f"{OPTION}="):
        return f"++placement.device_groups={_in_grammar(parse_option(override.partition('=')[2]))}"
    match = re.match(r"(\+{0,2})([^=@~+]+)=(.*)", override, flags=re.DOTALL)
    if match is None:
        return override
    plus, key, value = match.groups()
    if key.startswith(("hydra.", "hydra/")):
        return override
    if repository.group_exists(key):
        return _group_choice(override, key, value, repository)
    if not _parses(f"{key}={value}"):
        escaped = _escaped(value)
        if _parses(f"{key}='{escaped}'"):
            value = f"'{escaped}'"
    return f"++{key}={value}" if "/" not in key else f"{plus}{key}={value}"


def _in_grammar(value: Any) -> str:
    """A plain value in Hydra's grammar, whose keys take no quotes."""
    if isinstance(value, dict):
        items = (f"{_key_in_grammar(key)}:{_in_grammar(item)}" for key, item in value.items())
        return f"{{{','.join(items)}}}"
    if isinstance(value, list):
        return f"[{','.join(_in_grammar(item) for item in value)}]"
    if isinstance(value, str):
        return f"'{_escaped(value)}'"
    return json.dumps(value)


def _key_in_grammar(key: str) -> str:
    if not re.fullmatch(r"[\w.-]+", key, flags=re.ASCII):
        raise ConfigError(f"{OPTION}: the name {key!r} has other characters than letters, digits, dots, - and _")
    return key


def _escaped(text: str) -> str:
    """Text between the single quotes of Hydra's grammar."""
    text = re.sub(r"(\\*)'", lambda m: m[1] * 2 + "\\'", text)
    return re.sub(r"(\\+)$", lambda m: m[1] * 2, text)


def _group_choice(override: str, key: str, value: str, repository: Any) -> str:
    """A choice for Hydra, which says null by deleting the group from the defaults list."""
    if value == "null":
        return f"~{key}"
    if re.fullmatch(r"[\d.+-]+|true|false", value, flags=re.IGNORECASE):
        options = ", ".join(repository.get_group_options(key))
        raise ConfigError(f"{override}: {key} is a config group; choose one of {options}")
    return override


def _parses(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


class _Loader(ConfigLoaderImpl):
    """Hydra's loader of composed configs, which remembers the files of the last one."""

    sources: list[Source]

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        self.sources = _sources(repo, defaults)
        composed: DictConfig = super()._compose_config_from_defaults_list(defaults, repo)
        return composed


def _loader(config_dir: str | None) -> _Loader:
    """A loader without the global state that Hydra's own entry points set up."""
    set_version()
    setup_globals()
    if JobRuntime().get("name") is None:
        JobRuntime.instance().set("name", "rolegraph")
    Plugins.instance()
    return _Loader(search_path(config_dir))


def read_saved(
    path: Path,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    *,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Composed:
    """The tree that a run kept as YAML, with some values changed: by `change`, and then by overrides.

    Raises ConfigError where there is none, and for an override that is no KEY=VALUE: the choices are made.
    """
    try:
        text = path.read_text(encoding="utf-8")
        config = OmegaConf.create(text)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read as the config of a run: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path} cannot be read as the config of a run: it has no keys")
    if change is not None:
        kept = OmegaConf.to_container(config, resolve=False)
        assert isinstance(kept, dict)
        config = OmegaConf.create(change({str(key): value for key, value in kept.items()}))
    rewritten = rewrite(overrides, config_dir)
    for override, typed in zip(rewritten, overrides, strict=True):
        if not override.startswith("++"):
            raise ConfigError(f"{typed}: the config of a run has its choices made, and takes KEY=VALUE alone")
        try:
            parsed = OverridesParser.create().parse_override(override)
            OmegaConf.update(config, parsed.key_or_group, parsed.value(), merge=True, force_add=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"{typed}: {_one_line(error)}") from error
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)
    origins = Origins(_overrides(rewritten, overrides), [Source("", location(path), text)])
    return Composed({str(key): value for key, value in tree.items()}, origins, {})


def set_version() -> None:
    """Take Hydra's behaviour of 1.3: a run stays in the folder it was started in."""
    version.setbase("1.3")


def compose(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    config_name: str = CONFIG_NAME,
    typed: Sequence[str] = (),
) -> Composed:
    """Compose the tree from rewritten overrides; `typed` are the same as the user wrote them.

    Raises ConfigError where Hydra refuses: an unknown group option, an override that does not parse.
    """
    register_resolvers()
    loader = _loader(config_dir)
    try:
        config = loader.load_configuration(config_name, list(overrides), run_mode=RunMode.RUN, from_shell=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_one_line(error)) from error
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)
    origins = Origins(_overrides(overrides, typed or overrides), loader.sources)
    return Composed({str(key): value for key, value in tree.items()}, origins, choices)


def _one_line(error: Exception) -> str:
    return "\n".join(line for line in str(error).splitlines() if line.strip())


def _overrides(rewritten: Sequence[str], typed: Sequence[str]) -> list[Override]:
    pairs = [pair for pair in zip(rewritten, typed, strict=True) if pair[0].startswith("++")]
    return [Override(re.sub(r"^[+~]+", "", new.partition("=")[0]), old) for new, old in pairs]


def _sources(repository: Any, defaults: Sequence[ResultDefault]) -> list[Source]:
    sources = []
    for default in defaults:
        if default.config_path is None or default.config_path.startswith("hydra/"):
            continue
        result = repository.load_config(default.config_path)
        if result is None or (file := _file(result.path, default.config_path)) is None:
            continue
        package = default.package or ""
        text = file.read_text(encoding="utf-8")
        sources.append(Source("" if package == "_global_" else package, location(file), text))
    return sources


def _file(source: str, config_path: str) -> Path | None:
    """The file that a search-path entry holds under a config's name."""
    scheme, _, where = source.partition("://")
    if scheme == "pkg":
        from rolegraph.config.targets import module_file

        found = module_file(where)
        folder = found.parent if found is not None and found.suffix == ".py" else found
    else:
        folder = Path(where) if scheme == "file" else None
    if folder is None:
        return None
    name = config_path if config_path.endswith((".yaml", ".yml")) else f"{config_path}.yaml"
    return folder / name if (folder / name).is_file() else None


def as_config(tree: Mapping[str, Any]) -> DictConfig:
    """The tree as an OmegaConf node, for interpolations."""
    return OmegaConf.create(dict(tree))
