"""`medusa calibrate` and `medusa cost`: what the heads guess right, and what a step costs on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from medusa.errors import MedusaError
from medusa_cli.common import (
    BaseOption,
    CheckpointOption,
    Dtype,
    DtypeOption,
    checkpoint_folder,
    examples,
    notes,
    out,
)

if TYPE_CHECKING:
    from medusa.cost import StepCost

CALIBRATE_EXAMPLES = examples(
    "medusa calibrate --checkpoint runs/demo/hydra --states runs/demo/states/validation"
)
COST_EXAMPLES = examples(
    "medusa cost --checkpoint runs/demo/hydra --out cost.json",
    "medusa cost --widths 1,4,16 --dtype float32",
)


def calibrate(
    checkpoint: Annotated[Path, typer.Option("--checkpoint", metavar="DIR", help="The heads.")],
    states: Annotated[
        Path,
        typer.Option("--states", metavar="DIR", help="Hidden states of answers they were not trained on."),
    ],
    base: BaseOption = None,
    dtype: DtypeOption = Dtype.auto,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only this many answers.")] = None,
) -> None:
    """Count what each head guesses right on true answers, and save it in the checkpoint."""
    checkpoint_folder(checkpoint)

    from medusa.calibration import calibrate as count
    from medusa.checkpoint import CALIBRATION, load_checkpoint
    from medusa.data.states import StatesCache
    from medusa_cli.session import base_of, open_base

    loaded = open_base(base or base_of(checkpoint), dtype)
    found = load_checkpoint(checkpoint, loaded)
    cache = StatesCache(states, loaded.fingerprints)
    segments = range(min(limit or cache.num_segments, cache.num_segments))
    with notes.status(f"reading {len(segments)} answers"):
        calibration = count(found.heads, loaded, cache, segments)
    calibration.to_json(checkpoint / CALIBRATION)
    table = Table("head", *(f"top-{top}" for top in (1, 2, 3, 5, 10)), title="share of tokens guessed")
    columns = zip(*(calibration.accuracy(top) for top in (1, 2, 3, 5, 10)), strict=True)
    for head, row in enumerate(columns, 1):
        table.add_row(str(head), *(f"{share:.3f}" for share in row))
    out.print(table)
    notes.print(f"{calibration.positions:,} places counted, in {checkpoint / CALIBRATION}", soft_wrap=True)


def cost(
    checkpoint: CheckpointOption = None,
    base: BaseOption = None,
    widths: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Nodes of a tree, root included; 1 is plain decoding."),
    ] = None,
    dtype: DtypeOption = Dtype.auto,
    target: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the curve as JSON.")
    ] = None,
) -> None:
    """Measure how long a step takes at several tree widths, drafting included, on this machine."""
    try:
        wanted = [int(word) for word in widths.split(",")] if widths else None
    except ValueError as error:
        raise MedusaError(f"--widths {widths}: whole numbers with commas, such as 1,4,16") from error
    if wanted and min(wanted) < 1:
        raise MedusaError(f"--widths {widths}: a tree has at least one node, its root")
    curve = measured_cost(checkpoint, base, dtype, wanted)
    if target:
        from medusa.files import write_json

        number_format = str(dtype.resolve()).removeprefix("torch.")
        write_json(target, {"format": 1, "dtype": number_format, "steps": [vars(step) for step in curve]})
    table = Table("nodes", "step, ms", "quartiles", "× fewest", title="time of a step", title_justify="left")
    for step in curve:
        quartiles = f"{1000 * step.low:.1f} to {1000 * step.high:.1f}"
        ratio = f"{step.median / curve[0].median:.2f}"
        table.add_row(str(step.width), f"{1000 * step.median:.1f}", quartiles, ratio)
    out.print(table)


def measured_cost(
    checkpoint: Path | None, base: str | None, dtype: Dtype, widths: list[int] | None = None
) -> list[StepCost]:
    """A step's time by width, drafting included; `widths` None: the usual ones."""
    from medusa.cost import WIDTHS, measure_step_cost
    from medusa_cli.session import open_heads

    loaded, heads, _ = open_heads(checkpoint, base, dtype)
    with notes.status("measuring steps"):
        return measure_step_cost(loaded.model, heads, widths=widths or WIDTHS)


def read_cost(path: Path) -> list[StepCost]:
    """The curve that `medusa cost --out` wrote.

    Raises:
        MedusaError: the file cannot be read or does not hold one.
    """
    from medusa.cost import StepCost
    from medusa.files import read_json

    value = read_json(path)
    try:
        curve = [StepCost(**step) for step in value["steps"]]
        if not curve or not all(_sound(step) for step in curve):
            raise ValueError("a width or a time makes no sense")
        return curve
    except (KeyError, TypeError, ValueError) as error:
        raise MedusaError(f"{path} is no step-cost curve; `medusa cost --out {path}` writes one") from error


def _sound(step: StepCost) -> bool:
    times = (step.low, step.median, step.high)
    whole = type(step.width) is int and step.width >= 1
    return whole and all(type(time) in (int, float) and 0 < time < math.inf for time in times)
