"""Grouped-query attention over a cache, without copying keys and values out to every query head.

Transformers' own SDPA path expands the key-value heads whenever a mask is given: at 64 rows of 256 positions that
copies gigabytes a step. Here a group's query heads are laid out as further queries of their one key-value head.

Rows of a batch differ in length, and a dense product reads every row as far as the longest. Where each row's span is
given, each is read as far as it goes and no further: on a CPU the keys and values are what a batched step waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "medusa_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    spans: Sequence[int] | None = None,
    unmasked: bool = False,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that transformers' layers call.

    Args:
        module: the attention layer; unused.
        query: [B, heads, q, D].
        key: [B, kv heads, S, D].
        value: [B, kv heads, S, D].
        attention_mask: [B, 1, groups * q, S], additive, from `group_mask`.
        scaling: of the scores; None: 1 / sqrt(D).
        spans: [B] how far each row is read, at most S; None: all of it. What lies behind must be masked.
        unmasked: every query sees every key; the mask is not read.

    Returns:
        [B, q, heads, D], and None in place of attention weights.
    """
    batch, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(batch, kv_heads, -1, size)  # [B, kv heads, groups * q, D]
    if unmasked:
        out = F.scaled_dot_product_attention(folded, key, value, scale=scaling)
    elif spans is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        out = query.new_empty(*folded.shape[:-1], value.shape[-1])
        for row, span in enumerate(spans):
            at = slice(row, row + 1)
            out[at] = F.scaled_dot_product_attention(
                folded[at],
                key[at, :, :span],
                value[at, :, :span],
                attn_mask=attention_mask[at, :, :, :span],
                scale=scaling,
            )
    return out.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, grouped_attention)


def group_mask(visible: torch.Tensor, config: PretrainedConfig, dtype: torch.dtype) -> torch.Tensor:
    """[B, q, S] bool, True where a query sees a key -> the additive [B, 1, groups * q, S] of `grouped_attention`."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, -torch.inf
    )
    return additive.repeat(1, config.num_attention_heads // kv_heads, 1)[:, None]


@contextlib.contextmanager
def grouped(config: PretrainedConfig) -> Iterator[None]:
    """Within the block a model of this configuration uses `grouped_attention`; outside, what it used before."""
    before = config._attn_implementation_internal
    config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
