"""How the kit's commands end: one line on stderr, and an exit code to script against.

0 done, 1 a check failed (losslessness, a gate), 2 bad input or usage, 130 interrupted, 141 the reader of the output
has gone away. Anything else is a bug, and shows where.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

INTERRUPTED, BROKEN_PIPE = 130, 141


def run(
    load: Callable[[], typer.Typer],
    name: str,
    arguments: Sequence[str] | None,
    interrupted: str = "interrupted",
) -> int:
    """Runs a command line and returns its exit code.

    Args:
        load: gives the app; called inside, so that Ctrl-C during its imports ends like any other.
        name: what the program is called.
        arguments: of the command line; None: the process's own.
        interrupted: what is said after Ctrl-C.
    """
    # Tokenizers and transformers talk over progress bars otherwise.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code = _run(load, name, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = BROKEN_PIPE
        _forget_output()
    except SystemExit as ending:
        # Rich and click leave a broken pipe by exiting with 1, which means something else here.
        if not isinstance(ending.__context__, BrokenPipeError):
            raise
        code = BROKEN_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        code = _say("error: cannot write the output: no space left; free some or write elsewhere", 2)
        _forget_output()
    if code == INTERRUPTED:
        _say(f"\n{interrupted}", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _run(load: Callable[[], typer.Typer], name: str, arguments: Sequence[str] | None) -> int | None:
    import typer

    from medusa.errors import CheckFailed, MedusaError

    try:
        return load()(arguments, prog_name=name, standalone_mode=False)
    except MedusaError as error:
        return _say(f"error: {error}", 2)
    except CheckFailed as error:
        return _say(f"check failed: {error}", 1)
    except typer.TyperException as error:
        # Without a subcommand its help has been printed, and there is no message.
        return _say(f"error: {_usage(error, name)}", 2) if error.format_message() else error.exit_code
    except typer.Abort:
        return INTERRUPTED


def _usage(error: typer.TyperException, name: str) -> str:
    """What was wrong with the command line, in the form of every other error of the kit."""
    message = error.format_message().rstrip(".")
    near = getattr(error, "possibilities", None)
    if near:
        message = f"{error.message}; did you mean {' or '.join(sorted(near))}?"
    context = getattr(error, "ctx", None)
    where = context.command_path if context else name
    return f"{message[0].lower()}{message[1:]}\nsee: {where} --help"


def _forget_output() -> None:
    """Python writes out what is left at its end, and would fail there again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
