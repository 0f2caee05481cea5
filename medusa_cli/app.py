"""The `medusa` command, and how it ends.

Exit codes: 0 done, 1 a check failed (losslessness, a gate), 2 bad input or usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import TyperException


def _usage_error(error: TyperException) -> str:
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
        code = _run(arguments)
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        _say("\ninterrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _run(arguments: Sequence[str] | None) -> int | None:
    # Imported here, so that Ctrl-C during the imports ends like any other.
    import typer

    from medusa.errors import CheckFailed, MedusaError
    from medusa_cli.commands import app

    try:
        return app(arguments, prog_name="medusa", standalone_mode=False)
    except MedusaError as error:
        return _say(f"error: {error}", 2)
    except CheckFailed as error:
        return _say(f"check failed: {error}", 1)
    except typer.TyperException as error:
        # Without a subcommand its help has been printed, and there is no message.
        return _say(f"error: {_usage_error(error)}", 2) if error.format_message() else error.exit_code
    except typer.Abort:
        return 130


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
