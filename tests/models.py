"""Tiny checkpoints for tests: random weights, real Hugging Face folders, a byte-level tokenizer inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|eos|>"]


def tiny_tokenizer(vocab: int = 512) -> Any:
    """A byte-level tokenizer with `vocab` ids (at least 260); eos is `<|im_end|>` (2), pad `<|pad|>` (0)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (f"what is {a} + {b} ? it is {a + b} ." for a in range(40) for b in range(40)), trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_tokens([f"<|extra_{i}|>" for i in range(vocab - len(fast))])
    fast.chat_template = TEMPLATE
    return fast


def tiny_checkpoint(
    path: Path | str,
    arch: str = "qwen3",
    *,
    tie: bool = False,
    vocab: int = 512,
    tokenizer_vocab: int = 512,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    std: float = 0.1,
    **overrides: Any,
) -> Path:
    """Write a model of `arch` (qwen3, qwen2, llama, qwen3_moe) in float32 and its tokenizer to `path`.

    `vocab` is the model's vocabulary; ids from `tokenizer_vocab` on are padding.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(path)
    tokenizer = tiny_tokenizer(min(vocab, tokenizer_vocab))
    tokenizer.save_pretrained(path)
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tie,
        "initializer_range": std,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if arch == "qwen2":  # Qwen2 always has heads of hidden_size / num_attention_heads
        settings["hidden_size"] = heads * head_dim
        del settings["head_dim"]
    if arch == "qwen3_moe":
        settings |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
            "norm_topk_prob": True,
        }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(arch, **(settings | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path, safe_serialization=True)
    return path
