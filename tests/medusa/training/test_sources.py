"""What a recipe names: token frequencies smoothed by the base, and only the first answers if asked."""

from __future__ import annotations

import torch

from medusa.training.sources import First, token_frequencies
from tests.medusa.training.tiny import VOCAB, Tiny


def test_frequencies_are_counts_with_the_base_as_tie_breaker(tiny: Tiny) -> None:
    source = tiny.train
    states = source.get(range(source.num_segments))
    counts = torch.bincount(states.tokens, minlength=VOCAB)
    frequencies = token_frequencies(source, tiny.base)
    weight = tiny.base.model.get_output_embeddings().weight
    expected = (states.hidden.float() @ weight.T).softmax(-1).sum(0).double()
    # All of a tiny cache's places are taken, so that the sum can be stated exactly.
    torch.testing.assert_close(frequencies, counts + expected / 100, rtol=1e-4, atol=1e-4)


def test_first_answers_only(tiny: Tiny) -> None:
    first = First(tiny.train, 5)
    assert first.num_segments == len(first.lengths) == 5
    assert first.num_tokens == int(tiny.train.lengths[:5].sum())
    assert torch.equal(first.get([4]).tokens, tiny.train.get([4]).tokens)
