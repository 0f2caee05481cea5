"""The benchmark's picture: throughput by rows, a step's parts by width, and the peers."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no window system, no global state

from benchmarks.parts import PARTS
from benchmarks.records import Peers, Results, Steps, Throughput, quartiles
from benchmarks.report import rate_quartiles
from medusa.files import atomic_file

COLOURS = ("tab:blue", "tab:cyan", "tab:gray", "tab:orange", "tab:green", "tab:red", "tab:purple")


def draw(results: Results, path: Path) -> None:
    """Draws a panel for each section that was measured, and one for the ratios to plain decoding.

    Args:
        results: with one section at least.
        path: its ending, .png or .svg, says the format.
    """
    panels = []
    if results.throughput is not None:
        panels += [(_rates, results.throughput), (_ratios, results.throughput)]
    if results.steps is not None:
        panels.append((_parts, results.steps))
    if results.peers is not None and results.peers.contests:
        panels.append((_contest, results.peers))
    figure = Figure(figsize=(5.2 * max(len(panels), 1), 4.2), layout="constrained")
    for place, (panel, section) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), place)
        panel(axes, section)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=120)


def _batches(axes: Axes, batches: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("rows")
    axes.minorticks_off()


def _rates(axes: Axes, found: Throughput) -> None:
    """Tokens per second by rows and mode, with quartiles."""
    for name in dict.fromkeys(mode.name for mode in found.modes):
        modes = [mode for mode in found.modes if mode.name == name]
        spread = [rate_quartiles(mode.passes) for mode in modes]
        middle = [median for _, median, _ in spread]
        errors = [[median - low for low, median, _ in spread], [high - median for _, median, high in spread]]
        axes.errorbar([mode.batch for mode in modes], middle, errors, marker="o", capsize=3, label=name)
    _batches(axes, sorted({mode.batch for mode in found.modes}))
    axes.set(title="tokens per second, median and quartiles", ylim=(0, None))
    axes.legend(fontsize=8)


def _ratios(axes: Axes, found: Throughput) -> None:
    """The ratio to plain decoding by rows and mode, with its interval."""
    names = [name for name in dict.fromkeys(mode.name for mode in found.modes) if name != "plain"]
    for place, name in enumerate(names):
        modes = [mode for mode in found.modes if mode.name == name]
        middle = [mode.ratio.mean for mode in modes]
        errors = [
            [mode.ratio.mean - mode.ratio.low for mode in modes],
            [mode.ratio.high - mode.ratio.mean for mode in modes],
        ]
        beside = 1 + 0.06 * (place - 1)  # so that the bars do not hide each other
        rows = [mode.batch * beside for mode in modes]
        axes.errorbar(rows, middle, errors, marker="o", capsize=3, label=name, color=f"C{place + 1}")
    axes.axhline(1.0, color="grey", linestyle="--")
    axes.axhline(0.98, color="grey", linestyle=":", label="0.98")
    _batches(axes, sorted({mode.batch for mode in found.modes}))
    axes.set_title("times plain decoding, 95% interval")
    axes.legend(fontsize=8)


def _parts(axes: Axes, steps: Steps) -> None:
    """Where a step of one row goes, by tree width: stacked medians."""
    batch = min(entry.batch for entry in steps.times)
    entries = [entry for entry in steps.times if entry.batch == batch]
    below = [0.0] * len(entries)
    places = range(len(entries))
    for name, colour in zip(PARTS, COLOURS, strict=True):
        heights = [1000 * quartiles(entry.parts[name])[1] for entry in entries]
        axes.bar(places, heights, bottom=below, color=colour, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xticks(places, [str(entry.width) for entry in entries])
    axes.set(
        title=f"a step of {batch} row{'s' * (batch > 1)}, ms", xlabel="nodes, root included", ylim=(0, None)
    )
    axes.legend(fontsize=8)


def _contest(axes: Axes, peers: Peers) -> None:
    """Peers' rates at the fewest prompts in flight, with quartiles."""
    batch = min(contest.batch for contest in peers.contests)
    contests = [contest for contest in peers.contests if contest.batch == batch][::-1]
    spread = [rate_quartiles(contest.answers) for contest in contests]
    middle = [median for _, median, _ in spread]
    errors = [[median - low for low, median, _ in spread], [high - median for _, median, high in spread]]
    colours = ["tab:red" if contest.name.startswith("ours") else "tab:blue" for contest in contests]
    axes.barh(range(len(contests)), middle, xerr=errors, color=colours, capsize=3)
    axes.set_yticks(range(len(contests)), [contest.name for contest in contests])
    axes.set(title=f"{batch} in flight, tokens per second, prompt included", xlim=(0, None))
