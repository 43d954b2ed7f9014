"""A user's own modules, given as files or by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path


def load_plugins(plugins: Sequence[str]) -> None:
    """Import each plugin, a .py file or a module; files see the modules beside them."""
    for plugin in plugins:
        if not plugin.endswith(".py"):
            importlib.import_module(plugin)
            continue
        path = Path(plugin).expanduser().resolve()
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
