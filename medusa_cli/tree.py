"""`medusa tree`: choose the candidate tree by measured gain, and look at trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.tree import Tree as Drawing

from medusa.errors import MedusaError
from medusa_cli.common import BaseOption, Dtype, DtypeOption, checkpoint_folder, examples, notes, out

if TYPE_CHECKING:
    from medusa.tree import Tree
    from medusa.tree_search import Candidate

app = typer.Typer(no_args_is_help=True, help="Choose a candidate tree by measured gain, and look at trees.")

SEARCH_EXAMPLES = examples(
    "medusa tree search --checkpoint runs/demo/hydra",
    "medusa tree search --checkpoint runs/demo/hydra --cost cost.json --plot tree.png",
    "medusa tree search --checkpoint runs/demo/hydra --dry-run --json",
)
SHOW_EXAMPLES = examples(
    "medusa tree show checkpoints/smollm2-135m-shopping-hydra", "medusa tree show tree.json"
)


@app.command("search", epilog=SEARCH_EXAMPLES)
def search(
    checkpoint: Annotated[Path, typer.Option("--checkpoint", metavar="DIR", help="Calibrated heads.")],
    cost: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `medusa cost` wrote; measured now if absent.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw every width compared; PNG, SVG or PDF.")
    ] = None,
    base: BaseOption = None,
    dtype: DtypeOption = Dtype.auto,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Leave the checkpoint's tree.json as it is.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Find the tree with the most expected tokens per second, and save it in the checkpoint.

    Every width is compared: the expected acceptance length of its best tree, by the checkpoint's calibration,
    over the measured time of a step.
    """
    from medusa.calibration import Calibration
    from medusa.checkpoint import CALIBRATION, save_tree
    from medusa.cost import CostModel
    from medusa.tree_search import search_tree
    from medusa_cli.measure import measured_cost

    folder = checkpoint_folder(checkpoint)
    if not (folder / CALIBRATION).is_file():
        raise MedusaError(
            f"{folder} has no {CALIBRATION}; run `medusa calibrate --checkpoint {folder} --states DIR`"
        )
    calibration = Calibration.from_json(folder / CALIBRATION)
    model = CostModel.from_json(cost) if cost else measured_cost(folder, base, dtype)
    seconds = model.curve(batch=1)
    tree, candidates = search_tree(calibration, seconds)
    if not dry_run:
        save_tree(folder, tree)
    if plot:
        from medusa_cli.plots import plot_search

        plot_search(candidates, seconds, plot)
    if as_json:
        rows = [vars(candidate) for candidate in candidates]
        print(
            json.dumps(
                {"paths": [list(path) for path in tree.paths], "width": tree.width, "candidates": rows}
            )
        )
        return
    out.print(_table(candidates, tree, seconds))
    best = max(candidates, key=lambda candidate: candidate.tokens_per_second)
    gain = best.tokens_per_second / candidates[0].tokens_per_second
    what = (
        "plain decoding: no tree pays here" if tree.width == 1 else f"{tree.width} nodes, {tree.depth} deep"
    )
    out.print(f"chosen: {what}; expected {gain:.2f}× plain decoding")
    if not dry_run:
        notes.print(f"saved in {folder / 'tree.json'}", soft_wrap=True)
    if plot:
        notes.print(f"plot: {plot}", soft_wrap=True)


@app.command("show", epilog=SHOW_EXAMPLES)
def show(
    source: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A checkpoint, or a file with a tree.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the tree as JSON.")] = False,
) -> None:
    """Draw a tree: each node is the rank of a head's guess."""
    from medusa.tree import Tree

    tree = Tree.from_json(source / "tree.json" if source.is_dir() else source)
    if as_json:
        print(
            json.dumps(
                {"paths": [list(path) for path in tree.paths], "width": tree.width, "depth": tree.depth}
            )
        )
        return
    drawn: dict[tuple[int, ...], Drawing] = {(): Drawing(f"root: {tree.width} nodes, {tree.depth} deep")}
    for path in tree.paths:
        drawn[path] = drawn[path[:-1]].add(f"head {len(path)}, rank {path[-1]}")
    out.print(drawn[()])


def _table(candidates: list[Candidate], chosen: Tree, seconds: dict[int, float]) -> Table:
    """The widths that were measured, the chosen one and its neighbours: 64 lines tell no more."""
    table = Table(title="trees by width", title_justify="left")
    for column in ("nodes", "depth", "acceptance length", "step, ms", "tokens/s", "× plain"):
        table.add_column(column, justify="right")
    plain = candidates[0].tokens_per_second
    for candidate in candidates:
        if candidate.width not in seconds and abs(candidate.width - chosen.width) > 1:
            continue
        table.add_row(
            str(candidate.width),
            str(candidate.depth),
            f"{candidate.acceptance_length:.2f}",
            f"{1000 * candidate.seconds:.1f}",
            f"{candidate.tokens_per_second:.1f}",
            f"{candidate.tokens_per_second / plain:.2f}",
            style="bold green" if candidate.width == chosen.width else None,
        )
    return table
