"""What a step costs by rows and tree width: measured on this machine, because that is what decides which tree pays."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from medusa.base import Base
from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.files import medusa_home, read_json, sha256_json, write_json
from medusa.hardware import processor
from medusa.heads import DraftHeads
from medusa.tree import Tree

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
BATCHES = (1, 2, 4, 8, 16, 32)
_SLOW = 0.25  # seconds; quicker steps are all measured, however much slower than plain decoding


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

    def __post_init__(self) -> None:
        times = (self.low, self.median, self.high)
        if type(self.width) is not int or self.width < 1:
            raise ValueError(f"a width of {self.width!r}")
        if not all(type(time) in (int, float) and 0 < time < math.inf for time in times):
            raise ValueError(f"a time of width {self.width} makes no sense")


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step by rows and nodes.

    Attributes:
        curves: rows -> steps by width, ascending; width 1, plain decoding, among them.
        about: what was measured: the processor, base, heads and the format of its numbers and weights.
    """

    curves: Mapping[int, Sequence[StepCost]]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.curves or any(not curve or curve[0].width != 1 for curve in self.curves.values()):
            raise MedusaError(
                "step costs: every batch needs the time of width 1, plain decoding; measure again"
            )
        object.__setattr__(self, "_known", {})

    def curve(self, batch: int = 1) -> dict[int, float]:
        """Width -> median seconds as measured for a number of rows, the nearest one if it was not."""
        nearest = min(self.curves, key=lambda rows: abs(rows - batch))
        return {step.width: step.median for step in self.curves[nearest]}

    def seconds(self, batch: int, width: int) -> float:
        """The time of a step, on the lines between what was measured.

        Infinite beyond the widest tree measured: wider ones were left out because they cannot pay. More rows than
        were measured take proportionally longer.
        """
        if (batch, width) not in self._known:
            rows = sorted(self.curves)
            times = [self._at(number, width) for number in rows]
            if batch > rows[-1]:
                found = times[-1] * batch / rows[-1]
            elif batch in rows:
                found = times[rows.index(batch)]
            else:
                above = next((place for place, number in enumerate(rows) if number > batch), 0)
                near = slice(max(above - 1, 0), above + 1)
                found = float(np.interp(batch, rows[near], times[near]))
                found = found if math.isfinite(found) else math.inf
            self._known[batch, width] = found
        return self._known[batch, width]

    def _at(self, rows: int, width: int) -> float:
        steps = self.curves[rows]
        if width > steps[-1].width:
            return math.inf
        # More nodes never take less time: where they seem to, that is the noise of a shared machine, and a tree that
        # guesses nothing right would be chosen for it.
        times = np.maximum.accumulate([step.median for step in steps])
        return float(np.interp(width, [step.width for step in steps], times))

    def to_json(self, path: str | os.PathLike) -> None:
        """Writes the model, atomically."""
        curves = [
            {"batch": batch, "steps": [vars(step) for step in steps]} for batch, steps in self.curves.items()
        ]
        write_json(path, {"format": 2, "about": dict(self.about), "curves": curves})

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> CostModel:
        """Raises MedusaError if the file cannot be read or holds no step costs."""
        value = read_json(path)
        try:
            curves = {
                int(curve["batch"]): [StepCost(**step) for step in curve["steps"]]
                for curve in value["curves"]
            }
            if any(batch < 1 for batch in curves):
                raise ValueError("a batch below 1")
            return cls(curves, value["about"])
        except (KeyError, TypeError, ValueError) as error:
            raise MedusaError(
                f"{path} holds no step costs; `medusa cost --out {path}` writes them"
            ) from error


def cost_about(base: Base, heads: DraftHeads) -> dict[str, Any]:
    """What step costs depend on; costs measured under other circumstances are not used."""
    weight = base.model.get_output_embeddings().weight
    return {
        "processor": processor(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "weights": base.weights,
        "base": base.fingerprint,
        "heads": heads.config.to_dict(),
    }


def cost_file(about: Mapping[str, Any]) -> Path:
    """Where the step costs of these circumstances are kept between runs."""
    return medusa_home() / "costs" / f"{sha256_json(dict(about))[:16]}.json"


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


def measure_cost_model(
    base: Base,
    heads: DraftHeads,
    *,
    batches: Sequence[int] = BATCHES,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 9,
    progress: Callable[[int], None] = lambda batch: None,
) -> CostModel:
    """Step costs for several numbers of rows; see `measure_step_cost`.

    Args:
        base: the base, loaded.
        heads: the draft heads whose draft cost is part of a step.
        batches: numbers of rows.
        widths: tree widths; 1 among them.
        repeats: steps timed at each.
        progress: called with each number of rows before it is measured.
    """
    curves = {}
    for batch in sorted(set(batches)):
        progress(batch)
        curves[batch] = measure_step_cost(base.model, heads, batch=batch, widths=widths, repeats=repeats)
    return CostModel(curves, cost_about(base, heads))


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
        One entry for each width, ascending. Left out are widths for which the heads have too few guesses, and widths
        whose first step took far longer than K + 1 plain ones: a step commits at most K + 1 tokens, so they cannot
        pay.

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
        for width, tree in list(trees.items()):
            engine.set_tree(tree)
            for row in range(batch):
                engine.rewind(row, context)
            began = time.perf_counter()
            engine.step()
            took = time.perf_counter() - began
            seconds[width].append(took)
            if repeat == 0 and took > max(_SLOW, (depth + 2) * seconds[min(trees)][0]):
                trees = {
                    narrow: tree for narrow, tree in trees.items() if narrow < width or narrow == min(trees)
                }
                break
        if repeat == 1:
            for times in seconds.values():  # the first rounds allocate memory and choose kernels
                times.clear()
    result = []
    for width in trees:
        low, median, high = statistics.quantiles(seconds[width], n=4, method="inclusive")
        result.append(StepCost(width, median, low, high))
    return result
