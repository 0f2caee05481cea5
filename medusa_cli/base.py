"""`medusa base`: bring a base model, and see which ones are here."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Column, Table

from medusa_cli.common import examples, notes, out

app = typer.Typer(no_args_is_help=True, help="Fetch base models and see which ones are here.")

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME|DIR|ID", help="A known name, a local folder or a Hub id.")
]


@app.command("fetch", epilog=examples("medusa base fetch smollm2-135m", "medusa base fetch my-org/my-model"))
def fetch(name: NameArgument) -> None:
    """Bring a base into the cache folder and say where it is. Nothing is downloaded twice."""
    from medusa.base import resolve_base

    out.print(str(resolve_base(name)), markup=False, soft_wrap=True)


@app.command("list", epilog=examples("medusa base list", "medusa base list --json"))
def list_bases(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the bases that are known by name, and which of them are here."""
    from medusa.base import KNOWN_BASES, base_folder

    rows = {name: base_folder(name) for name in KNOWN_BASES}
    if as_json:
        found = {name: str(folder) if folder.is_dir() else None for name, folder in rows.items()}
        print(json.dumps(found, indent=2))
        return
    table = Table("name", "what", "licence", Column("here", overflow="fold"))
    for name, folder in rows.items():
        known = KNOWN_BASES[name]
        table.add_row(name, known.note, known.licence, str(folder) if folder.is_dir() else "not yet")
    out.print(table)


@app.command(
    "show", epilog=examples("medusa base show smollm2-135m", "medusa base show my-org/my-model --json")
)
def show(
    name: NameArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a base is: sizes, context, end-of-turn tokens, and the fingerprints that checkpoints name."""
    from medusa.base import open_base

    with notes.status(f"reading {name}"):
        base = open_base(name)
    facts = {
        "name": base.name,
        "path": str(base.path),
        "architecture": ", ".join(base.config.architectures or ()),
        "hidden_size": base.hidden_size,
        "vocab_size": base.vocab_size,
        "max_length": base.max_length,
        "eos_ids": sorted(base.eos_ids),
        "fingerprint": base.fingerprint,
        "tokenizer_fingerprint": base.tokenizer_fingerprint,
        "template_fingerprint": base.template_fingerprint,
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    for what, value in facts.items():
        table.add_row(what.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    out.print(table)
