"""Small random Hugging Face checkpoints of the architectures the trainer knows, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 251
"""Odd, so that a sharded vocabulary is padded."""


def make_checkpoint(folder: Path, kind: str, *, tied: bool = False, seed: int = 0, **changes: Any) -> str:
    """Write a two-layer `kind` (qwen2, qwen3, llama, qwen3_moe) in fp32 with norms and biases away from their start."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    if kind == "qwen2":
        # Qwen2 has no head_dim of its own.
        del sizes["head_dim"]
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    if kind == "qwen3_moe":
        sizes |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "qwen3_moe": "Qwen3Moe"}[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**sizes | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    for key, param in model.named_parameters():
        if "norm" in key:
            param.data = 1 + 0.1 * torch.randn_like(param)
        elif key.endswith("bias"):
            param.data = 0.1 * torch.randn_like(param)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"note": "copied by exports"}')
    return str(folder)


def add_tokenizer(folder: Path | str, size: int, *, eos: list[int] | None = None) -> None:
    """Give a checkpoint a byte-level tokenizer with `size` ids (at least 260), and several end-of-sequence ids."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<|pad|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<|extra_{i}|>" for i in range(size - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>").save_pretrained(
        folder
    )
    if eos is not None:
        (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def make_reward_model(folder: Path, head: str, *, seed: int = 0, **changes: Any) -> str:
    """Write a two-layer Qwen2 with the tiny model's tokenizer and a `head` of transformers.

    `head` is SequenceClassification, TokenClassification, CausalLM or ProcessRewardModel.
    """
    import transformers

    from rolegraph.models.tiny import END, PAD, write_tokenizer

    vocabulary = write_tokenizer(folder)
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": vocabulary[PAD],
        "eos_token_id": vocabulary[END],
    }
    config = transformers.Qwen2Config(**sizes | changes)
    if head == "ProcessRewardModel":
        from roles.prm.qwen2 import Qwen2ForProcessRewardModel as Model
    else:
        Model = getattr(transformers, f"Qwen2For{head}")  # noqa: N806
    model = Model(config).float()
    for key, param in model.named_parameters():
        if key.endswith("bias"):
            param.data = 0.1 * torch.randn_like(param)
    model.save_pretrained(folder)
    return str(folder)
