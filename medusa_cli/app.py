"""The `medusa` command: its subcommands and how each of them ends.

Exit codes: 0 done, 1 a check failed (losslessness, a gate), 2 bad input or usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

import train_heads
from medusa.errors import CheckFailed, MedusaError
from medusa_cli import base, chat, data, demo, doctor, generate, measure, tree
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
    "medusa train --recipe recipes/hydra.yaml --out runs/mine",
    "medusa train --recipe recipes/hydra.yaml --out runs/mine --resume training.epochs=8",
)
_TRY, _MAKE, _HERE = "Decode", "Make heads, one step at a time", "This machine"
app.command("chat", rich_help_panel=_TRY, epilog=chat.EXAMPLES)(chat.chat)
app.command("generate", rich_help_panel=_TRY, epilog=generate.EXAMPLES)(generate.generate)
app.command("demo", rich_help_panel=_TRY, epilog=demo.EXAMPLES)(demo.demo)
app.add_typer(base.app, name="base", rich_help_panel=_MAKE)
app.add_typer(data.app, name="data", rich_help_panel=_MAKE)
app.command("train", rich_help_panel=_MAKE, epilog=TRAIN_EXAMPLES)(train_heads.main)
app.command("calibrate", rich_help_panel=_MAKE, epilog=measure.CALIBRATE_EXAMPLES)(measure.calibrate)
app.command("cost", rich_help_panel=_MAKE, epilog=measure.COST_EXAMPLES)(measure.cost)
app.add_typer(tree.app, name="tree", rich_help_panel=_MAKE)
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


def _usage_error(error: typer.TyperException) -> str:
    """What was wrong with the command line, in the form of every other error of the kit."""
    message = error.format_message().rstrip(".")
    near = getattr(error, "possibilities", None)
    if near:
        message = f"{error.message}; did you mean {' or '.join(sorted(near))}?"
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "medusa"
    return f"{message[0].lower()}{message[1:]}\nsee: {where} --help"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits. Expected endings are one line on stderr; anything else is a bug."""
    # Tokenizers and transformers talk over progress bars otherwise.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code = app(arguments, prog_name="medusa", standalone_mode=False)
    except MedusaError as error:
        code = _say(f"error: {error}", 2)
    except CheckFailed as error:
        code = _say(f"check failed: {error}", 1)
    except typer.TyperException as error:
        # No subcommand given: the help was asked for, more or less; its text is the message.
        text = error.format_message()
        code = _say(f"error: {_usage_error(error)}", error.exit_code) if text else error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:
        _say("\ninterrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
