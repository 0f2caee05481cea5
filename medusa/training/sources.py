"""Opens what a recipe names: the base, and the answers to train and to evaluate on."""

from __future__ import annotations

from typing import Any

import torch

from medusa.base import Base, load_base
from medusa.training.recipe import Recipe

_COUNT_SEGMENTS = 64  # answers read at a time while counting


def open_sources(
    recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> tuple[Base, Any, Any, dict[str, Any]]:
    """The base in the training's dtype, training and validation answers, and fingerprints of all three.

    Raises:
        MedusaError: a folder or file is missing, or was made with another base, tokenizer or template.
    """
    from medusa.data.states import OnlineStates, StatesCache

    base = load_base(recipe.base, dtype=dtype, device=device)
    sources = {}
    for split, path in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        if recipe.data.online:
            from medusa.data.conversations import load_conversations

            sources[split] = OnlineStates(base, load_conversations(path))
        else:
            sources[split] = StatesCache(path, base.fingerprints)
    train = sources["train"]
    if recipe.data.limit is not None:
        train = First(train, recipe.data.limit)
    fingerprints = {split: source.fingerprint for split, source in sources.items()} | {
        "limit": recipe.data.limit
    }
    return base, train, sources["validation"], fingerprints


class First:
    """The first answers of a source, through the same interface."""

    def __init__(self, source: Any, limit: int):
        self._source = source
        self.lengths = source.lengths[:limit]
        self.num_segments = len(self.lengths)
        self.num_tokens = int(self.lengths.sum())
        self.get = source.get


def count_tokens(source: Any, vocab_size: int) -> torch.Tensor:
    """[V] int64: how often each token occurs in the answers of `source`."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for start in range(0, len(source.lengths), _COUNT_SEGMENTS):
        ids = list(range(start, min(start + _COUNT_SEGMENTS, len(source.lengths))))
        counts += torch.bincount(source.get(ids).tokens, minlength=vocab_size)
    return counts
