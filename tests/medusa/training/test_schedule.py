"""The learning rate's shape; the average's decay, and that weights come back after it was applied."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from medusa.training.schedule import Average, cosine_rate


def test_learning_rate_rises_and_falls() -> None:
    rates = [cosine_rate(step, 100, 0.1, 0.2) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert rates[55] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[99] == pytest.approx(0.2, abs=0.001)
    assert cosine_rate(0, 1, 0.0, 0.0) == 1.0


def test_average_equals_a_loop_and_is_put_on_and_off() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    average = Average([weight], 0.5)
    expected = torch.zeros(3)
    for step in range(20):
        with torch.no_grad():
            weight.add_(torch.randn(3))
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight.detach()
        average.update(step)
    own = weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(weight.detach(), own)


def test_no_average_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    average = Average([weight], 0.0)
    average.update(5)
    with average.applied():
        assert weight.tolist() == [1, 1, 1]
    assert average.values == []
