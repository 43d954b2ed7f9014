"""Causal self-attention on torch's scaled_dot_product_attention, for installations without Transformer Engine.

Megatron's own fallback multiplies out the [batch, heads, seq, seq] scores and knows no packed sequences. This one takes
both layouts: right-padded [seq, batch, heads, dim] (causal masking alone keeps padding out of the real positions) and
sequences packed end to end, given by their cumulative lengths. A packed sequence may branch: a prompt and several
responses to it, each of which sees the prompt and itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


@dataclass
class BranchedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Packed sequences of which some are a prompt and several responses to it."""

    branches: tuple[tuple[int, ...], ...] = ()
    """What each sequence is made of, see `packing.MicroBatch.branches`."""
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By prompt and response length; every layer uses the same."""
    places: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By the lengths of the responses to a prompt, see `_places`."""


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
        runs = _equal_runs(packed_seq_params)
        if len(runs) == 1:
            return self._attend_run((query, key, value), *runs[0], packed_seq_params)
        sizes = [count * sum(sequence) for count, sequence in runs]
        parts = zip(*(torch.split(t, sizes) for t in (query, key, value)), strict=True)
        return torch.cat(
            [self._attend_run(part, *run, packed_seq_params) for part, run in zip(parts, runs, strict=True)]
        )

    def _attend_run(
        self, part: tuple[Tensor, Tensor, Tensor], count: int, sequence: tuple[int, ...], params: PackedSeqParams
    ) -> Tensor:
        """`count` packed sequences of the same lengths, as one padded batch without padding."""
        query, key, value = part
        if len(sequence) > 1:
            groups = zip(*(t.chunk(count) for t in part), strict=True)
            return torch.cat([self._attend_branches(q, k, v, sequence, params) for q, k, v in groups])
        if count == 1:
            return self._attend(query, key, value)
        # [count * length, 1, n, d] -> [length, count, n, d], a view
        query, key, value = (
            t.view(count, sequence[0], t.shape[-2], t.shape[-1]).transpose(0, 1) for t in (query, key, value)
        )
        return self._attend(query, key, value).transpose(0, 1).reshape(count * sequence[0], 1, -1)

    def _attend_branches(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequence: tuple[int, ...],
        params: PackedSeqParams,
    ) -> Tensor:
        """A prompt and the responses to it: the prompt alone, then the responses as a batch behind copies of it."""
        prompt, *lengths = sequence
        sizes = [prompt, sum(lengths)]
        (query, queries), (key, keys), (value, values) = (torch.split(t, sizes) for t in (query, key, value))
        longest, count = max(lengths), len(lengths)
        masks, places = params.masks, params.places
        if (prompt, longest) not in masks:
            # Response token i sees the whole prompt and the response up to itself.
            hidden = torch.ones(longest, prompt + longest, dtype=torch.bool, device=query.device).triu(prompt + 1)
            masks[prompt, longest] = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, -torch.inf)
        if sequence[1:] not in places:
            places[sequence[1:]] = _places(lengths, query.device)
        taken, place = places[sequence[1:]]
        queries, keys, values = (
            _Stack.apply(part, taken, place).view(longest, count, *part.shape[2:])  # type: ignore[no-untyped-call]
            for part in (queries, keys, values)
        )
        behind = [torch.cat([head.expand(-1, count, -1, -1), tail]) for head, tail in ((key, keys), (value, values))]
        out = self._attend(queries, behind[0], behind[1], mask=masks[prompt, longest])
        responses = _Unstack.apply(out.view(longest * count, 1, -1), place)  # type: ignore[no-untyped-call]
        return torch.cat([self._attend(query, key, value), responses])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        seq, batch = query.shape[:2]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        attend = partial(
            F.scaled_dot_product_attention,
            attn_mask=mask,
            is_causal=mask is None,
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


def _places(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """How responses packed end to end become a padded batch of [longest, responses] places, flat.

    For each place the packed token it takes, behind the end of a response the last one again; and for each packed token
    its place.
    """
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    steps = torch.arange(max(lengths))[:, None]
    taken = starts + torch.minimum(steps, sizes - 1)
    places = torch.arange(taken.numel()).view_as(taken)
    place = places.t()[(steps < sizes).t()]
    return taken.reshape(-1).to(device), place.to(device)


class _Stack(torch.autograd.Function):
    """Packed responses to a padded batch, in one pass each way.

    Autograd's own backward of slicing fills a tensor of the whole batch for every slice. What lies behind the end of a
    response has no gradient: no token sees it, and what it computes is left out.
    """

    @staticmethod
    def forward(ctx, packed: Tensor, taken: Tensor, place: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(place)
        return packed.index_select(0, taken)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Unstack(torch.autograd.Function):
    """A padded batch to packed responses; what lies behind their ends gets a gradient of 0."""

    @staticmethod
    def forward(ctx, padded: Tensor, place: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(place)
        ctx.rows = len(padded)
        return padded.index_select(0, place)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        padded = grad.new_zeros(ctx.rows, *grad.shape[1:])
        padded[ctx.saved_tensors[0]] = grad
        return padded, None


def _equal_runs(params: PackedSeqParams) -> list[tuple[int, tuple[int, ...]]]:
    """(how many, what they are made of) of each run of consecutive sequences that are alike, empty ones left out."""
    sequences = params.branches if isinstance(params, BranchedSeqParams) else ()
    sequences = sequences or tuple((length,) for length in params.cu_seqlens_q.diff().tolist())
    runs = [(len(list(group)), sequence) for sequence, group in itertools.groupby(sequences)]
    return [(count, sequence) for count, sequence in runs if sum(sequence)]
