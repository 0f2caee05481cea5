"""`medusa import`, `medusa export` and `medusa inspect`: heads from and for other programs."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from medusa_cli.common import examples, notes, out

if TYPE_CHECKING:
    import torch

    from medusa.checkpoint import Checkpoint

IMPORT_EXAMPLES = examples(
    "medusa import --from medusa medusa-vicuna-7b-v1.3 runs/vicuna --base lmsys/vicuna-7b-v1.3",
    "medusa import --from nxdi neuron-model runs/from-neuron --tree tree.json",
)
EXPORT_EXAMPLES = examples(
    "medusa export --checkpoint checkpoints/smollm2-135m-shopping-medusa --format vllm served",
    "medusa export --checkpoint runs/demo/medusa --format nxdi neuron-model",
)
INSPECT_EXAMPLES = examples(
    "medusa inspect checkpoints/smollm2-135m-shopping-hydra", "medusa inspect medusa_lm_head.pt --json"
)


class Name(enum.StrEnum):
    """The formats; `medusa.export.formats.FORMATS` has what they do."""

    medusa = "medusa"
    vllm = "vllm"
    speculators = "speculators"
    trtllm = "trtllm"
    nxdi = "nxdi"


class StoredDtype(enum.StrEnum):
    """Number formats on disk. base: the one the base's files are in."""

    base = "base"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    def resolve(self) -> torch.dtype | None:
        import torch

        return None if self is StoredDtype.base else getattr(torch, self.value)


def import_heads(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder or a file with heads.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint to make.")],
    name: Annotated[
        Name | None, typer.Option("--from", help="Whose format it is; found out if not given.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NAME|DIR|ID", help="The heads' base; the one SRC names or carries."),
    ] = None,
    tree: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The tree to decode with; SRC's, or a chain of each head's best token."
        ),
    ] = None,
) -> None:
    """Make a checkpoint of heads that another program trained or serves.

    Pickles are read without running what is in them. Nothing is written unless all of it fits the base.

    If SRC is a whole model with heads inside, its base is written to DIR/base.
    """
    from medusa.export import formats
    from medusa.tree import Tree

    _quiet()
    chosen = Tree.from_json(tree) if tree else None
    with notes.status(f"reading {source}"):
        found = formats.import_heads(source, folder, name=name and name.value, base=base, tree=chosen)
    if found.note:
        notes.print(found.note, markup=False, soft_wrap=True)
    if found.write_base is not None and (folder / formats.BASE).is_dir():
        notes.print(f"the base it carries is in {folder / formats.BASE}; use it with --base", soft_wrap=True)
    if not tree and found.tree is None:
        notes.print(
            "the source has no tree: a chain was taken; `medusa calibrate` and `medusa tree search` choose one"
        )
    out.print(f"{found.format} heads are now the checkpoint {folder}", markup=False, soft_wrap=True)


def export_heads(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    checkpoint: Annotated[Path, typer.Option("--checkpoint", metavar="DIR", help="Heads to write.")],
    name: Annotated[Name, typer.Option("--format", help="Whose format.")],
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NAME|DIR|ID", help="The heads' base; the one the checkpoint names."),
    ] = None,
    dtype: Annotated[
        StoredDtype, typer.Option(help="Number format of the weights on disk; base: as the base's files are.")
    ] = StoredDtype.base,
) -> None:
    """Write a checkpoint's heads as another program loads them.

    What a format cannot hold is refused, with what would fit; what it holds in another form is converted, and said.
    """
    from medusa.checkpoint import load_checkpoint
    from medusa.export import formats
    from medusa.export.foreign import remarks
    from medusa_cli.common import checkpoint_folder

    _quiet()
    checkpoint_folder(checkpoint)
    with notes.status(f"writing {folder}"):
        formats.export_heads(checkpoint, folder, name.value, base=base, dtype=dtype.resolve())
    found = load_checkpoint(checkpoint)
    for remark in remarks(found.heads.config) if formats.FORMATS[name.value].whole_vocabulary else ():
        notes.print(remark, markup=False, soft_wrap=True)
    for hint in _hints(name, found, folder):
        notes.print(hint, markup=False, soft_wrap=True)
    out.print(str(folder), markup=False, soft_wrap=True)


def inspect(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR|FILE", help="A checkpoint of this kit, or heads of any known format."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what heads are: kind, sizes, base, tree, and how often they are right."""
    from medusa.export.describe import describe

    facts = describe(source)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for table in _tables(facts):
        out.print(table)


def _hints(name: Name, found: Checkpoint, folder: Path) -> list[str]:
    """How the folder is used where that is not obvious."""
    from medusa.export.vllm import LOADER

    config = found.heads.config
    if name is Name.vllm:
        settings = {"method": "medusa", "model": str(folder), "num_speculative_tokens": config.num_heads}
        pruned = f" --model-loader-extra-config '{json.dumps(LOADER)}'" if config.draft_vocab_size else ""
        return [f"use it with: vllm serve BASE --speculative-config '{json.dumps(settings)}'{pruned}"]
    if name is Name.nxdi:
        return [
            f"use it with: --is-medusa --num-medusa-heads {config.num_heads} --medusa-speculation-length "
            f"{found.tree.width} --medusa-tree-json {folder / 'medusa_tree.json'} --global-topk 10"
        ]
    if name is Name.trtllm:
        return [
            "these are the heads only: add them to the base's TensorRT-LLM checkpoint, or give `--format medusa` to "
            "TensorRT-LLM's convert_checkpoint.py"
        ]
    return []


def _tables(facts: dict[str, Any]) -> list[Table]:
    """One with the facts, and one of the heads' accuracy if it is known."""
    table = Table("what", Column("value", overflow="fold"), show_header=False, box=None)
    for what, value in facts.items():
        if what == "tree" and value is not None:
            value = f"{value['width']} nodes, {value['depth']} deep"
        elif what == "bytes":
            value = f"{value / 2**20:.1f} MiB"
        elif what == "expected_acceptance_length" and value is not None:
            value = f"{value:.2f}"
        if what != "accuracy" and value is not None:
            said = "size" if what == "bytes" else what.removeprefix("num_").replace("_", " ")
            table.add_row(said, f"{value:,}" if isinstance(value, int) else str(value))
    if facts["accuracy"] is None:
        return [table]
    accuracy = Table(title="right guesses on held-out answers", title_justify="left")
    accuracy.add_column("")
    for k in range(1, facts["num_heads"] + 1):
        accuracy.add_column(f"head {k}", justify="right")
    for top, shares in facts["accuracy"].items():
        accuracy.add_row(top, *(f"{share:.3f}" for share in shares))
    return [table, accuracy]


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar for each tensor that is read says nothing to anyone
