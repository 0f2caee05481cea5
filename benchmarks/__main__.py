"""`python -m benchmarks`: run, report. Exits with 0 done, 2 bad input, 130 stopped."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from medusa.errors import MedusaError
from medusa_cli import endings
from medusa_cli.common import (
    BaseOption,
    CheckpointOption,
    Dtype,
    DtypeOption,
    checkpoint_folder,
    examples,
    repository,
)

RUN_EXAMPLES = examples(
    "python -m benchmarks run",
    "python -m benchmarks run --quick --only steps --out runs/smoke",
    "python -m benchmarks run --batches 1,8 --widths 1,8,32 --max-new-tokens 64 --repeats 5",
    "python -m benchmarks run --only peers --vllm-python .venv-vllm/bin/python --peer-batches 1,8",
)
REPORT_EXAMPLES = examples("python -m benchmarks report runs/bench")
SHIPPED_MEDUSA = "checkpoints/smollm2-135m-shopping-medusa"
QUICK = {"batches": "1,4", "widths": "1,8,32", "limit": 1, "max_new_tokens": 16, "repeats": 2}

app = typer.Typer(
    name="benchmarks",
    help="Measure the decoding engine: time of a step by part, throughput by rows, and others beside it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("run", epilog=RUN_EXAMPLES)
def run_command(
    checkpoint: CheckpointOption = None,
    base: BaseOption = None,
    dtype: DtypeOption = Dtype.auto,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="NAMES", help="Sections: steps, throughput, peers; commas between."),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option("--batches", metavar="N,N,...", help="Rows together.  [default: 1,2,4,8,16,32]"),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            "--widths", metavar="N,N,...", help="Nodes of a step's tree.  [default: 1,2,4,8,16,32,64]"
        ),
    ] = None,
    data: Annotated[
        str, typer.Option("--data", metavar="test|FILE", help="The kit's test split, or a file.")
    ] = "test",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=1, help="Prompts at each number of rows, one a row at least.  [default: 2]"
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=2, help="Tokens of each answer.  [default: 32]")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Rounds of everything.  [default: 3]")
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            metavar="auto|none|NAMES",
            help="transformers, transformers prompt lookup, vllm, vllm ngram, vllm medusa: with commas between.",
        ),
    ] = "auto",
    peer_batches: Annotated[
        str, typer.Option("--peer-batches", metavar="N,N,...", help="Prompts in flight beside peers.")
    ] = "1",
    medusa: Annotated[
        Path | None,
        typer.Option(
            "--medusa",
            metavar="DIR",
            help=f"Medusa heads beside peers, vLLM's too; without --checkpoint, {SHIPPED_MEDUSA}.",
        ),
    ] = None,
    vllm_python: Annotated[
        Path | None,
        typer.Option("--vllm-python", metavar="FILE", help="A Python that has vLLM, if this one has not."),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option("--cost", metavar="FILE", help="Step costs for the adaptive trees; else measured."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="For results.json, summary.md, bench.png, bench.svg.")
    ] = Path("runs/bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller defaults: does it all run?")] = False,
) -> None:
    """Measure, and write figures and a picture."""
    sections = _names("--only", only, ("steps", "throughput", "peers")) if only else None
    in_flight = _numbers("--peer-batches", peer_batches)
    given = {"batches": batches, "widths": widths, "limit": limit}
    given |= {"max_new_tokens": max_new_tokens, "repeats": repeats}
    chosen = (QUICK if quick else {}) | {name: value for name, value in given.items() if value is not None}
    chosen |= {name: _numbers(f"--{name}", chosen[name]) for name in ("batches", "widths") if name in chosen}
    if checkpoint is None and medusa is None and (repository() / SHIPPED_MEDUSA).is_dir():
        medusa = repository() / SHIPPED_MEDUSA
    checkpoint = checkpoint_folder(checkpoint)

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from benchmarks.report import markdown
    from benchmarks.run import PEERS, SECTIONS, Options, run
    from medusa.provenance import without_machine_paths
    from medusa_cli.session import base_of, open_base

    auto = peers == "auto"
    wanted = () if peers == "none" else PEERS if auto else _names("--peers", peers, PEERS)
    words = ["python", "-m", "benchmarks", *map(without_machine_paths, sys.argv[1:])]
    options = Options(
        checkpoint=checkpoint,
        out=out,
        command=shlex.join(words),
        sections=sections or SECTIONS,
        data=data,
        peers=wanted,
        must=not auto,
        peer_batches=in_flight,
        medusa=medusa,
        vllm_python=vllm_python,
        cost=cost,
        **chosen,
    )
    loaded = open_base(base or base_of(checkpoint), dtype)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    notes = Console(stderr=True, highlight=False)
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        results = run(options, loaded, bar=bar)
    print(markdown(results), end="")
    notes.print(f"written to {out}", soft_wrap=True)


@app.command("report", epilog=REPORT_EXAMPLES)
def report_command(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="A results.json or the folder it is in.")
    ],
) -> None:
    """Draw summary.md and the picture again, beside results.json."""
    from benchmarks.records import load
    from benchmarks.run import write_report

    folder = results if results.is_dir() else results.parent
    write_report(load(results), folder)
    print(folder)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers from 1 with commas between, ascending."""
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError as error:
        raise MedusaError(f"{option} {text}: whole numbers with commas, such as 1,4,16") from error
    if numbers[0] < 1:
        raise MedusaError(f"{option} {text}: numbers from 1, such as 1,4,16")
    return tuple(numbers)


def _names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Names with commas between, in the order of `known`."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise MedusaError(f"{option} {', '.join(unknown)!r}: choose from {', '.join(known)}")
    return tuple(name for name in known if name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; see `medusa_cli.endings`."""
    stopped = "stopped; results.json holds the sections that were finished"
    return endings.run(lambda: app, "python -m benchmarks", arguments, stopped)


if __name__ == "__main__":
    sys.exit(main())
