"""Matplotlib figures as SVG that lives inside an HTML page: its colours and its type are the page's.

Figures are drawn in stand-in colours, which become CSS variables in the text of the SVG; so one drawing
serves the light and the dark page. The text stays text: it can be selected and searched, and the page's font
sets it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from xml.sax.saxutils import quoteattr

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# The page's variable -> a colour that no other part of a figure uses.
COLOURS = {
    name: f"#0{number:x}0{number:x}0{number:x}"
    for number, name in enumerate(["ink", "soft", "rule", "paper", "plain", "tree", "chain", "peer"], start=1)
}
WIDTH = 5.0  # inches; with 9.5-point type, readable on a telephone without zooming

_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["soft"],
    "axes.edgecolor": COLOURS["rule"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "grid.color": COLOURS["rule"],
    "grid.linewidth": 0.5,
    "xtick.color": COLOURS["rule"],
    "ytick.color": COLOURS["rule"],
    "xtick.labelcolor": COLOURS["soft"],
    "ytick.labelcolor": COLOURS["soft"],
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


class Drawing:
    """A figure being drawn; `svg` holds the result when the block of `drawing` has ended."""

    def __init__(self, figure: Figure, axes: Axes):
        self.figure = figure
        self.axes = axes
        self.svg = ""


@contextmanager
def drawing(name: str, label: str, *, height: float) -> Iterator[Drawing]:
    """Yields axes to draw on.

    Args:
        name: unlike every other figure's of the page; keeps their element ids apart, and the same on every
        run.
        label: what the figure shows, for screen readers.
        height: inches.
    """
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        drawn = Drawing(figure, figure.add_subplot())
        yield drawn
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    drawn.svg = _inline(buffer.getvalue(), label)


def _inline(svg: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The figure's own style sheet would apply to the whole page, and its numbered ids would repeat in the
    # next one.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[A-Za-z0-9.]+_\d+"', "<g", svg)
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    # Matplotlib 3.11 writes the family by itself, earlier ones inside the `font` shorthand.
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", svg)
    svg = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font: \1 var(--sans)", svg)
    view = re.search(r'viewBox="[^"]*"', svg).group()
    attributes = f'<svg class="plot" role="img" aria-label={quoteattr(label)} {view}'
    attributes += ' xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return attributes + svg[svg.index(">") + 1 :].strip()
