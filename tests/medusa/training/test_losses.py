"""The fused loss against the obvious one: values, gradients, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from medusa.training import losses
from medusa.training.losses import fused_cross_entropy, plain_cross_entropy, sample_vocabulary


def gradients(loss, features, weight, targets, *, train_weight=True):
    features = features.clone().requires_grad_()
    weight = weight.clone().requires_grad_(train_weight)
    value = loss(features, weight, targets)
    (value * 0.37).backward()
    return value.detach(), features.grad, weight.grad


@given(
    rows=st.sampled_from([1, 2, 255, 256, 257, 600]),
    vocab=st.integers(2, 40),
    seed=st.integers(0, 100),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_fused_equals_plain(rows: int, vocab: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 8, generator=generator) * scale
    weight = torch.randn(vocab, 8, generator=generator)
    targets = torch.randint(vocab, (rows,), generator=generator)
    plain = gradients(plain_cross_entropy, features, weight, targets)
    fused = gradients(fused_cross_entropy, features, weight, targets)
    by_hand = -torch.log_softmax(features.double() @ weight.double().T, -1)[torch.arange(rows), targets].sum()
    torch.testing.assert_close(fused[0].double(), by_hand, rtol=1e-5, atol=1e-5)
    for ours, obvious in zip(fused, plain, strict=True):
        largest = max(1.0, float(obvious.abs().max()))
        torch.testing.assert_close(ours, obvious, rtol=1e-5, atol=1e-5 * largest)


def test_a_frozen_weight_gets_no_gradient_and_a_kept_transpose_changes_nothing() -> None:
    torch.manual_seed(0)
    features, weight, targets = torch.randn(300, 8), torch.randn(20, 8), torch.randint(20, (300,))
    turned = weight.t().contiguous()
    alone = gradients(fused_cross_entropy, features, weight, targets, train_weight=False)
    kept = gradients(
        lambda f, w, t: fused_cross_entropy(f, w, t, turned=turned),
        features,
        weight,
        targets,
        train_weight=False,
    )
    assert alone[2] is None
    assert torch.equal(alone[0], kept[0])
    assert torch.equal(alone[1], kept[1])


@pytest.mark.parametrize("loss", [plain_cross_entropy, fused_cross_entropy])
def test_no_rows_is_zero_and_not_nan(loss) -> None:
    features = torch.randn(0, 8, requires_grad=True)
    value = loss(features, torch.randn(20, 8), torch.zeros(0, dtype=torch.long))
    value.backward()
    assert value == 0
    assert features.grad.shape == (0, 8)


def test_logits_never_exceed_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    linear = F.linear

    def recorded(x, w, *rest):
        out = linear(x, w, *rest)
        seen.append(out.numel())
        return out

    monkeypatch.setattr(losses.F, "linear", recorded)
    rows, vocab = 10 * losses.CHUNK_ROWS, 50
    features = torch.randn(rows, 8, requires_grad=True)
    fused_cross_entropy(features, torch.randn(vocab, 8), torch.randint(vocab, (rows,))).backward()
    assert len(seen) == 20  # ten chunks: logits, and the features' gradient; none in backward
    assert max(seen) == losses.CHUNK_ROWS * vocab


def test_bf16_autocast_stays_near_float32() -> None:
    torch.manual_seed(0)
    features, weight, targets = torch.randn(300, 16), torch.randn(20, 16), torch.randint(20, (300,))
    exact = gradients(fused_cross_entropy, features, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = gradients(fused_cross_entropy, features, weight, targets)
    torch.testing.assert_close(rough[0], exact[0], rtol=0.01, atol=0.1)
    torch.testing.assert_close(rough[1], exact[1], rtol=0.05, atol=0.05)


def test_a_sample_holds_every_target_once_and_says_what_it_leaves_out() -> None:
    torch.manual_seed(0)
    targets = torch.tensor([[3, 7, -1], [7, 9, 3]])
    sample = sample_vocabulary(targets, 50, 10)
    ids = sample.ids.tolist()
    assert ids[:3] == [3, 7, 9]
    assert len(set(ids)) == len(ids) == 13
    assert sample.bias[:3].tolist() == [0, 0, 0]
    torch.testing.assert_close(sample.bias[3:].exp(), torch.full((10,), 4.7))  # 47 others, 10 of them here
    assert all(sample.places[token] == place for place, token in enumerate(ids))
    assert int((sample.places >= 0).sum()) == 13


def test_a_sample_of_all_is_the_whole_loss() -> None:
    torch.manual_seed(0)
    features, weight, targets = torch.randn(30, 8), torch.randn(20, 8), torch.randint(20, (30,))
    sample = sample_vocabulary(targets, 20, 20)
    whole = fused_cross_entropy(features, weight, targets)
    part = fused_cross_entropy(features, weight[sample.ids], sample.places[targets], bias=sample.bias)
    torch.testing.assert_close(part, whole)


def test_the_sampled_denominator_is_unbiased() -> None:
    torch.manual_seed(0)
    features, weight, targets = torch.randn(1, 8), torch.randn(200, 8), torch.tensor([5])
    whole = F.linear(features, weight).exp().sum()
    draws = []
    for _ in range(4000):
        sample = sample_vocabulary(targets, 200, 20)
        draws.append((F.linear(features, weight[sample.ids]) + sample.bias).exp().sum())
    draws = torch.stack(draws)
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - whole) < 4 * error
    assert error / whole < 0.02
