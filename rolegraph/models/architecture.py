"""What a model's config.json says of its sizes, read without torch or transformers, before the model is there.

A folder has the file, a name on the hub has it in the local cache or on the hub itself. A model that is made on first
use is described by its maker's module: a function `describe(**args)`, which is given the maker's arguments with their
defaults (all but the folder) and returns what the config.json will hold.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolegraph.models.config import ModelConfig

FETCH_S = 1.5
"""Seconds that a plan waits for a config.json on the hub."""
DENSE = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("qwen3_moe",)


class UnknownArchitectureError(Exception):
    """The sizes cannot be told; the message says why."""


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder with gated MLPs and grouped-query attention, by the names of config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the MLP; of one expert in a mixture."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    """0: a dense model."""
    num_experts_per_tok: int = 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, or of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Parameters of the checkpoint, a tied head counted once."""
        outside = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2) + self.hidden_size
        return outside + self.num_hidden_layers * self.layer_parameters()

    def layer_parameters(self, tensor: int = 1, expert: int = 1) -> int:
        """Parameters of one layer on one rank: matrices cut over `tensor` ranks, experts spread over `expert`."""
        return self.layer_dense_parameters(tensor) + self.layer_expert_parameters(expert)

    def layer_dense_parameters(self, tensor: int = 1) -> int:
        """All but the experts: attention, norms, the router or the MLP; norms and output biases are on every rank."""
        hidden, inner, qkv = self.hidden_size, self.intermediate_size, self.query_size + 2 * self.kv_size
        cut = hidden * qkv + self.query_size * hidden + (qkv if self.qkv_bias else 0)
        whole = 2 * hidden + (2 * self.head_dim if self.qk_norm else 0) + (hidden if self.output_bias else 0)
        if self.num_experts:
            whole += self.num_experts * hidden
        else:
            cut += 3 * hidden * inner + (2 * inner if self.mlp_bias else 0)
            whole += hidden if self.mlp_bias else 0
        return cut // tensor + whole

    def layer_expert_parameters(self, expert: int = 1) -> int:
        """The experts of one layer on one rank."""
        return self.num_experts // expert * 3 * self.hidden_size * self.intermediate_size


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The sizes in a config.json; UnknownArchitectureError where the kind of model is none that is known here."""
    text = config.get("text_config") or config
    kind = str(text.get("model_type", config.get("model_type", "none")))
    if kind not in DENSE + EXPERTS:
        raise UnknownArchitectureError(f"model type {kind!r} has no formula (there are {', '.join(DENSE + EXPERTS)})")
    if kind in EXPERTS and (int(text.get("decoder_sparse_step", 1)) != 1 or text.get("mlp_only_layers")):
        raise UnknownArchitectureError("some of its layers have no experts, which the formula does not have")
    try:
        return _architecture(kind, text)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnknownArchitectureError(f"its config.json lacks a size: {type(error).__name__}: {error}") from error


def _architecture(kind: str, text: Mapping[str, Any]) -> Architecture:
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    bias = bool(text.get("attention_bias", False))
    # transformers 5 writes the number under another name than 4 did.
    experts = int(text["num_local_experts" if "num_local_experts" in text else "num_experts"]) if kind in EXPERTS else 0
    return Architecture(
        model_type=kind,
        vocab_size=int(text["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(text["moe_intermediate_size" if experts else "intermediate_size"]),
        num_hidden_layers=int(text["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bias,
        output_bias=kind != "qwen2" and bias,
        mlp_bias=bool(text.get("mlp_bias", False)),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        num_experts=experts,
        num_experts_per_tok=int(text["num_experts_per_tok"]) if experts else 0,
    )


def positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model of this config.json can tell apart by their place, stretched rotary embeddings counted."""
    text = config.get("text_config") or config
    most = text.get("max_position_embeddings")
    if most is None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in ("linear", "dynamic", "yarn"):
        return int(float(rope.get("original_max_position_embeddings") or most) * float(rope.get("factor", 1.0)))
    return int(most)


def read_config(model: ModelConfig, *, fetch_s: float = 0.0) -> dict[str, Any]:
    """The model's config.json: of its folder, of the local cache of the hub, of its maker, at last of the hub itself.

    The hub is asked for at most `fetch_s` seconds, and not at all for 0. UnknownArchitectureError says what is missing.
    """
    if model.maker is not None:
        return _described(model.maker, model.args)
    if not model.path:
        raise UnknownArchitectureError("no model is named")
    folder = Path(model.path).expanduser()
    file = folder / "config.json" if folder.is_dir() else _in_hub_cache(model.path, model.revision)
    if file is not None and file.is_file():
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnknownArchitectureError(f"{file} is no JSON: {error}") from error
        return found
    if fetch_s and not folder.exists() and model.path.count("/") == 1 and model.path[0] not in "./~":
        return _fetched(model.path, model.revision or "main", fetch_s)
    raise UnknownArchitectureError(f"{model.path} is not on this machine yet")


def _described(maker: str, args: Mapping[str, Any]) -> dict[str, Any]:
    module, _, name = maker.rpartition(".")
    missing = UnknownArchitectureError(
        f"{module} has no function describe(**args), which tells the sizes before it is made"
    )
    try:
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        # Read before it is imported: a maker without a description may bring torch along.
        if not any(isinstance(node, ast.FunctionDef) and node.name == "describe" for node in ast.parse(source).body):
            raise missing
        found = importlib.import_module(module)
        bound = inspect.signature(getattr(found, name)).bind("", **args)
        bound.apply_defaults()
        given = dict(list(bound.arguments.items())[1:])
        described: dict[str, Any] = found.describe(**given)
    except UnknownArchitectureError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise UnknownArchitectureError(f"model.maker={maker}: {type(error).__name__}: {error}") from error
    return described


def _in_hub_cache(name: str, revision: str | None) -> Path | None:
    """The file in the cache that huggingface_hub keeps: refs name commits, snapshots are their files."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    repository = cache / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    return repository / "snapshots" / commit / "config.json" if commit else None


def _fetched(name: str, revision: str, seconds: float) -> dict[str, Any]:
    """The file of the hub, in a thread that is left behind when it is late: looking up a host has no time limit."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UnknownArchitectureError(f"{name} is not on this machine yet, and HF_HUB_OFFLINE is set")
    found: list[dict[str, Any]] = []

    def fetch() -> None:
        url = f"{constants.ENDPOINT}/{name}/resolve/{revision}/config.json"
        headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get("HF_TOKEN")) else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=seconds) as reply:
                found.append(json.load(reply))
        except (OSError, ValueError):
            return

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise UnknownArchitectureError(f"{name} is not on this machine yet, and the hub did not give its config.json")
    return found[0]
