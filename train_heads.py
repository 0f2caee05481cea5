"""Trains draft heads: `python train_heads.py --recipe recipes/NAME.yaml --out DIR [--resume]
[section.key=value ...]`.

`accelerate launch train_heads.py ...` and `torchrun --nproc-per-node N train_heads.py ...` run it as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from medusa.errors import MedusaError


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value words, such as training.epochs=3")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file of the run; the defaults when absent")
    ] = None,
    out: Annotated[Path, typer.Option(help="output folder: checkpoint, recipe, training state")] = ...,
    resume: Annotated[bool, typer.Option(help="go on with the run in --out, if there is one")] = False,
) -> None:
    """Trains draft heads on cached hidden states and keeps the best checkpoint."""
    from medusa.training import load_recipe, train

    try:
        result = train(load_recipe(recipe, overrides or ()), out, resume=resume)
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    if int(os.environ.get("RANK", 0)) == 0:
        best = result.best
        if best is not None:
            print(
                f"{out}: simulated acceptance length {best['acceptance_length']:.3f} "
                f"({best['tree_width']} nodes)"
            )
        if result.stopped is not None:
            print(f"stopped at step {result.steps} of {result.total_steps}; --resume goes on from there")
    if result.stopped is not None:
        raise typer.Exit(128 + result.stopped)  # as a shell says "ended by this signal": the run is not done


if __name__ == "__main__":
    typer.run(main)
