"""Grouped attention against a loop over rows, heads and queries."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa.attention import grouped_attention


@given(
    seed=st.integers(0, 999),
    spans=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    kv_heads=st.sampled_from([1, 3]),
    groups=st.sampled_from([1, 2]),
    queries=st.integers(1, 3),
)
@pytest.mark.parametrize("ragged", [False, True])
def test_equals_a_loop(
    ragged: bool, seed: int, spans: list[int], kv_heads: int, groups: int, queries: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, longest, size = len(spans), 20, 8
    query = normal(batch, kv_heads * groups, queries, size)
    key, value = normal(batch, kv_heads, longest, size), normal(batch, kv_heads, longest, size)
    mask = torch.where(normal(batch, queries, longest) > 0, 0.0, -torch.inf)
    for row, span in enumerate(spans):
        mask[row, :, 0], mask[row, :, span:] = 0.0, -torch.inf
        value[row, :, span:] = torch.nan if ragged else 0.0  # what lies behind a row's span is not read
    additive = mask.repeat(1, groups, 1)[:, None]
    got, weights = grouped_attention(
        torch.nn.Module(), query, key, value, additive, spans=spans if ragged else None
    )
    assert weights is None
    for row, span in enumerate(spans):
        for head in range(kv_heads * groups):
            for place in range(queries):
                keys, values = key[row, head // groups, :span], value[row, head // groups, :span]
                scores = keys @ query[row, head, place] / math.sqrt(size) + mask[row, place, :span]
                expected = scores.softmax(-1) @ values
                assert torch.allclose(got[row, place, head], expected, atol=1e-5)
