import pytest
import torch
from transformers import LlamaConfig

from medusa.cache import CacheView, TreeCache, commit
from medusa.errors import MedusaError

LAYERS, BATCH, KV_HEADS, CAPACITY, HEAD_DIM = 2, 3, 2, 32, 16


def new_cache() -> TreeCache:
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        num_key_value_heads=KV_HEADS,
        num_attention_heads=6,
        hidden_size=48,
        head_dim=HEAD_DIM,
    )
    cache = TreeCache(config, BATCH, CAPACITY)
    generator = torch.Generator().manual_seed(0)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return cache


def test_head_dim_is_the_configurations():
    assert new_cache().keys.shape == (LAYERS, BATCH, KV_HEADS, CAPACITY, HEAD_DIM)


def test_update_writes_where_it_was_told_and_nowhere_else():
    cache = new_cache()
    before = cache.keys.clone()
    positions = torch.tensor([[4, 5, 6], [9, 10, 11]])
    view = CacheView(*cache.rows(1, 3), positions, span=16)
    new = torch.randn(2, KV_HEADS, 3, HEAD_DIM)
    keys, values = view.update(new, new, 1)
    assert keys.shape == values.shape == (2, KV_HEADS, 16, HEAD_DIM)
    for row in range(2):
        for q in range(3):
            before[1, row + 1, :, positions[row, q]] = new[row, :, q]
    assert torch.equal(cache.keys, before)


@pytest.mark.parametrize("seed", range(20))
def test_commit_equals_copying_one_entry_after_the_other(seed):
    generator = torch.Generator().manual_seed(seed)
    cache = new_cache()
    lengths = torch.randint(0, 10, (BATCH,), generator=generator)
    # Paths rise, as node numbers along a path do; sources and targets overlap.
    path = torch.stack([torch.randperm(8, generator=generator)[:4].sort().values for _ in range(BATCH)])
    path[:, 0] = 0
    keys, values = cache.keys.clone(), cache.values.clone()
    old = keys.clone(), values.clone()
    for row in range(BATCH):
        for depth in range(1, 4):
            for store, source in zip((keys, values), old, strict=True):
                store[:, row, :, lengths[row] + depth] = source[:, row, :, lengths[row] + path[row, depth]]
    commit(*cache.rows(0, BATCH), lengths, path)
    assert torch.equal(cache.keys, keys)
    assert torch.equal(cache.values, values)


def test_overflow_is_refused():
    with pytest.raises(MedusaError, match="holds 32 positions and 33 are needed"):
        new_cache().check_span(33)
