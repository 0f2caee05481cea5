"""The section `steps`: how long a step takes by rows and tree width, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from benchmarks.parts import PartClock
from benchmarks.records import Steps, StepTimes, quartiles
from medusa.cost import CostModel, StepCost, bushy_tree
from medusa.decoding import Engine
from medusa.heads import DraftHeads
from medusa.tree import Tree

WARM_UP = 2  # rounds that are not counted: the first allocates memory


def measure_steps(
    model: PreTrainedModel,
    heads: DraftHeads,
    *,
    batches: Sequence[int],
    widths: Sequence[int],
    repeats: int,
    context: int = 128,
    progress: Callable[[str], None] = lambda text: None,
) -> Steps:
    """Times eager steps part by part; at each number of rows the widths are interleaved.

    Left out are widths for which the heads have too few guesses, and widths whose step takes longer than K + 1 plain
    ones: a step commits at most K + 1 tokens, so they cannot pay.

    Args:
        model: the base.
        heads: the draft heads.
        batches: numbers of rows.
        widths: tree widths, the root included; 1, plain decoding, is measured in any case.
        repeats: steps timed at each.
        context: tokens in each row's cache.
        progress: called with a few words for each of `len(batches) * (WARM_UP + repeats)` rounds.
    """
    most = heads.config.num_heads + 1
    trees = {width: bushy_tree(width, heads.config.num_heads) for width in sorted({1, *widths})}
    skipped = [
        f"{width} nodes: the heads have {heads.config.draft_size} guesses at a place"
        for width, tree in trees.items()
        if tree.top_k > heads.config.draft_size
    ]
    trees = {width: tree for width, tree in trees.items() if tree.top_k <= heads.config.draft_size}
    rows = max(batches)
    engine = Engine(model, heads, trees[max(trees)], batch=rows, max_length=context + 4 * most)
    prompt = torch.arange(context).remainder(engine.config.vocab_size).tolist()
    clock = PartClock(engine.device)
    times: list[StepTimes] = []
    filled = 0
    for batch in sorted(set(batches)):
        while filled < batch:  # a step takes the rows up to the last in use, so that one engine serves all
            engine.prefill(filled, prompt)
            filled += 1
        found = {width: StepTimes(batch=batch, width=width, seconds=[], parts={}) for width in trees}
        least: dict[int, float] = {}  # seconds of the fastest step so far: a neighbour's noise skips nothing
        with clock.installed(model):
            for repeat in range(WARM_UP + repeats):
                progress(f"steps of {batch} row{'s' * (batch > 1)}")
                for width in list(found):
                    seconds, parts = _step(engine, clock, batch, context, trees[width])
                    least[width] = min(seconds, least.get(width, seconds))
                    if repeat >= WARM_UP:
                        found[width].seconds.append(seconds)
                        for name, part in parts.items():
                            found[width].parts.setdefault(name, []).append(part)
                    # A first step is slow by itself, so it must be far too slow.
                    elif least[width] > (2 if repeat == 0 else 1) * most * least[1]:
                        wider = [other for other in found if other >= width]
                        names = ", ".join(map(str, wider))
                        skipped.append(
                            f"{batch} row{'s' * (batch > 1)}, {names} nodes: a step takes longer than {most} plain "
                            f"ones, and commits at most {most} tokens a row"
                        )
                        for other in wider:
                            del found[other]
                        break
        times += found.values()
    return Steps(context=context, times=times, skipped=skipped)


def _step(
    engine: Engine, clock: PartClock, batch: int, context: int, tree: Tree
) -> tuple[float, dict[str, float]]:
    """One step of rows 0..batch-1 from the same context: its seconds, and those of its parts."""
    engine.set_tree(tree)
    for row in range(batch):
        engine.rewind(row, context)
    clock.take(0.0)
    began = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - began
    return seconds, clock.take(seconds)


def cost_model(steps: Steps, about: dict) -> CostModel:
    """What the adaptive trees need to know of measured steps."""
    curves: dict[int, list[StepCost]] = {}
    for entry in steps.times:
        low, median, high = quartiles(entry.seconds)
        curves.setdefault(entry.batch, []).append(StepCost(entry.width, median, low, high))
    return CostModel(curves, about)
