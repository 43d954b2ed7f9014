"""The model `tiny`: a Qwen3 of about a million parameters with a tokenizer of its own, made from a seed.

It is the model of the quickstart and the tests. Everything a run costs apart from the model is there (chat template,
end-of-sequence, grouped attention, tied head), and the text of small arithmetic tasks is packed into so few tokens
that learning them takes minutes on two cores. Written without torch and transformers: it is made in a fraction of a
second, in any process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
PAD = "<|pad|>"
SPECIALS = (PAD, END, *(f"<|{role}|>" for role in ROLES))
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Give only the result as your final answer.",
    "Calculate the following: ",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    " + ",
    " - ",
    " * ",
    " =",
)
"""One token each, found in any text; what is no phrase is encoded byte by byte."""
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BYTES = 256
"""Ids of single bytes; those of SPECIALS and PHRASES follow."""
VOCAB_MULTIPLE = 32
"""The vocabulary is filled up with words to this multiple, so that every id a model can sample is a token."""
WORDS: tuple[str, ...] = (
    " the",
    " a",
    " is",
    " to",
    " of",
    " and",
    " in",
    " that",
    " it",
    " for",
    " you",
    " answer",
    " question",
)
WORDS += (" what", " with", " as", " on", " are", " this", " be", " by", " or", " not", " from", " have", " number")
WORDS += (" your", " result", " an", " if", " how", " many")


def make(
    folder: str,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 384,
    tie_word_embeddings: bool = True,
    init_std: float = 0.08,
    max_position_embeddings: int = 4096,
) -> None:
    """Write the model as a Hugging Face folder (fp32); `init_std` is the spread of the first weights."""
    target = Path(folder)
    vocab = write_tokenizer(target)
    config = describe(
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        tie_word_embeddings=tie_word_embeddings,
        init_std=init_std,
        max_position_embeddings=max_position_embeddings,
    )
    if (config["vocab_size"], config["eos_token_id"], config["pad_token_id"]) != (len(vocab), vocab[END], vocab[PAD]):
        raise ValueError("the tokenizer of the tiny model has other ids than its config.json says")
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {key: config[key] for key in ("eos_token_id", "pad_token_id")})
    _write_weights(target / "model.safetensors", config, seed)


def describe(
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    tie_word_embeddings: bool,
    init_std: float,
    max_position_embeddings: int,
    seed: int = 0,
) -> dict[str, Any]:
    """The config.json that `make` writes for these arguments; the seed is no part of it."""
    filled = BYTES + len(SPECIALS) + len(PHRASES)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": filled + -filled % VOCAB_MULTIPLE,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": init_std,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "use_sliding_window": False,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": BYTES + SPECIALS.index(END),
        "pad_token_id": BYTES + SPECIALS.index(PAD),
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a byte-level tokenizer with whole phrases as single tokens; returns token -> id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fill = -(len(alphabet) + len(SPECIALS) + len(PHRASES)) % VOCAB_MULTIPLE
    if fill > len(WORDS):
        raise ValueError(f"the vocabulary of the tiny model lacks {fill - len(WORDS)} words: add some to WORDS")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in (*PHRASES, *WORDS[:fill])])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(SPECIALS[2:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return vocab


def _write_weights(path: Path, config: dict[str, Any], seed: int) -> None:
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)
    std = config["initializer_range"]

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
        return generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(std * scale)

    def ones(size: int) -> np.ndarray[Any, Any]:
        return np.ones(size, dtype=np.float32)

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, value = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    # GPT-2's rule: what writes to the residual stream starts smaller, so that depth does not raise its variance.
    out = (2 * config["num_hidden_layers"]) ** -0.5
    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones(hidden),
            f"{name}.self_attn.q_proj.weight": matrix(query, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(value, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(value, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, query, out),
            f"{name}.self_attn.q_norm.weight": ones(dim),
            f"{name}.self_attn.k_norm.weight": ones(dim),
            f"{name}.post_attention_layernorm.weight": ones(hidden),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner, out),
        }
    weights["model.norm.weight"] = ones(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    save_file(weights, path, metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
