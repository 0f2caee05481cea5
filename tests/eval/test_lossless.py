import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from eval.lossless import ULPS, evaluations, examine, first_difference, tolerance

PROMPT = [5, 17, 3, 44, 21, 8, 30]
WHERE = {"width": 4, "conversation": "a", "turn": 0, "mode": "tree"}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # a random model's logits are all but equal otherwise
    return model


def ranked(model, text):
    with torch.inference_mode():
        return model(torch.tensor([text])).logits[0, -1].float().sort(descending=True)


ids = st.lists(st.integers(0, 2), max_size=6)


@given(ids, ids)
def test_first_difference_against_a_loop(one, other):
    expected = None
    for position in range(max(len(one), len(other))):
        if one[position : position + 1] != other[position : position + 1]:
            expected = position
            break
    assert first_difference(one, other) == expected


def test_tolerance_is_units_in_the_last_place_of_bfloat16():
    for best in (0.3, 1.0, 17.5, 27.375, 31.9, 32.0):
        value = torch.tensor(best, dtype=torch.bfloat16)
        following = torch.nextafter(value, torch.tensor(1e9, dtype=torch.bfloat16))
        assert tolerance(float(value), torch.bfloat16) == ULPS * float(following - value)
    assert tolerance(20.0, torch.float32) == 0.0


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_evaluations_agree_in_float32(rows):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    expected = model(torch.tensor([PROMPT])).logits[0, -1]
    found = evaluations(model, PROMPT, rows)
    assert found.shape == (len(rows), 64)
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-4, atol=1e-5)


def test_the_same_answer_is_no_divergence(model):
    assert examine(model, PROMPT, [1, 2, 3], [1, 2, 3], **WHERE) is None


def test_no_difference_is_allowed_in_float32_not_even_a_tie(model):
    with torch.no_grad():
        model.lm_head.weight[11] = model.lm_head.weight[10]
    found = examine(model, PROMPT, [1, 10], [1, 11], **WHERE)
    assert found.position == 1
    assert (found.plain, found.tree) == (10, 11)
    assert not found.allowed


def test_a_tie_in_bfloat16_is_allowed_and_a_worse_token_is_not(model):
    model = model.to(torch.bfloat16)
    best = int(ranked(model, [*PROMPT, 1]).indices[0])
    twin = (best + 1) % 64
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    tie = examine(model, PROMPT, [1, best, 7], [1, twin, 9], **WHERE)
    assert (tie.position, tie.gap, tie.behind) == (1, 0.0, 0.0)
    assert tie.allowed
    logits, tokens = ranked(model, [*PROMPT, 1])
    worse = examine(model, PROMPT, [1, best], [1, int(tokens[20])], **WHERE)
    assert worse.behind > worse.tolerance > 0
    assert worse.behind == pytest.approx(float(logits[0] - logits[20]), rel=0.2)
    assert not worse.allowed


def test_neither_token_may_be_far_from_the_best_although_both_are_close_to_each_other(model):
    model = model.to(torch.bfloat16)
    tokens = ranked(model, [*PROMPT, 1]).indices
    low, twin = int(tokens[40]), int(tokens[41])
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[low]
    assert not examine(model, PROMPT, [1, low], [1, twin], **WHERE).allowed


def test_an_answer_that_goes_on_after_the_end_is_never_allowed(model):
    model = model.to(torch.bfloat16)
    best = int(ranked(model, [*PROMPT, 1]).indices[0])
    found = examine(model, PROMPT, [1], [1, best], **WHERE)
    assert (found.position, found.plain, found.tree) == (1, None, best)
    assert not found.allowed
