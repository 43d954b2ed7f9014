"""A limit on what an engine may sample; vLLM loads it in its workers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.sample.logits_processor import LogitsProcessor

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

SIZE_KEY = "rolegraph_tokenizer_size"


class TokenizerLimit(LogitsProcessor):  # type: ignore[misc]
    """Never sample ids from the tokenizer's size on: a model's vocabulary is often padded past it.

    One slice assignment a step for the whole batch, where `allowed_token_ids` builds a mask a request.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._size = int(vllm_config.additional_config[SIZE_KEY])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[:, self._size :] = float("-inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass
