"""The search takes the tree with the most tokens per second, and plain decoding where no tree pays."""

from __future__ import annotations

import pytest

from medusa.calibration import Calibration
from medusa.errors import MedusaError
from medusa.tree import Tree
from medusa.tree_search import search_tree

CALIBRATION = Calibration.from_accuracies([[0.5, 0.2, 0.1], [0.4, 0.2, 0.1]])


def test_every_width_is_compared_and_the_fastest_taken() -> None:
    cost = {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.4, 16: 4.0}
    tree, table = search_tree(CALIBRATION, cost)
    assert [row.width for row in table] == list(range(1, 13 + 1))  # 3 + 9 paths and the root, all there are
    for row in table:
        assert row.tokens_per_second == pytest.approx(row.acceptance_length / row.seconds)
        assert row.acceptance_length == pytest.approx(CALIBRATION.expected(CALIBRATION.best_tree(row.width)))
    assert table[2].seconds == pytest.approx(1.2)  # between the widths measured
    best = max(table, key=lambda row: row.tokens_per_second)
    assert tree.width == best.width == 4
    assert tree == Tree([(0,), (1,), (0, 0)])


def test_steps_that_cost_more_than_they_gain_mean_plain_decoding() -> None:
    tree, table = search_tree(CALIBRATION, {1: 1.0, 8: 20.0})
    assert tree == Tree()
    assert table[0].acceptance_length == 1.0


def test_free_width_takes_the_widest_tree() -> None:
    assert search_tree(CALIBRATION, {1: 1.0, 12: 1.0})[0].width == 12


@pytest.mark.parametrize("cost", [{2: 1.0}, {}, {1: 0.0}, {1: 1.0, 0: 1.0}, {1: float("nan")}])
def test_bad_costs(cost: dict[int, float]) -> None:
    with pytest.raises(MedusaError, match="tree search"):
        search_tree(CALIBRATION, cost)
