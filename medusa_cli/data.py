"""`medusa data`: prompts, the base's answers to them, and its hidden states."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa.errors import MedusaError
from medusa_cli.common import Dtype, DtypeOption, examples, notes

if TYPE_CHECKING:
    from medusa.base import Base
    from medusa.data.backends import Backend

app = typer.Typer(
    no_args_is_help=True, help="Make training data: prompts, the base's answers, its hidden states."
)

BASE = Annotated[
    str,
    typer.Option("--base", metavar="NAME|DIR|ID", help="A known name (smollm2-135m), a folder or a Hub id."),
]
BACKEND = Annotated[
    str, typer.Option("--backend", metavar="auto|vllm|engine", help="What decodes; auto: vLLM if installed.")
]
IN_FLIGHT = Annotated[int | None, typer.Option("--in-flight", min=1, help="Conversations decoded together.")]
MAX_LENGTH = Annotated[int, typer.Option("--max-length", min=2, help="Most tokens of a conversation.")]
SEED = Annotated[int, typer.Option("--seed", min=0, help="Of every random choice.")]
PROMPTS_EXAMPLES = examples(
    "medusa data prompts --out data/prompts", "medusa data prompts --out data/prompts --train 8000 --seed 1"
)


@app.command("prompts", epilog=PROMPTS_EXAMPLES)
def prompts(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="For train, validation and test.jsonl.")],
    train: Annotated[int, typer.Option(min=1, help="Training prompts.")] = 4000,
    validation: Annotated[int, typer.Option(min=1, help="Validation prompts.")] = 256,
    general: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of training prompts outside shopping.")
    ] = 0.25,
    seed: SEED = 0,
) -> None:
    """Write shopping prompts from the grammar and catalogue. Splits share no product category."""
    from medusa.data.prompts import make_prompts

    manifest = make_prompts(out, train=train, validation=validation, general=general, seed=seed)
    counts = ", ".join(f"{split['rows']} {name}" for name, split in manifest["splits"].items())
    notes.print(f"{counts} prompts in {out}", soft_wrap=True)


MAGPIE_EXAMPLES = examples(
    "medusa data magpie --base smollm2-135m --out data/magpie.jsonl --count 2000",
    "medusa data magpie --base my-org/my-model --out magpie.jsonl --shopping-share 0.9 --exclude test.jsonl",
)


@app.command("magpie", epilog=MAGPIE_EXAMPLES)
def magpie(
    base: BASE,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The prompts, .jsonl.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts in the file at the end.")] = 1000,
    shopping_share: Annotated[float, typer.Option(min=0, max=1, help="The others are general.")] = 0.6,
    follow_up_share: Annotated[float, typer.Option(min=0, max=1, help="Get a second user turn.")] = 0.3,
    temperature: Annotated[float, typer.Option(help="Of the user turns.")] = 0.9,
    top_p: Annotated[float, typer.Option(help="Nucleus mass of the user turns.")] = 0.9,
    exclude: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts that none may nearly repeat.")
    ] = None,
    seed: SEED = 0,
    backend: BACKEND = "auto",
    in_flight: IN_FLIGHT = None,
    max_length: MAX_LENGTH = 2048,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Let the base write user turns itself (Magpie, arXiv 2406.08464). Run again, it goes on where it was."""
    from medusa.data.conversations import load_conversations
    from medusa.data.magpie import MagpieOptions
    from medusa.data.magpie import magpie as run

    options = MagpieOptions(
        shopping_share=shopping_share,
        follow_up_share=follow_up_share,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    excluded = load_conversations(exclude) if exclude else ()
    opened, engine = _open(base, backend, dtype, in_flight=in_flight, max_length=max_length)
    run(out, opened, engine, count=count, options=options, exclude=excluded)
    notes.print(f"{count} prompts in {out}", soft_wrap=True)


DISTILL_EXAMPLES = examples(
    "medusa data distill prompts/train.jsonl --base smollm2-135m --out train.jsonl --states states",
    "medusa data distill my.parquet --base my-org/my-model --out answers.jsonl --greedy-share 1",
    "medusa data distill prompts.jsonl --base smollm2-135m --out a.jsonl --states a --part 1/8   # one of 8 nodes",
)


@app.command("distill", epilog=DISTILL_EXAMPLES)
def distill(
    prompts: Annotated[
        list[Path], typer.Argument(metavar="PROMPTS...", help="Files of prompts: .jsonl, .json or .parquet.")
    ],
    base: BASE,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The conversations, .jsonl.")],
    states: Annotated[
        Path | None, typer.Option("--states", metavar="DIR", help="Keep the base's hidden states as well.")
    ] = None,
    backend: BACKEND = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    greedy_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of conversations answered greedily.")
    ] = 0.7,
    temperature: Annotated[
        tuple[float, float], typer.Option(metavar="LOW HIGH", help="Of the other conversations.")
    ] = (0.7, 1.0),
    top_p: Annotated[float, typer.Option(help="Nucleus mass of the other conversations.")] = 1.0,
    seed: SEED = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer only this many prompts.")] = None,
    token_budget: Annotated[
        int | None, typer.Option(min=1, help="Begin nothing after so many tokens.")
    ] = None,
    time_budget: Annotated[
        float | None, typer.Option(min=0, metavar="MINUTES", help="Begin no answer after so many minutes.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes side by side, the processor's cores shared out to them.")
    ] = 1,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Only each N-th prompt, from the I-th; join with `merge`."),
    ] = None,
    in_flight: IN_FLIGHT = None,
    max_length: MAX_LENGTH = 2048,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Let the base answer prompts, every turn in its own context. Run again, it goes on where it was."""
    from medusa.data.conversations import load_conversations
    from medusa.data.distill import Sampling
    from medusa.data.distill import distill as run
    from medusa_cli.session import open_base
    from medusa_cli.workers import already_made, join_parts, joining, run_parts

    if workers > 1:
        if part is not None:
            raise MedusaError("--workers and --part cannot both be given: a part is one worker's share")
        if already_made(base, out, states):
            notes.print(f"{out} is there already; name another file to make more", soft_wrap=True)
            return
        asked: dict[str, object] = {
            "--base": base,
            "--backend": backend,
            "--max-new-tokens": max_new_tokens,
            "--greedy-share": greedy_share,
            "--top-p": top_p,
            "--seed": seed,
            "--limit": limit,
            "--token-budget": None if token_budget is None else -(-token_budget // workers),
            "--time-budget": time_budget,
            "--in-flight": in_flight,
            "--max-length": max_length,
            "--dtype": dtype.value,
        }
        words = [word for name, value in asked.items() if value is not None for word in (name, str(value))]
        words += ["--temperature", *map(str, temperature), *map(str, prompts)]
        if not joining(out, states):
            run_parts(words, workers, out, states is not None)
        join_parts(open_base(base, dtype), out, states)
        return
    sampling = Sampling(max_new_tokens, greedy_share, temperature, top_p, seed)
    rows = load_conversations(prompts, limit=limit)
    rows = rows[_share(part)] if part is not None else rows
    opened, engine = _open(
        base, backend, dtype, in_flight=in_flight, max_length=max_length, weights=states is not None
    )
    report = run(
        rows,
        out,
        opened,
        engine,
        sampling=sampling,
        token_budget=token_budget,
        seconds=time_budget * 60 if time_budget is not None else None,
        states_dir=states,
    )
    notes.print(
        f"{report.new} conversations answered by {engine.name}, {report.rows} in {out}; "
        f"{report.tokens:,} tokens, {report.tokens_per_second:,.0f} tokens/s",
        soft_wrap=True,
    )


MERGE_EXAMPLES = examples(
    "medusa data merge a.jsonl b.jsonl --states a --states b --base smollm2-135m --out all.jsonl --out-states all"
)


@app.command("merge", epilog=MERGE_EXAMPLES)
def merge(
    answers: Annotated[
        list[Path], typer.Argument(metavar="ANSWERS...", help="What several runs of `distill` wrote.")
    ],
    base: BASE,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="All of the conversations, .jsonl.")],
    states: Annotated[
        list[Path] | None, typer.Option("--states", metavar="DIR", help="Of each file, in the same order.")
    ] = None,
    out_states: Annotated[
        Path | None, typer.Option("--out-states", metavar="DIR", help="All of the hidden states.")
    ] = None,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Join the answers, and hidden states, of several runs into one; of runs that were cut off too."""
    from medusa.data.merge import merge as run
    from medusa_cli.session import open_base

    if (states is None) != (out_states is None):
        raise MedusaError("--states and --out-states belong together: give both or neither")
    merged = run(open_base(base, dtype), answers, states, out, out_states)
    text = f"{merged.rows:,} conversations in {out}"
    if merged.cache is not None:
        text += f"; {merged.cache.num_segments:,} answers, {merged.cache.num_tokens:,} tokens in {out_states}"
    elif out_states is not None:
        text += "; no answers, so no hidden states either"
    notes.print(text, soft_wrap=True)


STATES_EXAMPLES = examples("medusa data states data/train.jsonl --base smollm2-135m --out data/states")


@app.command("states", epilog=STATES_EXAMPLES)
def states(
    conversations: Annotated[
        list[Path], typer.Argument(metavar="CONVERSATIONS...", help="Files with the base's answers.")
    ],
    base: BASE,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The cache.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Read only this many conversations.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward.")] = 8192,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Run the base over conversations and keep its last hidden states. Run again, it goes on where it was."""
    from medusa.data.conversations import load_conversations
    from medusa.data.states import build_states
    from medusa_cli.session import open_base

    rows = load_conversations(conversations, limit=limit)
    build_states(open_base(base, dtype), rows, out, batch_tokens=batch_tokens)


def _share(part: str) -> slice:
    """`2/8` -> every eighth row from the second."""
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise MedusaError(f"--part {part!r}: write I/N with 1 <= I <= N, such as 2/8")
    return slice(int(number) - 1, None, int(count))


def _open(
    base: str, backend: str, dtype: Dtype, *, in_flight: int | None, max_length: int, weights: bool = False
) -> tuple[Base, Backend]:
    """The base and what decodes it. `weights`: they are needed here even if the backend has its own."""
    from medusa.base import open_base as open_without_weights
    from medusa.data.backends import open_backend
    from medusa_cli.session import open_base

    name = ("vllm" if util.find_spec("vllm") else "engine") if backend == "auto" else backend
    # vLLM loads the weights by itself; a large base should not be in memory twice for nothing.
    opened = open_base(base, dtype) if weights or name != "vllm" else open_without_weights(base)
    number_format = str(dtype.resolve()).removeprefix("torch.")
    return opened, open_backend(opened, name, in_flight=in_flight, max_length=max_length, dtype=number_format)
