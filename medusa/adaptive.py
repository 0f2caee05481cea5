"""Which tree the next step takes: the one that commits the most tokens per second now, here, for these rows.

Two things decide. What a step costs by rows and nodes is measured once (`cost.py`). What it commits is expected from
the calibration, corrected by what the rows in flight really accepted: text that the heads cannot guess, or heads that
are worth nothing, drive the correction towards zero, and the choice to one node, which is plain decoding.

The trees are a nested family, the most frequent paths first, so that the one number learnt from any of them, the share
of the expected guesses that was accepted, says something about all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from medusa.calibration import Calibration
from medusa.cost import CostModel
from medusa.errors import MedusaError
from medusa.tree import Tree

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
MARGIN = 1.02  # a tree must promise this many times plain decoding's rate: costs are measured with some error
PROBE_COST = 0.01  # most of the time spent on looking whether trees pay again, while they do not
PROBE_STEPS = 16  # and how many plain steps lie between two looks at least
_PRIOR = 4.0  # expected guesses' worth of trust in the calibration, for all rows together
_ROW_PRIOR = 6.0  # and in all rows' share, for one row
_MEMORY = 200.0  # expected guesses after which the share of all rows has forgotten
_ROW_MEMORY = 24.0  # and that of one row


class Share:
    """A decaying ratio of accepted to expected guesses, with a prior."""

    def __init__(self, memory: float):
        self._keep = memory
        self.accepted = self.expected = 0.0

    def add(self, accepted: float, expected: float) -> None:
        """Counts a step; what was counted long ago weighs less."""
        decay = math.exp(-expected / self._keep)
        self.accepted = decay * self.accepted + accepted
        self.expected = decay * self.expected + expected

    def value(self, prior: float, weight: float) -> float:
        """The share; `prior` counts as much as `weight` expected guesses."""
        return (self.accepted + weight * prior) / (self.expected + weight)


class AdaptiveTrees:
    """Chooses among nested trees before each step.

    Args:
        trees: the family; the empty tree is always in it.
        expected: tree -> guesses that a step is expected to accept by the calibration, >= 0.
        cost: seconds of a step by rows and nodes.

    Attributes:
        trees: by width, the empty tree first.
    """

    def __init__(self, trees: Sequence[Tree], expected: Mapping[Tree, float], cost: CostModel):
        self.trees = sorted({Tree(), *trees}, key=lambda tree: tree.width)
        self._expected = {tree: expected.get(tree, 0.0) for tree in self.trees}
        self._cost = cost
        self._all = Share(_MEMORY)
        self._rows: dict[int, Share] = {}
        self._tree = Tree()
        self._plain_steps = 0

    @classmethod
    def from_calibration(
        cls, calibration: Calibration, cost: CostModel, widths: Sequence[int] = WIDTHS
    ) -> AdaptiveTrees:
        """The best tree of each width by the calibration.

        Raises:
            MedusaError: the calibration knows no path.
        """
        trees = [calibration.best_tree(width) for width in widths]
        if max(tree.width for tree in trees) == 1:
            raise MedusaError("the calibration holds no path, so there is no tree to choose; calibrate again")
        return cls(trees, {tree: calibration.expected(tree) - 1.0 for tree in trees}, cost)

    def start(self, row: int) -> None:
        """A row has a new prompt: what its last one accepted says nothing about it."""
        self._rows[row] = Share(_ROW_MEMORY)

    def share(self, row: int) -> float:
        """How many of the guesses expected by the calibration a row accepts, as far as is known."""
        everywhere = self._all.value(1.0, _PRIOR)
        return self._rows[row].value(everywhere, _ROW_PRIOR) if row in self._rows else everywhere

    def choose(self, rows: Sequence[int], count: int) -> Tree:
        """The tree for the next step.

        Args:
            rows: those in use.
            count: rows that the step computes, the unused ones among them included.
        """
        shares = sum(self.share(row) for row in rows)

        def rate(tree: Tree) -> float:
            return (len(rows) + shares * self._expected[tree]) / self._cost.seconds(count, tree.width)

        plain = rate(self.trees[0])
        best = max(self.trees, key=rate)
        if rate(best) < MARGIN * plain:
            best = self.trees[0]
        if best.width > 1:
            self._plain_steps = 0
        elif len(self.trees) > 1:
            self._plain_steps += 1
            probe = self.trees[1]
            extra = self._cost.seconds(count, probe.width) / self._cost.seconds(count, 1) - 1.0
            if self._plain_steps >= max(extra / PROBE_COST, PROBE_STEPS):
                self._plain_steps = 0
                best = probe
        self._tree = best
        return best

    def observe(self, rows: Sequence[int], accepted: Sequence[int]) -> None:
        """Counts the guesses that each row accepted of the tree chosen last."""
        expected = self._expected[self._tree]
        if not expected:
            return
        for row, count in zip(rows, accepted, strict=True):
            self._all.add(count, expected)
            if row in self._rows:
                self._rows[row].add(count, expected)
