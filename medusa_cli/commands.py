"""The subcommands of `medusa`, put together."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

import train_heads
from medusa_cli import base, chat, data, demo, doctor, formats, generate, measure, tree
from medusa_cli.common import examples

app = typer.Typer(
    name="medusa",
    help="Train Medusa decoding heads on a base LLM, prove what they gain, and decode with them.",
    epilog=examples(
        "medusa doctor",
        "medusa chat",
        'medusa generate --prompt "running shoes for wide feet under 80 dollars?"',
        "medusa demo",
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TRAIN_EXAMPLES = examples(
    "medusa train --recipe recipes/smollm2-135m-hydra.yaml --out runs/mine",
    "medusa train --recipe recipes/smollm2-135m-hydra.yaml --out runs/mine --resume",
)
_TRY, _MAKE, _OTHERS, _HERE = (
    "Decode",
    "Make heads, one step at a time",
    "Other programs' heads",
    "This machine",
)
app.command("chat", rich_help_panel=_TRY, epilog=chat.EXAMPLES)(chat.chat)
app.command("generate", rich_help_panel=_TRY, epilog=generate.EXAMPLES)(generate.generate)
app.command("demo", rich_help_panel=_TRY, epilog=demo.EXAMPLES)(demo.demo)
app.add_typer(base.app, name="base", rich_help_panel=_MAKE)
app.add_typer(data.app, name="data", rich_help_panel=_MAKE)
app.command("train", rich_help_panel=_MAKE, epilog=TRAIN_EXAMPLES)(train_heads.main)
app.command("calibrate", rich_help_panel=_MAKE, epilog=measure.CALIBRATE_EXAMPLES)(measure.calibrate)
app.command("cost", rich_help_panel=_MAKE, epilog=measure.COST_EXAMPLES)(measure.cost)
app.add_typer(tree.app, name="tree", rich_help_panel=_MAKE)
app.command("import", rich_help_panel=_OTHERS, epilog=formats.IMPORT_EXAMPLES)(formats.import_heads)
app.command("export", rich_help_panel=_OTHERS, epilog=formats.EXPORT_EXAMPLES)(formats.export_heads)
app.command("inspect", rich_help_panel=_OTHERS, epilog=formats.INSPECT_EXAMPLES)(formats.inspect)
app.command("doctor", rich_help_panel=_HERE, epilog=doctor.EXAMPLES)(doctor.doctor)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"medusa-kit {metadata.version('medusa-kit')}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass
