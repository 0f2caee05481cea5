"""Rules of choosing a token against their definitions, and against transformers' own processors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa.errors import MedusaError
from medusa.sampling import Draws, SamplingParams, change_logits, distribution, gather_rules, invert
from medusa.tree import Tree

BUSHY = Tree([(0,), (1,), (0, 0), (0, 1), (1, 0)])


def rules_of(*params: SamplingParams, texts=None, depth: int = 0, vocabulary: int = 12):
    draws = [Draws(one.seed) for one in params]
    texts = texts or [[0]] * len(params)
    return gather_rules(params, draws, [0] * len(params), texts, depth, vocabulary)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
)
def test_distribution_equals_transformers_warpers(seed: int, temperature: float, top_p: float, top_k: int):
    logits = 2 * torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(temperature, top_p=top_p, top_k=top_k)
    got = distribution(logits, rules_of(params, SamplingParams(1.0)))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(min(top_k, 12)))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = torch.softmax(warpers(None, logits[0].clone()), -1)
    torch.testing.assert_close(got[0], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got[1], torch.softmax(logits[1], -1), atol=1e-6, rtol=1e-5)


@given(seed=st.integers(0, 999), penalty=st.sampled_from([0.7, 1.2, 2.0]), biased=st.booleans())
def test_every_node_is_changed_as_plain_decoding_would_there(seed: int, penalty: float, biased: bool):
    generator = torch.Generator().manual_seed(seed)
    vocabulary = 12
    logits = torch.randn(2, BUSHY.width, vocabulary, generator=generator)
    tokens = torch.randint(0, vocabulary, (2, BUSHY.width), generator=generator)
    text = torch.randint(0, vocabulary, (5,), generator=generator).tolist()
    bias = {3: 2.5, 7: -float("inf")} if biased else {}
    params = SamplingParams(repetition_penalty=penalty, logit_bias=bias)
    buffers = BUSHY.buffers()
    rules = rules_of(SamplingParams(), params, texts=[[], [*text, int(tokens[1, 0])]])
    got = change_logits(logits, tokens, buffers.ancestors, rules)
    assert torch.equal(got[0], logits[0])
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for node in range(BUSHY.width):
        path = tokens[1, buffers.ancestors[node]].tolist()
        scores = logits[1, node].clone()
        for token, value in bias.items():
            scores[token] += value
        expected = processor(torch.tensor([text + path]), scores[None])[0]
        torch.testing.assert_close(got[1, node], expected)


def test_inverting_gives_each_token_its_share():
    p = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws = (torch.arange(1000) + 0.5) / 1000
    drawn = invert(p.expand(1, 1000, 4), draws[None])[0]
    assert torch.bincount(drawn, minlength=4).tolist() == [500, 0, 300, 200]


@pytest.mark.parametrize("flat", [True, False])
def test_nucleus_of_a_large_vocabulary_is_exact_whether_or_not_it_is_small(flat: bool):
    """A flat distribution's nucleus has more than the thousand tokens that are looked at first."""
    size = 5000
    logits = torch.linspace(0.0, 0.1 if flat else 30.0, size)[torch.randperm(size)]
    probabilities = torch.softmax(logits, -1)
    order = probabilities.argsort(descending=True)
    count = int((probabilities[order].cumsum(0) < 0.9).sum()) + 1
    assert (count > 1024) == flat
    got = distribution(logits.expand(1, 1, size), rules_of(SamplingParams(1.0, top_p=0.9), vocabulary=size))
    assert abs(int((got > 0).sum()) - count) <= 1  # one token at the edge, by rounding
    assert set(got[0, 0].nonzero().flatten().tolist()) <= set(order[: count + 1].tolist())


@pytest.mark.parametrize("top_k", [1500, 2000])
def test_a_large_top_k_is_exact(top_k: int):
    size = 5000
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0))
    got = distribution(logits.expand(1, 1, size), rules_of(SamplingParams(1.0, top_k=top_k), vocabulary=size))
    assert set(got[0, 0].nonzero().flatten().tolist()) == set(logits.topk(top_k).indices.tolist())


@given(st.integers(0, 99), st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_a_places_number_does_not_depend_on_when_it_is_asked_for(seed: int, jumps: list[int]):
    whole = Draws(seed).at(0, sum(jumps) + 4)
    draws, place = Draws(seed), 0
    for jump in jumps:
        assert torch.equal(draws.at(place, 4), whole[place : place + 4])
        place += jump


def test_rows_that_are_greedy_cost_nothing():
    assert rules_of(SamplingParams(), SamplingParams()).sampled is None
    mixed = rules_of(SamplingParams(), SamplingParams(0.7), depth=2)
    assert mixed.sampled.tolist() == [1]
    assert mixed.draws.shape == (1, 3)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -1.0}, "temperature must be a number from 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"acceptance": "loose"}, "'lossless' or 'typical'"),
        ({"logit_bias": {4: float("nan")}}, "logit_bias of token 4"),
    ],
)
def test_values_that_make_no_sense(values: dict, says: str):
    with pytest.raises(MedusaError, match=says):
        SamplingParams(**values)
