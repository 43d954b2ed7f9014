"""Low-rank adapters as PEFT knows them: first values, names and files. Shared by all train backends; knows no Megatron.

An adapter of a matrix W [out, in] is A [rank, in] and B [out, rank], and the module computes x (W + alpha / rank B A)^T
(arXiv:2106.09685).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from rolegraph.values import AdapterInfo
from roles.train.hf_folder import Export, on_first_rank, save_weights

if TYPE_CHECKING:
    from peft import LoraConfig

Side = Literal["A", "B"]

PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's modules."""


def first_a(seed: int, module: str, rank: int, width: int) -> Tensor:
    """[rank, width] float32: uniform in +-1 / sqrt(width), Kaiming's as PEFT calls it; B begins with zeros.

    The same for a seed and the module's Hugging Face name, whatever ranks and backend the model is spread over.

    >>> torch.equal(first_a(1, "layers.0.q_proj", 2, 8), first_a(1, "layers.0.q_proj", 2, 8))
    True
    """
    digest = hashlib.blake2b(f"{seed}\0{module}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return (torch.rand(rank, width, generator=generator) * 2 - 1) / width**0.5


def tensor_name(module: str, side: Side) -> str:
    """The name in PEFT's files of one side of a module's adapter.

    >>> tensor_name("model.layers.0.self_attn.q_proj", "A")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return f"{PREFIX}{module}.lora_{side}.weight"


class AdapterExport(Export, Protocol):
    """The matrices of a policy's adapters under PEFT's names."""

    @property
    def info(self) -> AdapterInfo:
        """Their sizes, and the modules that have some."""


def write_adapter(export: AdapterExport, folder: str, *, base: str) -> None:
    """Write what `peft.PeftModel.from_pretrained` reads, from all ranks together; rank 0 writes.

    `base` is the folder or name of the model that the adapters are beside. Raises CheckpointError on all ranks where
    rank 0 cannot write.
    """

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        held = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors}
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_weights(held, str(Path(folder) / "adapter_model.safetensors"))
        peft_config(export.info, base).save_pretrained(folder)

    on_first_rank(write, export.tensors(), folder)


def peft_config(info: AdapterInfo, base: str) -> LoraConfig:
    """The adapter in PEFT's words."""
    from peft import LoraConfig

    alpha = int(info.alpha) if info.alpha == int(info.alpha) else info.alpha
    return LoraConfig(
        r=info.rank,
        lora_alpha=alpha,  # type: ignore[arg-type] # PEFT divides it, whatever number it is
        target_modules=list(info.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
