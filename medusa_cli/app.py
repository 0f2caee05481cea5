"""The `medusa` command. Exit codes: see `medusa_cli.endings`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from medusa_cli.endings import run

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    sys.exit(run(_commands, "medusa", arguments))


def _commands() -> typer.Typer:
    from medusa_cli.commands import app

    return app
