"""What a step costs by tree width: measured on this machine, because that is what decides which tree pays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.heads import DraftHeads
from medusa.tree import Tree

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step at one tree width.

    Attributes:
        width: nodes verified, the root included.
        median: seconds.
        low: lower quartile, seconds.
        high: upper quartile, seconds.
    """

    width: int
    median: float
    low: float
    high: float


def bushy_tree(width: int, depth: int) -> Tree:
    """A tree of the given width for timing: no deeper than `depth`, its deepest path complete.

    What is timed must do the work that a searched tree of this width would: all heads draft, several parents on
    each level.
    """
    depth = min(depth, width - 1)
    paths = [(0,) * length for length in range(1, depth + 1)]
    known = set(paths)
    rank = 1
    while len(paths) < width - 1:
        for stem in [(), *((0,) * length for length in range(1, depth))]:
            if len(paths) < width - 1 and (*stem, rank) not in known:
                known.add((*stem, rank))
                paths.append((*stem, rank))
        rank += 1
    return Tree(paths)


def measure_step_cost(
    model: PreTrainedModel,
    heads: DraftHeads,
    *,
    widths: Sequence[int] = WIDTHS,
    batch: int = 1,
    context: int = 200,
    repeats: int = 15,
) -> list[StepCost]:
    """Times whole engine steps (draft, verify, accept, commit) at several widths, interleaved.

    Interleaving puts every width through the same quiet and busy moments of a shared machine, so that the ratios,
    which are what the tree search needs, hold even where the times do not.

    Args:
        model: the base.
        heads: the draft heads whose draft cost is part of the step.
        widths: tree widths, the root included; 1 is plain decoding and should be among them.
        batch: rows.
        context: tokens already in the cache, for each row.
        repeats: steps timed at each width, after two that are not.

    Returns:
        One entry for each width, ascending; widths for which the heads have too few guesses are left out.

    Raises:
        MedusaError: none of the widths can be had.
    """
    depth = heads.config.num_heads
    top = heads.config.draft_size
    trees = {width: bushy_tree(width, depth) for width in sorted(set(widths))}
    trees = {width: tree for width, tree in trees.items() if tree.top_k <= top}
    if not trees:
        raise MedusaError(f"no tree is as wide as asked with guesses of {top} tokens; ask for smaller widths")
    widest = max(trees.values(), key=lambda tree: tree.width)
    engine = Engine(model, heads, widest, batch=batch, max_length=context + (depth + 1) * 4)
    prompt = torch.arange(context).remainder(engine.config.vocab_size).tolist()
    for row in range(batch):
        engine.prefill(row, prompt)
    seconds: dict[int, list[float]] = {width: [] for width in trees}
    for repeat in range(repeats + 2):
        for width, tree in trees.items():
            engine.set_tree(tree)
            for row in range(batch):
                engine.rewind(row, context)
            began = time.perf_counter()
            engine.step()
            if repeat >= 2:
                seconds[width].append(time.perf_counter() - began)
    result = []
    for width, times in seconds.items():
        low, median, high = statistics.quantiles(times, n=4)
        result.append(StepCost(width, median, low, high))
    return result
