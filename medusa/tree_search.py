"""The tree that decodes fastest: expected tokens of a step over the measured time of a step of that width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from medusa.calibration import Calibration
from medusa.errors import MedusaError
from medusa.tree import Tree


@dataclass(frozen=True)
class Candidate:
    """One width of the family.

    Attributes:
        width: nodes verified in a step, root included; 1 is plain decoding.
        depth: heads used.
        acceptance_length: expected tokens committed in a step.
        seconds: time of a step at this width.
        tokens_per_second: acceptance_length / seconds.
    """

    width: int
    depth: int
    acceptance_length: float
    seconds: float
    tokens_per_second: float


def search_tree(calibration: Calibration, step_cost: dict[int, float]) -> tuple[Tree, list[Candidate]]:
    """Compares every width from 1 to the widest one measured and returns the fastest tree.

    For each width the best tree is the one of the most frequent paths (`Calibration.best_tree`). Its depth
    adds drafting time with sequential heads; `step_cost` is measured with the drafting included, so that the
    time of a width between two measured ones is taken on the line between them.

    Args:
        calibration: path counts.
        step_cost: width -> seconds of a whole step; width 1 is plain decoding and must be there.

    Returns:
        The fastest tree (the empty tree if speculation does not pay) and the candidates in order of width.

    Raises:
        MedusaError: width 1 was not measured, or a time is not above zero.
    """
    if 1 not in step_cost:
        raise MedusaError("tree search: the step cost of width 1 (plain decoding) is missing; measure it too")
    if any(width < 1 or not seconds > 0 for width, seconds in step_cost.items()):
        raise MedusaError(
            f"tree search: every width must be >= 1 and take more than 0 seconds, got {step_cost}"
        )
    measured = sorted(step_cost)
    table: list[Candidate] = []
    best = Tree()
    for width in range(1, measured[-1] + 1):
        tree = calibration.best_tree(width)
        if tree.width < width:
            break  # the calibration knows no further path
        seconds = float(np.interp(width, measured, [step_cost[w] for w in measured]))
        tau = calibration.expected(tree)
        candidate = Candidate(width, tree.depth, tau, seconds, tau / seconds)
        if not table or candidate.tokens_per_second > max(c.tokens_per_second for c in table):
            best = tree
        table.append(candidate)
    return best, table
