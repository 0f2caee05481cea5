import pytest
import torch

from medusa.errors import MedusaError
from medusa.heads import HEAD_KINDS, HeadsConfig, build_heads
from tests.medusa.models import HIDDEN, VOCABULARY, small_model

KINDS = sorted(HEAD_KINDS)


def config(kind: str, **changes) -> HeadsConfig:
    return HeadsConfig(
        **({"kind": kind, "num_heads": 3, "hidden_size": HIDDEN, "vocab_size": VOCABULARY} | changes)
    )


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_untrained_heads_are_the_identity(kind, layers):
    heads = build_heads(config(kind, num_layers=layers, width=20))
    hidden = torch.randn(4, HIDDEN)
    for k in (1, 2, 3):
        assert torch.equal(heads.features(k, hidden, torch.randn(4, k, HIDDEN)), hidden)


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_untrained_heads_give_the_bases_own_logits(kind, lm_head):
    weight = small_model().get_output_embeddings().weight.detach()
    heads = build_heads(config(kind, lm_head=lm_head, draft_vocab_size=30))
    heads.draft_vocab.copy_(torch.randperm(VOCABULARY)[:30])
    heads.start_lm_heads(weight)
    hidden = torch.randn(4, HIDDEN)
    for k in (1, 2, 3):
        features = heads.features(k, hidden, torch.randn(4, k, HIDDEN))
        logits = torch.nn.functional.linear(hidden, weight)[:, heads.draft_vocab]
        torch.testing.assert_close(heads.draft_logits(k, features, weight), logits)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_do_not_share_weights(kind):
    """`[block] * L` repeats one module by reference; then depth is an illusion."""
    heads = build_heads(config(kind, num_layers=3))
    pointers = [parameter.data_ptr() for parameter in heads.parameters()]
    assert len(pointers) == len(set(pointers))
    assert len(list(heads.named_parameters())) == len(list(heads.named_parameters(remove_duplicate=False)))


def test_medusa_matches_the_papers_formula():
    heads = build_heads(config("medusa", num_layers=2))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(5, HIDDEN)
    expected = x
    for layer in range(2):
        weight = heads.state_dict()[f"heads.1.{layer}.linear.weight"]
        bias = heads.state_dict()[f"heads.1.{layer}.linear.bias"]
        z = expected @ weight.T + bias
        expected = expected + z * torch.sigmoid(z)
    torch.testing.assert_close(heads.features(2, x, None), expected)


def test_hydra_depends_on_the_order_of_the_path():
    heads = build_heads(config("hydra"))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden, path = torch.randn(1, HIDDEN), torch.randn(1, 2, HIDDEN)
    assert not torch.allclose(heads.features(2, hidden, path), heads.features(2, hidden, path.flip(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_leading_shape_is_kept(kind):
    heads = build_heads(config(kind))
    assert heads.features(2, torch.randn(2, 5, HIDDEN), torch.randn(2, 5, 2, HIDDEN)).shape == (2, 5, HIDDEN)


def test_pruned_rows_follow_a_changed_vocabulary():
    heads = build_heads(config("medusa", draft_vocab_size=4))
    weight = torch.randn(VOCABULARY, HIDDEN)
    assert torch.equal(heads.draft_weight(1, weight), weight[:4])
    heads.draft_vocab.copy_(torch.tensor([9, 3, 5, 60]))
    assert torch.equal(heads.draft_weight(1, weight), weight[[9, 3, 5, 60]])
    assert heads.to_tokens(torch.tensor([[3, 0]])).tolist() == [[60, 9]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"lm_head": "tied"}, "'shared' or 'own'"),
        ({"draft_vocab_size": VOCABULARY + 1}, "draft_vocab_size"),
        ({"width": 0}, "width"),
        ({"width": 1.5}, "width"),
        ({"draft_vocab_size": "500"}, "draft_vocab_size"),
        ({"kind": ["hydra"]}, "kind must be a name"),
    ],
)
def test_bad_configurations(changes, says):
    with pytest.raises(MedusaError, match=says):
        config(**{"kind": "medusa", **changes})


def test_unknown_keys_and_kinds_name_what_is_near():
    values = config("medusa").to_dict()
    assert HeadsConfig.from_dict(values) == config("medusa")
    with pytest.raises(MedusaError, match="did you mean 'num_heads'"):
        HeadsConfig.from_dict(values | {"num_head": 3})
    with pytest.raises(MedusaError, match="hidden_size missing"):
        HeadsConfig.from_dict({"kind": "medusa", "num_heads": 1, "vocab_size": 3})
    with pytest.raises(MedusaError, match="known: hydra, medusa"):
        build_heads(config("eagle"))
