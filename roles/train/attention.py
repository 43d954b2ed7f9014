"""Causal self-attention on torch's scaled_dot_product_attention, for installations without Transformer Engine.

Megatron's own fallback multiplies out the [batch, heads, seq, seq] scores and knows no packed sequences. This one takes
both layouts: right-padded [seq, batch, heads, dim] (causal masking alone keeps padding out of the real positions) and
sequences packed end to end, given by their cumulative lengths.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F


class SDPAttention(MegatronModule):  # type: ignore[misc]
    """Drop-in for megatron-core's `DotProductAttention` in a layer spec: causal, grouped queries, no bias, no window.

    Packed input keeps Megatron's [seq, 1, heads, dim] layout with `packed_seq_params.qkv_format` "sbhd", so that rotary
    embeddings are applied to all sequences at once (the model passes them by position, see `model.PolicyModel`).

    Raises ValueError for attention kinds it does not have.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"only causal attention is built without Transformer Engine, not {attn_mask_type}")
        if config.window_size is not None:
            raise ValueError("sliding-window attention needs Transformer Engine: drop train.megatron.window_size")
        if config.softmax_type != "vanilla":
            raise ValueError(f"softmax_type {config.softmax_type!r} needs Transformer Engine; set it to vanilla")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Query [s, b, heads, d], key and value [s, b, groups, d]; returns [s, b, heads * d].

        `attention_mask` is not read: the mask is causal within each sequence.
        """
        if attention_bias is not None:
            raise ValueError("attention bias needs Transformer Engine")
        if packed_seq_params is None:
            return self._attend(query, key, value)
        runs = _equal_runs(packed_seq_params.cu_seqlens_q)
        if len(runs) == 1:
            return self._attend_run(query, key, value, *runs[0])
        sizes = [count * length for count, length in runs]
        parts = zip(*(torch.split(t, sizes) for t in (query, key, value)), runs, strict=True)
        return torch.cat([self._attend_run(q, k, v, *run) for q, k, v, run in parts])

    def _attend_run(self, query: Tensor, key: Tensor, value: Tensor, count: int, length: int) -> Tensor:
        """`count` packed sequences of the same `length`, as one padded batch without padding."""
        if count == 1:
            return self._attend(query, key, value)
        # [count * length, 1, n, d] -> [length, count, n, d], a view
        query, key, value = (
            t.view(count, length, t.shape[-2], t.shape[-1]).transpose(0, 1) for t in (query, key, value)
        )
        return self._attend(query, key, value).transpose(0, 1).reshape(count * length, 1, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seq, batch = query.shape[:2]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        attend = partial(
            F.scaled_dot_product_attention,
            is_causal=True,
            scale=self.softmax_scale,
            dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        if dropout and not self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                context = attend(query, key, value)
        else:
            context = attend(query, key, value)
        return context.permute(2, 0, 1, 3).reshape(seq, batch, -1)


def _equal_runs(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """(how many, length) of each run of consecutive sequences of one length, empty ones left out."""
    lengths = cu_seqlens.diff().tolist()
    runs = [(len(list(group)), length) for length, group in itertools.groupby(lengths)]
    return [(count, length) for count, length in runs if length]
