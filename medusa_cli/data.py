"""`medusa data`: prompts, the base's answers to them, and its hidden states."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli.common import Dtype, DtypeOption, examples, notes

app = typer.Typer(
    no_args_is_help=True, help="Make training data: prompts, the base's answers, its hidden states."
)

BASE = Annotated[
    str,
    typer.Option("--base", metavar="NAME|DIR|ID", help="A known name (smollm2-135m), a folder or a Hub id."),
]
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


DISTILL_EXAMPLES = examples(
    "medusa data distill prompts/train.jsonl --base smollm2-135m --out train.jsonl --states states",
    "medusa data distill my.parquet --base my-org/my-model --out answers.jsonl --greedy-share 1",
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
    backend: Annotated[str, typer.Option(metavar="auto|vllm|engine", help="What decodes.")] = "auto",
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
    in_flight: Annotated[int | None, typer.Option(min=1, help="Conversations decoded together.")] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Most tokens of a whole conversation.")] = 2048,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Let the base answer prompts, every turn in its own context. Run again, it goes on where it was."""
    from medusa.base import open_base as open_without_weights
    from medusa.data.backends import open_backend
    from medusa.data.conversations import load_conversations
    from medusa.data.distill import Sampling
    from medusa.data.distill import distill as run
    from medusa_cli.session import open_base

    sampling = Sampling(max_new_tokens, greedy_share, temperature, top_p, seed)
    rows = load_conversations(prompts, limit=limit)
    chosen = dtype.resolve()
    name = ("vllm" if util.find_spec("vllm") else "engine") if backend == "auto" else backend
    # vLLM loads the weights by itself; a large base should not be in memory twice for nothing.
    opened = open_without_weights(base) if name == "vllm" and states is None else open_base(base, dtype)
    engine = open_backend(
        opened, name, in_flight=in_flight, max_length=max_length, dtype=str(chosen).removeprefix("torch.")
    )
    report = run(rows, out, opened, engine, sampling=sampling, token_budget=token_budget, states_dir=states)
    notes.print(
        f"{report.new} conversations answered by {engine.name}, {report.rows} in {out}; "
        f"{report.tokens:,} tokens, {report.tokens_per_second:,.0f} tokens/s",
        soft_wrap=True,
    )


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
