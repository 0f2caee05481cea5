"""The picture of a tree search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.errors import MedusaError
from medusa.files import atomic_file

if TYPE_CHECKING:
    from medusa.tree_search import Candidate

FORMATS = ("png", "svg", "pdf")


def plot_search(candidates: Sequence[Candidate], seconds: dict[int, float], path: Path) -> None:
    """Draws expected tokens per second, acceptance length and step time over the tree's width.

    Args:
        candidates: what `search_tree` compared, width 1 (plain decoding) first.
        seconds: the widths that were measured, and the time of a step; drawn as points.
        path: its ending says the format.

    Raises:
        MedusaError: the ending is none of `FORMATS`.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise MedusaError(f"--plot {path}: the name must end with one of .{', .'.join(FORMATS)}")
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    widths = [candidate.width for candidate in candidates]
    rates = [candidate.tokens_per_second for candidate in candidates]
    best = max(range(len(rates)), key=rates.__getitem__)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    speed, tau, time = figure.subplots(1, 3)
    speed.plot(widths, rates)
    speed.axhline(rates[0], linestyle="--", color="grey", label="plain decoding")
    speed.plot(widths[best], rates[best], "o", color="tab:red", label=f"chosen: {widths[best]} nodes")
    speed.set(title="expected tokens per second", ylim=(0, None))
    speed.legend()
    tau.plot(widths, [candidate.acceptance_length for candidate in candidates])
    tau.set(title="expected acceptance length", ylim=(1, None))
    time.plot(widths, [1000 * candidate.seconds for candidate in candidates])
    measured = [width for width in sorted(seconds) if width <= widths[-1]]
    time.plot(measured, [1000 * seconds[width] for width in measured], "o", label="measured")
    time.set(title="time of a step, ms", ylim=(0, None))
    time.legend()
    for axes in (speed, tau, time):
        axes.set_xlabel("nodes, root included")
        axes.grid(alpha=0.3)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=120)
