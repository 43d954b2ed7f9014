"""Keys and values of a batch of samples, in memory that is taken once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer


class RoomLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's: memory for `rows` sequences of `length` tokens, of which attention is shown the filled part alone.

    transformers' own static layer shows attention all of it, which costs what a cache of full length costs from the
    first token on; its dynamic one copies itself at every token.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, rows: int, length: int) -> None:
        super().__init__()
        self.rows = rows
        self.length = length
        self.first = 0
        """The row that the model's first row is."""
        self.filled = 0
        """Tokens of each row."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the memory, of the type and on the device of the first keys, [rows, heads, length, head_dim]."""

        def room(like: Tensor) -> Tensor:
            return like.new_empty((self.rows, like.shape[1], self.length, like.shape[3]))

        self.keys, self.values = room(key_states), room(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to the rows that the model computes; returns all that they have, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = slice(self.first, self.first + key_states.shape[0])
        end = self.filled + key_states.shape[2]
        self.keys[rows, :, self.filled : end] = key_states
        self.values[rows, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[rows, :, :end], self.values[rows, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that attention will see, and the first of them."""
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each row."""
        return self.filled

    def get_max_length(self) -> int:
        """Tokens that a row has room for."""
        return self.length

    def take(self, order: Tensor, moved: Tensor) -> None:
        """Row r becomes what row `order[r]` is, for the rows `moved`."""
        if self.is_initialized and len(moved):
            for store in (self.keys, self.values):
                store[moved, :, : self.filled] = store[order[moved], :, : self.filled]


class KVRoom:
    """The cache of a batch as the model takes it, with the rows that samples share, or leave behind.

    `fixed`: transformers' static cache as it is, whose shapes never change. Layers that keep something other than keys
    and values of all tokens (sliding windows, the states of linear attention) are transformers' own in either case.
    """

    def __init__(self, config: Any, rows: int, length: int, *, fixed: bool = False) -> None:
        """`config`: of the model; `rows` samples of at most `length` tokens."""
        self.rows, self.length = rows, length
        self.cache: Cache = StaticCache(config=config.get_text_config(decoder=True), max_cache_len=length)
        if not fixed:
            self.cache.layers = [
                RoomLayer(rows, length) if type(layer) is StaticLayer else layer for layer in self.cache.layers
            ]
        self._rooms = [layer for layer in self.cache.layers if isinstance(layer, RoomLayer)]
        self.can_fill_in_parts = len(self._rooms) == len(self.cache.layers)
        """Whether rows can be computed one part after another, and the memory used for another batch."""
        self.can_share = not fixed
        """Whether rows may be taken from others."""

    def least_leaving(self, rows: int) -> int:
        """How many of the rows have to end before the others close up: it may mean to copy all that is kept."""
        return 1 if self.can_fill_in_parts else max(1, rows // 8)

    def has_room(self, rows: int, length: int) -> bool:
        """Whether another batch can use the memory of this one."""
        return self.can_fill_in_parts and rows <= self.rows and length <= self.length

    def begin(self, first: int) -> None:
        """The model computes the rows from `first` on next, from their first token."""
        for layer in self._rooms:
            layer.first, layer.filled = first, 0

    def whole(self) -> None:
        """The model computes all rows again, which have been filled in parts."""
        for layer in self._rooms:
            layer.first = 0

    def take(self, order: Tensor) -> None:
        """Row r becomes what row `order[r]` is; those that follow are free."""
        moved = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
        for layer in self.cache.layers:
            if isinstance(layer, RoomLayer):
                layer.take(order.to(layer.device), moved.to(layer.device))
            else:
                layer.reorder_cache(order)
