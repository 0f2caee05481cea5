"""`python -m eval`: run, report, table. Exits with 0 done, 1 a check failed, 2 bad input, 130 stopped."""

from __future__ import annotations

import enum
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from medusa.errors import CheckFailed, MedusaError
from medusa_cli import endings
from medusa_cli.common import Dtype, Weights

RUN_EXAMPLES = """[bold]Examples[/bold]

  python -m eval run --checkpoint checkpoints/smollm2-135m-shopping-hydra --data test --out runs/hydra

  python -m eval run --checkpoint heads --data test --limit 24 --dtype float32 --out runs/exact

  python -m eval run --checkpoint heads --data test --limit 24 --weights int8 --out runs/int8

  python -m eval run --checkpoint heads --data question.jsonl --turns all --out runs/spec-bench

  python -m eval run --checkpoint heads --data test --vllm-url http://localhost:8000/v1 --out runs/beside-vllm
"""
REPORT_EXAMPLES = """[bold]Examples[/bold]

  python -m eval report runs/hydra --out report.html

  python -m eval report runs/hydra/results.json --out summary.md
"""
TABLE_EXAMPLES = """[bold]Examples[/bold]

  python -m eval table runs/medusa runs/hydra

  python -m eval table runs/medusa runs/hydra --markdown
"""

app = typer.Typer(
    name="eval",
    help="Measure a heads checkpoint: speedup, acceptance, losslessness; draw the report.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def resolve(dtype: Dtype, device: str) -> tuple[str, str]:
    """Format and device with `auto` filled in: the first GPU if there is one; bfloat16 where it is native."""
    import torch

    from medusa.hardware import native_bf16

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise MedusaError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error
    if dtype is Dtype.auto:
        return ("bfloat16" if native_bf16(device) else "float32"), device
    return dtype.value, device


class Turns(enum.StrEnum):
    """Which of the user's messages are answered."""

    first = "first"
    all = "all"


@app.command("run", epilog=RUN_EXAMPLES)
def run_command(
    checkpoint: Annotated[Path, typer.Option("--checkpoint", metavar="DIR", help="The heads to measure.")],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="test|FILE",
            help="The kit's test split, a file of conversations, or Spec-Bench questions.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="For results.json, report.html and summary.md.")
    ],
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NAME|DIR|ID", help="The base model; by default the checkpoint's."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Decode a balanced subset of this many conversations."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Number format of the weights.")] = Dtype.auto,
    weights: Annotated[
        Weights,
        typer.Option("--weights", help="int8: the base's linear layers in 8 bits, on a CPU, in every mode."),
    ] = Weights.full,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Conversations decoded together.")] = 1,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Most tokens of each answer.")
    ] = 256,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measurements of everything.")] = 3,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Conversations begun before anything is timed.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of the subset and of the bootstrap.")] = 0,
    turns: Annotated[
        Turns | None,
        typer.Option(
            "--turns", help="User messages answered; default: all, of Spec-Bench's questions the first."
        ),
    ] = None,
    tree: Annotated[
        Path | None, typer.Option("--tree", metavar="FILE", help="A tree other than the checkpoint's.")
    ] = None,
    peers: Annotated[
        str,
        typer.Option("--peers", metavar="auto|none|NAMES", help="transformers, vllm: with commas between."),
    ] = "auto",
    peer_conversations: Annotated[
        int, typer.Option("--peer-conversations", min=1, help="Conversations that peers answer as well.")
    ] = 6,
    vllm_url: Annotated[
        str | None,
        typer.Option(
            "--vllm-url", metavar="URL", help="A running vLLM's OpenAI address, such as http://host:8000/v1."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to run: auto, cpu, cuda, cuda:1.")] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run in --out, if there is one.")
    ] = False,
) -> None:
    """Decode conversations plainly, with the tree and with a chain, and compare."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from transformers.utils import logging

    from eval.run import run
    from eval.subject import Options
    from eval.summary import print_summary
    from medusa.provenance import without_machine_paths

    logging.disable_progress_bar()  # of loading weights, inside the bar below
    words = ["python", "-m", "eval", *map(without_machine_paths, sys.argv[1:])]
    dtype_name, device = resolve(dtype, device)
    options = Options(
        checkpoint=checkpoint,
        data=data,
        out=out,
        command=shlex.join(words),
        base=base,
        limit=limit,
        dtype=dtype_name,
        weights=weights.value,
        batch=batch,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        warmup=warmup,
        seed=seed,
        turns=turns.value if turns else None,
        tree=tree,
        peers=peers,
        peer_conversations=peer_conversations,
        vllm_url=vllm_url,
        device=device,
        resume=resume,
    )
    notes = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        results = run(options, progress=progress)
    print_summary(results, Console(highlight=False), str(out / "report.html"))
    bad = results.lossless.not_allowed
    if bad:
        raise CheckFailed(
            f"{bad} of {results.lossless.checked} answers are not the base's own; "
            f"see the losslessness table of {out / 'report.html'}"
        )


@app.command("report", epilog=REPORT_EXAMPLES)
def report_command(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="A results.json or the folder it is in.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", help="Where to write: .html for the report, .md for a summary."
        ),
    ],
) -> None:
    """Draw the report again from results.json."""
    from eval.report import write_markdown, write_report
    from eval.results import load

    writers = {".html": write_report, ".htm": write_report, ".md": write_markdown}
    if out.suffix not in writers:
        raise MedusaError(f"--out {out}: a name that ends in .html or .md is needed")
    writers[out.suffix](load(results), out)
    print(out)


@app.command("table", epilog=TABLE_EXAMPLES)
def table_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="results.json files or their folders.")
    ],
    markdown: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False,
) -> None:
    """Put several runs side by side."""
    from eval.results import load
    from eval.summary import markdown_side_by_side, print_side_by_side

    loaded = {}
    for path in runs:
        name = path.parent.name if path.name == "results.json" else path.name
        loaded[name if name not in loaded else str(path)] = load(path)
    if markdown:
        print(markdown_side_by_side(loaded), end="")
    else:
        print_side_by_side(loaded, Console(highlight=False))


@app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of results.json (kept in eval/schema.json)."""
    from eval.results import schema

    print(schema(), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; see `medusa_cli.endings`."""
    again = "stopped; the same command with --resume goes on with the conversations that are finished"
    return endings.run(lambda: app, "python -m eval", arguments, again)


if __name__ == "__main__":
    sys.exit(main())
