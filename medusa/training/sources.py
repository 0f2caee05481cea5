"""Opens what a recipe names: the base, and the answers to train and to evaluate on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from medusa.base import Base, load_base
from medusa.training.recipe import Recipe

_COUNT_SEGMENTS = 64  # answers read at a time while counting
_EXPECTED_PLACES = 2048  # places, evenly spread, where the base's own expectation is taken: some seconds
_CHUNK_ROWS = 128  # rows whose logits over the whole vocabulary are held at once


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


@torch.inference_mode()
def token_frequencies(source: Any, base: Base) -> torch.Tensor:
    """How often each token is to be expected in answers like these, to choose a draft vocabulary by.

    A token's count, plus a hundredth of what the base itself expected at some places of the answers: the sum
    of its own next-token probabilities there. So tokens that never occurred are ordered by how near they
    came. On 18,000 training tokens the 8,192 best then held 94.1% of the tokens of unseen answers, and 89.9%
    by count alone.

    Args:
        source: training answers.
        base: its LM head is read.

    Returns:
        [V] float64.
    """
    lm_head = base.model.get_output_embeddings().weight
    counts = torch.zeros(len(lm_head), dtype=torch.double)
    expected = torch.zeros_like(counts)
    every = max(1, source.num_tokens // _EXPECTED_PLACES)
    for start in range(0, len(source.lengths), _COUNT_SEGMENTS):
        states = source.get(list(range(start, min(start + _COUNT_SEGMENTS, len(source.lengths)))))
        counts += torch.bincount(states.tokens, minlength=len(counts))
        for hidden in states.hidden[::every].split(_CHUNK_ROWS):
            logits = F.linear(hidden.to(lm_head.device, lm_head.dtype), lm_head)
            expected += logits.float().softmax(-1).sum(0).double().cpu()
    return counts + expected / 100
