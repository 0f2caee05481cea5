"""The batch loss against a loop over positions; splitting a step; freezing the base."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from medusa.heads import HeadsConfig, build_heads
from medusa.training.batches import draft_lookup, make_batch
from medusa.training.objective import Objective
from tests.medusa.training.tiny import HIDDEN, VOCAB, Tiny


def make_heads(kind: str, seed: int = 0, **settings):
    config = {"num_heads": 3, "hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": 40, **settings}
    heads = build_heads(HeadsConfig(kind=kind, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        if heads.draft_vocab is not None:
            heads.draft_vocab.copy_(torch.randperm(VOCAB, generator=generator)[:40].sort().values)
    return heads


def loss_of(heads, tiny: Tiny, batch, counts=None, **settings):
    objective = Objective(heads, tiny.base, **settings)
    counts = (batch.targets >= 0).sum(1) if counts is None else counts
    return objective(batch.hidden, batch.tokens, batch.targets, counts)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_equals_a_loop_over_positions(tiny: Tiny, kind: str, lm_head: str) -> None:
    heads = make_heads(kind, lm_head=lm_head, num_layers=2)
    states = tiny.train.get(list(range(8)))
    batch = make_batch(states, 3, draft_lookup(heads.draft_vocab, VOCAB))
    loss, sums = loss_of(heads, tiny, batch)
    embed, lm_weight = tiny.base.model.get_input_embeddings(), tiny.base.model.get_output_embeddings().weight
    known = heads.draft_vocab.tolist()
    total = 0.0
    for k in range(1, 4):
        terms = []
        for start, stop in zip(states.offsets[:-1].tolist(), states.offsets[1:].tolist(), strict=True):
            for i in range(start, stop - k):
                wanted = int(states.tokens[i + k])
                if wanted not in known:
                    continue
                path = embed(states.tokens[i : i + k])
                feature = heads.features(k, states.hidden[i].float(), path)
                weight = heads.lm_head[k - 1] if lm_head == "own" else lm_weight[heads.draft_vocab]
                terms.append(-torch.log_softmax(weight @ feature, -1)[known.index(wanted)])
        assert len(terms) > 20
        torch.testing.assert_close(sums[k - 1], torch.stack(terms).sum(), rtol=1e-5, atol=1e-4)
        total = total + 0.8**k * torch.stack(terms).mean()
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-5)
    # Gradients too: of the loop, and of the fused loss.
    expected = torch.autograd.grad(total, list(heads.parameters()))
    for ours, obvious in zip(torch.autograd.grad(loss, list(heads.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, obvious, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_fused_and_plain_losses_agree(tiny: Tiny, kind: str) -> None:
    heads = make_heads(kind)
    batch = make_batch(tiny.train.get(list(range(30))), 3, draft_lookup(heads.draft_vocab, VOCAB))
    fused, _ = loss_of(heads, tiny, batch)
    plain, _ = loss_of(heads, tiny, batch, loss="plain_cross_entropy")
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_a_split_step_has_the_gradient_of_the_whole(tiny: Tiny) -> None:
    heads = make_heads("hydra")
    lookup = draft_lookup(heads.draft_vocab, VOCAB)
    whole = make_batch(tiny.train.get(list(range(10))), 3, lookup)
    parts = [make_batch(tiny.train.get(ids), 3, lookup) for ids in ([0, 1, 2], [3], list(range(4, 10)))]
    counts = (whole.targets >= 0).sum(1)
    expected = torch.autograd.grad(loss_of(heads, tiny, whole)[0], list(heads.parameters()))
    split = sum(loss_of(heads, tiny, part, counts)[0] for part in parts)
    for ours, obvious in zip(torch.autograd.grad(split, list(heads.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, obvious, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_an_answer_too_short_for_any_head_is_zero_and_not_nan(tiny: Tiny, kind: str) -> None:
    """A sample cut off before the assistant said anything a head could guess: nothing to learn, not NaN."""
    heads = make_heads(kind)
    states = tiny.train.get([0])
    short = dataclasses.replace(
        states, hidden=states.hidden[:1], tokens=states.tokens[:1], offsets=torch.tensor([0, 1])
    )
    loss, sums = loss_of(heads, tiny, make_batch(short, 3, draft_lookup(heads.draft_vocab, VOCAB)))
    assert loss == 0
    assert sums.tolist() == [0, 0, 0]
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in heads.parameters())


def test_the_base_gets_no_gradient_and_is_not_saved(tiny: Tiny) -> None:
    heads = make_heads("hydra")
    objective = Objective(heads, tiny.base)
    assert {id(p) for p in objective.parameters()} == {id(p) for p in heads.parameters()}
    assert all(name.startswith("heads.") for name in objective.state_dict())
    batch = make_batch(tiny.train.get([0, 1]), 3, draft_lookup(heads.draft_vocab, VOCAB))
    objective(batch.hidden, batch.tokens, batch.targets, (batch.targets >= 0).sum(1))[0].backward()
    assert tiny.base.model.get_output_embeddings().weight.grad is None


def test_blocks_of_a_deep_head_learn_apart(tiny: Tiny) -> None:
    """A block repeated by reference would share one weight between the layers."""
    heads = make_heads("medusa", num_layers=3)
    batch = make_batch(tiny.train.get(list(range(5))), 3, draft_lookup(heads.draft_vocab, VOCAB))
    loss_of(heads, tiny, batch)[0].backward()
    parameters = list(heads.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters) == 3 * 3 * 2
    gradients = [p.grad for p in parameters if p.dim() == 2]
    for i, one in enumerate(gradients):
        assert all(not torch.allclose(one, other) for other in gradients[i + 1 :])


@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_the_sampled_loss_has_the_whole_vocabulary_when_it_samples_all(tiny: Tiny, lm_head: str) -> None:
    heads = make_heads("hydra", lm_head=lm_head)
    batch = make_batch(tiny.train.get(list(range(10))), 3, draft_lookup(heads.draft_vocab, VOCAB))
    whole, _ = loss_of(heads, tiny, batch)
    sampled, _ = loss_of(heads, tiny, batch, loss="sampled_cross_entropy", sampled=40)
    torch.testing.assert_close(sampled, whole, rtol=1e-5, atol=1e-5)
    few, _ = loss_of(heads, tiny, batch, loss="sampled_cross_entropy", sampled=1)
    few.backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in heads.parameters())
