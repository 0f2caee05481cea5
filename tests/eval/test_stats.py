import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.stats import acceptance_length, acceptance_rate, rate, speedup, typical


def test_rate_is_of_totals_not_a_mean_of_rates():
    assert rate([100, 1], [10, 1]) == pytest.approx(101 / 11)


def test_speedup_is_the_ratio_of_the_two_rates():
    found = speedup([30, 60], [1, 2], [30, 60], [2, 4])
    assert found.mean == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)


def test_interval_agrees_with_the_obvious_bootstrap():
    import random

    tokens = [50, 80, 120, 30, 64]
    seconds = [1.0, 2.2, 2.0, 0.9, 1.3]
    plain = [2.3, 3.5, 5.6, 1.3, 3.1]
    found = speedup(tokens, seconds, tokens, plain, resamples=20_000)
    draw = random.Random(1)
    ratios = []
    for _ in range(20_000):
        chosen = [draw.randrange(5) for _ in range(5)]
        fast = sum(tokens[i] for i in chosen) / sum(seconds[i] for i in chosen)
        slow = sum(tokens[i] for i in chosen) / sum(plain[i] for i in chosen)
        ratios.append(fast / slow)
    ratios.sort()
    assert found.low == pytest.approx(ratios[500], abs=0.02)
    assert found.high == pytest.approx(ratios[-500], abs=0.02)
    assert found.low < found.mean < found.high


def test_same_seed_same_interval_and_another_seed_another():
    columns = ([5, 9, 7], [1, 2, 1.2], [5, 9, 7], [2, 3, 2.7])
    assert speedup(*columns, seed=3) == speedup(*columns, seed=3)
    assert speedup(*columns, seed=3, resamples=100) != speedup(*columns, seed=4, resamples=100)


def test_one_conversation_has_no_interval():
    found = speedup([10], [1], [10], [3])
    assert (found.mean, found.low, found.high) == (3.0, 3.0, 3.0)


def test_unequal_or_empty_columns_are_refused():
    with pytest.raises(ValueError, match="one figure for each conversation"):
        speedup([], [], [], [])
    with pytest.raises(ValueError, match="one figure for each conversation"):
        speedup([1, 2], [1, 2], [1], [1, 2])


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.floats(0.01, 60), st.integers(1, 500), st.floats(0.01, 60)),
        min_size=1,
        max_size=8,
    )
)
def test_interval_is_finite_and_ordered(rows):
    found = speedup(*zip(*rows), resamples=200)
    assert all(math.isfinite(value) for value in (found.mean, found.low, found.high))
    assert found.low <= found.high


def test_acceptance_length_counts_the_root():
    assert acceptance_length([[1, 1, 1]]) == 1.0
    assert acceptance_length([[3, 1], [2]]) == 2.0


def test_acceptance_rate_by_hand():
    # Steps commit 3, 1, 2, and a last one of 2 that the answer's end may have cut.
    # Depth 1: tried by all four, taken by three. Depth 2: tried by the first and third only, taken by the
    # first.
    assert acceptance_rate([[3, 1, 2, 2]], depth=2) == [3 / 4, 1 / 2]


def test_the_cut_of_a_last_step_is_not_a_refusal():
    assert acceptance_rate([[2, 1]], depth=1) == [1.0]


def test_a_depth_never_reached_is_left_out():
    assert acceptance_rate([[1, 1, 1]], depth=4) == [0.0]
    assert acceptance_rate([[1]], depth=4) == []


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=20), min_size=1, max_size=5))
def test_acceptance_rate_against_a_loop(accepted):
    expected = []
    for depth in range(1, 5):
        outcomes = []
        for steps in accepted:
            for number, tokens in enumerate(steps):
                if tokens > depth:
                    outcomes.append(1)
                elif tokens == depth and number < len(steps) - 1:
                    outcomes.append(0)
        if not outcomes:
            break
        expected.append(sum(outcomes) / len(outcomes))
    assert acceptance_rate(accepted, depth=4) == pytest.approx(expected)


def test_typical_ignores_one_disturbed_repeat():
    assert typical([1.0, 1.1, 9.0]) == 1.1
