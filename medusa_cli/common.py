"""What several subcommands share: the same options, explained once, and how a checkpoint is opened."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from medusa.errors import MedusaError

if TYPE_CHECKING:  # torch takes seconds to import; `medusa --help` must not
    import torch

# Progress and remarks go to stderr, so that stdout holds what was asked for and nothing else.
notes = Console(stderr=True, highlight=False)
out = Console(highlight=False)

ADAPTIVE = Path("adaptive")  # in place of a tree's file
SHIPPED_CHECKPOINT = "checkpoints/smollm2-135m-shopping-hydra"


class Dtype(enum.StrEnum):
    """Number formats of weights. auto: bfloat16 where the machine has instructions for it, else float32."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"

    def resolve(self) -> torch.dtype:
        """The torch dtype. Without instructions of its own bfloat16 is several times slower than float32."""
        import torch

        from medusa.hardware import native_bf16

        if self is Dtype.auto:
            return torch.bfloat16 if native_bf16(device()) else torch.float32
        return torch.bfloat16 if self is Dtype.bfloat16 else torch.float32


class Weights(enum.StrEnum):
    """How the base's linear layers are kept: as the dtype says, or quantized to 8 bits."""

    full = "full"
    int8 = "int8"


def device() -> str:
    """Where models run: the first GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


BaseOption = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="NAME|DIR|ID", help="A known name (smollm2-135m), a local folder or a Hub id."
    ),
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", metavar="DIR", help=f"Heads to use; the shipped ones ({SHIPPED_CHECKPOINT})."
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Number format of the weights.")]
WeightsOption = Annotated[
    Weights,
    typer.Option(
        "--weights",
        help="int8: the base's linear layers in 8 bits, on a CPU: less memory, and a slightly different base.",
    ),
]
TreeOption = Annotated[
    Path | None,
    typer.Option(
        "--tree",
        metavar="FILE|adaptive",
        help="A tree to use instead of the checkpoint's tree.json; adaptive: another one before each step, by what "
        "a step costs here and what the answer accepts.",
    ),
]


def examples(*lines: str) -> str:
    """A help page's closing part. Typer keeps line ends only between paragraphs."""
    return "\n\n".join(
        ["[bold]Examples[/bold]", *(f"  {line.replace('[', chr(92) + '[')}" for line in lines)]
    )


def utf8(name: str, content: bytes) -> str:
    """Text from the command line or a pipe. Raises MedusaError if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MedusaError(f"{name} is not UTF-8 text (byte {error.start}); convert it first") from error


def repository() -> Path:
    """The folder with recipes/ and checkpoints/: the current one, or the clone this package runs from.

    Raises:
        MedusaError: neither holds them.
    """
    for folder in (Path(), Path(__file__).resolve().parent.parent):
        if (folder / "recipes").is_dir():
            return folder
    raise MedusaError("recipes/ is not here; run this in a clone of the repository")


def checkpoint_folder(given: Path | None) -> Path:
    """The checkpoint asked for, or the shipped one.

    Raises:
        MedusaError: there is no such folder.
    """
    if given is not None:
        if not given.is_dir():
            raise MedusaError(f"--checkpoint {given}: no such folder; `medusa train` makes one")
        return given
    try:
        shipped = repository() / SHIPPED_CHECKPOINT
    except MedusaError:
        shipped = Path(SHIPPED_CHECKPOINT)
    if not shipped.is_dir():
        raise MedusaError(
            f"no --checkpoint was given and {SHIPPED_CHECKPOINT} is not here; run this in a clone of the "
            "repository, or name a checkpoint that `medusa train` or `make demo` made"
        )
    return shipped
