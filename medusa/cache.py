"""A preallocated KV cache that can commit one path of a tree, for each row of a batch.

Rows have their own lengths. A forward writes the keys and values of its tokens at positions that were bound
beforehand, and reads a span of the cache; what a row may see of that span is the attention mask's business. Tree
nodes are written after the committed tokens; committing moves the accepted ones to the front of that place.

Everything here works on plain tensors of static shape, so that a step which uses it can be compiled and exported.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from medusa.errors import MedusaError


class TreeCache:
    """Keys and values of all layers: [layers, batch, kv heads, capacity, head dim] each.

    Args:
        config: the base's text configuration.
        batch: rows.
        capacity: positions for each row, the widest tree included.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        # The configuration's head_dim decides: hidden_size / heads is only its default.
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (config.num_hidden_layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of rows first..last-1, [layers, b, kv heads, capacity, head dim], as views."""
        return self.keys[:, first:last], self.values[:, first:last]

    def check_span(self, span: int) -> None:
        """Raises MedusaError if a forward that reads positions 0..span-1 does not fit."""
        if span > self.capacity:
            raise MedusaError(
                f"the cache holds {self.capacity} positions and {span} are needed; "
                "shorten the prompt or raise the engine's max_length"
            )


class CacheView(Cache):
    """What the layers of one forward see: where it writes and how far it reads.

    Args:
        keys: [layers, b, kv heads, capacity, head dim], of the rows that the forward runs on.
        values: the same.
        positions: [b, q] int64, where each token's keys and values go.
        span: the forward reads positions 0..span-1.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, span: int):
        super().__init__(layers=[])
        self.keys, self.values, self.span = keys, values, span
        _, _, kv_heads, _, head_dim = keys.shape
        self.index = positions[:, None, :, None].expand(-1, kv_heads, -1, head_dim)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer: writes [b, kv heads, q, head dim], returns the span."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.scatter_(2, self.index, key_states)
        values.scatter_(2, self.index, value_states)
        return keys[:, :, : self.span], values[:, :, : self.span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given to the forward explicitly; a model that asks here would be wrong."""
        return 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.keys.shape[0]


def commit(keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor) -> None:
    """Moves an accepted path's keys and values to where plain decoding would have put them, in place.

    All of a path's entries are read before the first is written, because source and target overlap. Entries past a
    row's accepted count are padding: they land after the row's new length, where nothing looks.

    Args:
        keys: [layers, b, kv heads, capacity, head dim].
        values: the same.
        lengths: [b] int64, committed tokens before this step.
        path: [b, D + 1] int64, accepted nodes, the root first.
    """
    depth = path.shape[1] - 1
    if depth == 0:  # plain decoding: the root is where it belongs
        return
    layers, _, kv_heads, _, head_dim = keys.shape
    source = (lengths[:, None] + path[:, 1:])[None, :, None, :, None]
    target = (lengths[:, None] + torch.arange(1, depth + 1, device=path.device))[None, :, None, :, None]
    shape = (layers, -1, kv_heads, -1, head_dim)
    for store in (keys, values):
        store.scatter_(3, target.expand(shape), store.gather(3, source.expand(shape)))
