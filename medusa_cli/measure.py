"""`medusa calibrate` and `medusa cost`: what the heads guess right, and what a step costs on this machine."""

from __future__ import annotations

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
    Weights,
    WeightsOption,
    checkpoint_folder,
    examples,
    notes,
    out,
)

if TYPE_CHECKING:
    from medusa.cost import CostModel

CALIBRATE_EXAMPLES = examples(
    "medusa calibrate --checkpoint runs/demo/hydra --states runs/demo/states/validation"
)
COST_EXAMPLES = examples(
    "medusa cost --checkpoint runs/demo/hydra --out cost.json",
    "medusa cost --widths 1,4,16 --batches 1,8 --dtype float32",
    "medusa cost --weights int8",
    "medusa cost --save",
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
    batches: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Rows decoded together.  [default: 1]")
    ] = None,
    dtype: DtypeOption = Dtype.auto,
    weights: WeightsOption = Weights.full,
    target: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the curves as JSON.")
    ] = None,
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="Measure every batch and width, and keep the result for `--tree adaptive` on this machine.",
        ),
    ] = False,
) -> None:
    """Measure how long a step takes by tree width and rows, drafting included, on this machine."""
    from medusa.cost import BATCHES, WIDTHS, cost_file

    wanted = _numbers("--widths", widths, "a tree has at least one node, its root") or list(WIDTHS)
    rows = _numbers("--batches", batches, "there is at least one row") or (list(BATCHES) if save else [1])
    if save and (widths or batches):
        raise MedusaError("--save measures every batch and width; leave out --widths and --batches")
    if 1 not in wanted:
        raise MedusaError(f"--widths {widths}: width 1, plain decoding, must be among them")
    model = measured_cost(checkpoint, base, dtype, wanted, rows, weights)
    if target:
        model.to_json(target)
    if save:
        file = cost_file(model.about)
        file.parent.mkdir(parents=True, exist_ok=True)
        model.to_json(file)
        notes.print(f"saved in {file}", soft_wrap=True)
    for batch, curve in model.curves.items():
        what = "time of a step" + (f", {batch} rows" if batch > 1 else "")
        table = Table("nodes", "step, ms", "quartiles", "× plain", title=what, title_justify="left")
        for step in curve:
            quartiles = f"{1000 * step.low:.1f} to {1000 * step.high:.1f}"
            ratio = f"{step.median / curve[0].median:.2f}"
            table.add_row(str(step.width), f"{1000 * step.median:.1f}", quartiles, ratio)
        out.print(table)


def _numbers(option: str, text: str | None, least: str) -> list[int] | None:
    """Whole numbers from 1 with commas between."""
    if text is None:
        return None
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise MedusaError(f"{option} {text}: whole numbers with commas, such as 1,4,16") from error
    if min(numbers) < 1:
        raise MedusaError(f"{option} {text}: {least}")
    return numbers


def measured_cost(
    checkpoint: Path | None,
    base: str | None,
    dtype: Dtype,
    widths: list[int] | None = None,
    batches: list[int] | None = None,
    weights: Weights = Weights.full,
) -> CostModel:
    """A step's time, drafting included; `widths` None: the usual ones; `batches` None: one row."""
    from medusa.cost import WIDTHS, measure_cost_model
    from medusa_cli.session import open_heads

    loaded, heads, _ = open_heads(checkpoint, base, dtype, weights=weights)
    with notes.status("measuring steps") as status:
        return measure_cost_model(
            loaded,
            heads,
            widths=widths or WIDTHS,
            batches=batches or [1],
            repeats=15 if not batches or batches == [1] else 9,
            progress=lambda batch: status.update(f"measuring steps of {batch} rows"),
        )
