"""How good the heads are on unseen answers: accuracy by rank, and the acceptance length it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from medusa.calibration import Calibration, rank_vectors, simulate
from medusa.errors import MedusaError
from medusa.heads import DraftHeads
from medusa.tree import Tree

TOPS = (1, 2, 3, 5, 10)  # the k of the top-k accuracies that are reported


def choose_segments(lengths: Any, max_tokens: int | None) -> list[int]:
    """Answers to evaluate on, the same in every run: spread evenly over the set, together at most
    `max_tokens` long.

    Raises:
        MedusaError: there is no answer.
    """
    lengths = np.asarray(lengths)
    if not len(lengths):
        raise MedusaError(
            "evaluation: the validation states hold no answers; build them from distilled conversations"
        )
    if max_tokens is None or lengths.sum() <= max_tokens:
        return list(range(len(lengths)))
    order = np.random.default_rng(0).permutation(len(lengths))
    fit = max(1, int((np.cumsum(lengths[order]) <= max_tokens).sum()))
    return sorted(order[:fit].tolist())


def evaluate(
    heads: DraftHeads,
    base: Any,
    source: Any,
    segment_ids: list[int],
    *,
    tree_width: int,
    accelerator: Accelerator | None = None,
) -> tuple[dict[str, Any], Calibration, Tree]:
    """Ranks the true tokens of whole answers and walks them with the best tree of `tree_width` nodes.

    Args:
        heads: K heads.
        base: a `medusa.base.Base`.
        source: `StatesCache` or `OnlineStates`.
        segment_ids: answers, of `choose_segments`.
        tree_width: nodes, root included.
        accelerator: shares the answers out between its processes.

    Returns:
        {"acceptance_length": float, "accuracy": {"1": [K], "2": ..., "10": [K]}, "tree_width": int,
        "positions": int}, the counts and the tree; the same on every process.
    """
    if accelerator is None or accelerator.num_processes == 1:
        parts = [rank_vectors(heads, base, source, segment_ids)]
    else:
        mine = segment_ids[accelerator.process_index :: accelerator.num_processes]
        parts = gather_object([rank_vectors(heads, base, source, mine)])
    ranks = np.concatenate([ranks for ranks, _ in parts])
    starts = np.cumsum([0] + [len(ranks) for ranks, _ in parts])
    offsets = np.concatenate(
        [[0]] + [part[1:] + start for (_, part), start in zip(parts, starts, strict=False)]
    )
    calibration = Calibration.from_walk(ranks, offsets, tree_width)
    tree = calibration.best_tree(tree_width)
    metrics = {
        "acceptance_length": simulate(ranks, offsets, tree),
        "accuracy": {str(top): calibration.accuracy(top) for top in TOPS if top <= calibration.top_k},
        "tree_width": tree.width,
        "positions": calibration.positions,
    }
    return metrics, calibration, tree
