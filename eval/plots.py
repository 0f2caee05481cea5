"""The report's figures: each a function from results to SVG (see `eval/svg.py`), "" with nothing to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eval.results import Part, Results
from eval.svg import COLOURS, drawing

BAR = 0.31  # inches of height for each row of a horizontal chart
NAMES = {"plain": "plain", "chain": "chain of top-1", "tree": "tree"}


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    """Makes the vertical axis a list, read from the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def throughput(results: Results) -> str:
    """Tokens per second of every mode and peer."""
    order = ["plain", "chain", "tree", *(peer.name for peer in results.peers)]
    rates = {name: results.tokens_per_second[name] for name in order}
    with drawing(
        "throughput", "Tokens per second by way of decoding", height=0.5 + BAR * len(rates)
    ) as drawn:
        axes = drawn.axes
        colours = [COLOURS.get(name, COLOURS["peer"]) for name in rates]
        axes.barh(range(len(rates)), list(rates.values()), height=0.62, color=colours)
        _rows(axes, [NAMES.get(name, name) for name in rates])
        for row, rate in enumerate(rates.values()):
            axes.annotate(f"{rate:.1f}", (rate, row), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, max(rates.values()) * 1.12)
        axes.set_xlabel("tokens per second, prefill included")
    return drawn.svg


def speedup_by(parts: Mapping[str, Part], what: str) -> str:
    """Speedup of every part with its interval, and its acceptance length beside it."""
    if not parts:
        return ""
    ordered = sorted(parts.items(), key=lambda item: -item[1].speedup.mean)
    with drawing(f"by-{what}", f"Speedup by {what}", height=0.65 + BAR * len(ordered)) as drawn:
        axes = drawn.axes
        means = [part.speedup.mean for _, part in ordered]
        below = [part.speedup.mean - part.speedup.low for _, part in ordered]
        above = [part.speedup.high - part.speedup.mean for _, part in ordered]
        axes.axvline(1, color=COLOURS["plain"], linewidth=1)
        axes.errorbar(
            means, range(len(ordered)), xerr=[below, above], fmt="o", color=COLOURS["tree"], elinewidth=1.2
        )
        _rows(axes, [f"{name} ({part.n})" for name, part in ordered])
        for row, (_, part) in enumerate(ordered):
            text = f"{part.speedup.mean:.2f}×\u2003τ {part.acceptance_length:.2f}"
            axes.annotate(text, (1.02, row), xycoords=("axes fraction", "data"), va="center")
        axes.set_xlim(left=min(0.8, min(part.speedup.low for _, part in ordered) * 0.95))
        axes.set_xlabel("speedup over plain, 95% interval")
    return drawn.svg


def acceptance_by_depth(results: Results) -> str:
    """P(depth d accepted | depth d - 1 accepted), tree and chain."""
    if not results.acceptance_rate:
        return ""
    with drawing("acceptance", "Acceptance rate by depth", height=2.5) as drawn:
        axes = drawn.axes
        lines = {"tree": results.acceptance_rate, "chain": results.chain.acceptance_rate}
        for name, rates in lines.items():
            axes.plot(range(1, len(rates) + 1), rates, marker="o", color=COLOURS[name], label=NAMES[name])
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("depth")
        axes.set_ylabel("accepted")
        axes.legend()
    return drawn.svg


def head_accuracy(results: Results) -> str:
    """Top-k accuracy of every head given the true prefix."""
    if not results.head_accuracy:
        return ""
    with drawing("heads", "Top-k accuracy of every head", height=2.5) as drawn:
        axes = drawn.axes
        shades = [1.0, 0.8, 0.62, 0.46, 0.32]
        for (top, accuracy), shade in zip(sorted(results.head_accuracy.items()), shades):
            heads = range(1, len(accuracy) + 1)
            axes.plot(heads, accuracy, marker="o", color=COLOURS["tree"], alpha=shade, label=f"top-{top}")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("head")
        axes.set_ylabel("right")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn.svg


def step_cost(results: Results) -> str:
    """Time of a verify step by width."""
    seconds = results.step_cost.seconds
    if len(seconds) < 2:
        return ""
    with drawing("cost", "Time of a step by tree width", height=2.5) as drawn:
        axes = drawn.axes
        widths = sorted(seconds)
        low = [1000 * results.step_cost.low[width] for width in widths]
        high = [1000 * results.step_cost.high[width] for width in widths]
        axes.fill_between(widths, low, high, color=COLOURS["soft"], alpha=0.18, linewidth=0)
        axes.plot(widths, [1000 * seconds[width] for width in widths], marker="o", color=COLOURS["soft"])
        _widths(axes, widths[-1], results.step_cost.chosen)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("milliseconds per step")
    return drawn.svg


def _widths(axes: Axes, widest: int, chosen: int) -> None:
    """Makes the horizontal axis one of tree widths, with the chosen one marked."""
    ticks = [2**power for power in range(12) if 2**power <= widest]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(width) for width in ticks])
    axes.minorticks_off()
    axes.axvline(chosen, color=COLOURS["tree"], linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"this tree: {chosen}",
        (chosen, 0.04),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color=COLOURS["tree"],
    )
    axes.set_xlabel("tokens verified in a step (tree width)")


def expected_acceptance(results: Results) -> str:
    """Acceptance length that calibration expects of the best tree of each width, and the measured one."""
    expected = results.tree.expected
    if len(expected) < 2:
        return ""
    with drawing("expected", "Expected acceptance length by tree width", height=2.5) as drawn:
        axes = drawn.axes
        widths = sorted(expected)
        axes.plot(widths, [expected[width] for width in widths], color=COLOURS["soft"], label="expected")
        measured = results.acceptance_length
        axes.plot(
            [results.tree.width], [measured], "o", color=COLOURS["tree"], label=f"measured: {measured:.2f}"
        )
        _widths(axes, widths[-1], results.tree.width)
        axes.set_ylim(bottom=1)
        axes.set_ylabel("tokens per step")
        axes.legend(loc="upper left")
    return drawn.svg


def expected_speedup(results: Results) -> str:
    """What follows from the two before: tokens of a step over its time, against a step of one token."""
    expected, seconds = results.tree.expected, results.step_cost.seconds
    if len(expected) < 2 or 1 not in seconds:
        return ""
    measured = sorted(seconds)
    widths = [width for width in sorted(expected) if width <= measured[-1]]
    times = np.interp(widths, measured, [seconds[width] for width in measured])
    gains = [expected[width] * seconds[1] / time for width, time in zip(widths, times)]
    with drawing("gain", "Expected speedup of decoding by tree width", height=2.5) as drawn:
        axes = drawn.axes
        axes.axhline(1, color=COLOURS["plain"], linewidth=1)
        axes.plot(widths, gains, color=COLOURS["soft"], label="expected")
        decode_only = results.speedup_decode_only.mean
        label = f"measured: {decode_only:.2f}×"
        axes.plot([results.tree.width], [decode_only], "o", color=COLOURS["tree"], label=label)
        _widths(axes, widths[-1], results.tree.width)
        axes.set_ylim(bottom=min(0.8, 0.95 * min(*gains, decode_only)))
        axes.set_ylabel("speedup, decode only")
        axes.legend(loc="best")
    return drawn.svg


def distribution(speedups: Sequence[float]) -> str:
    """Every conversation's own speedup, sorted."""
    if len(speedups) < 2:
        return ""
    with drawing("distribution", "Speedup of every conversation", height=2.5) as drawn:
        axes = drawn.axes
        axes.axhline(1, color=COLOURS["plain"], linewidth=1)
        axes.plot(range(1, len(speedups) + 1), sorted(speedups), "o", color=COLOURS["tree"], markersize=3.5)
        axes.set_ylim(bottom=min(0.8, 0.9 * min(speedups)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("conversations, from the slowest to the fastest")
        axes.set_ylabel("speedup over plain")
    return drawn.svg


def tree_shape(results: Results) -> str:
    """The tree, from its root at the left; a node's number is its rank among its head's guesses."""
    paths = sorted(map(tuple, results.tree.paths))
    if not paths:
        return ""
    # A leaf takes the next row; a parent stands beside its first child, so that best guesses form the top
    # line.
    rows: dict[tuple[int, ...], int] = {}
    leaves = [path for path in paths if not any(other[:-1] == path for other in paths)]
    for row, leaf in enumerate(leaves):
        for depth in range(len(leaf) + 1):
            rows.setdefault(leaf[:depth], row)
    with drawing("tree", "The candidate tree", height=0.5 + 0.19 * len(leaves)) as drawn:
        axes = drawn.axes
        rule = {"color": COLOURS["rule"], "linewidth": 1, "zorder": 1}
        for parent, row in rows.items():
            children = [rows[path] for path in paths if path[:-1] == parent]
            if children:
                turn = len(parent) + 0.5
                axes.plot([len(parent), turn], [row, row], **rule)
                axes.plot([turn, turn], [row, max(children)], **rule)
                axes.hlines(children, turn, turn + 0.5, **rule)
        for path, row in rows.items():
            colour = COLOURS["tree"] if path else COLOURS["plain"]
            axes.plot(len(path), row, "o", color=colour, markersize=9, zorder=2)
            label = str(path[-1] + 1) if path else "·"
            style = {"ha": "center", "va": "center_baseline", "fontsize": 6.5, "color": COLOURS["paper"]}
            axes.text(len(path), row, label, **style, zorder=3)
        axes.set_ylim(len(leaves) - 0.5, -0.7)
        axes.set_xlim(-0.3, results.tree.depth + 0.3)
        axes.set_xticks(
            range(results.tree.depth + 1), ["root", *(f"head {k}" for k in range(1, results.tree.depth + 1))]
        )
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.set_yticks([])
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return drawn.svg
