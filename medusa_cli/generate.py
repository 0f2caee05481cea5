"""`medusa generate`: one prompt, one answer, streamed as its tokens are committed."""

from __future__ import annotations

import enum
import json
import os
import sys
from typing import Annotated

import typer

from medusa.errors import MedusaError
from medusa_cli.common import (
    BaseOption,
    CheckpointOption,
    Dtype,
    DtypeOption,
    TreeOption,
    Weights,
    WeightsOption,
    examples,
    notes,
    utf8,
)

EXAMPLES = examples(
    'medusa generate --prompt "is a 2 person tent enough for 2 adults and a dog?"',
    "medusa generate --checkpoint runs/demo/hydra --prompt - --json < question.txt",
    'medusa generate --prompt "merino or cotton socks for hiking?" --plain --dtype float32',
    'medusa generate --prompt "name a gift for a cyclist" --temperature 0.8 --top-p 0.95 --seed 3',
    'medusa generate --prompt "which rain jacket is light?" --tree adaptive',
)


class Acceptance(enum.StrEnum):
    """Which guesses are committed."""

    lossless = "lossless"
    typical = "typical"


def generate(
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="The user's message; - reads stdin.")
    ],
    checkpoint: CheckpointOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to answer with.")] = 256,
    dtype: DtypeOption = Dtype.auto,
    weights: WeightsOption = Weights.full,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without the heads, for comparison.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when done.")] = False,
    tree: TreeOption = None,
    base: BaseOption = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before it.")] = None,
    no_template: Annotated[
        bool, typer.Option("--no-template", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy; above: sampled.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens with this much probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep this many of the likeliest tokens; 0: all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: against what was said already.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws. One seed gives one answer, heads or not.")] = 0,
    acceptance: Annotated[
        Acceptance,
        typer.Option(
            help="typical: also commit guesses that the base finds likely enough, at temperatures above 0; "
            "faster, and no longer the base's distribution."
        ),
    ] = Acceptance.lossless,
) -> None:
    """Answer one prompt. The same tokens come out with and without the heads, only sooner."""
    from medusa.sampling import SamplingParams

    sampling = SamplingParams(
        temperature, top_p, top_k, repetition_penalty, seed=seed, acceptance=acceptance.value
    )
    if prompt == "-":
        prompt = utf8("standard input", sys.stdin.buffer.read()).strip()
    for name, text in (("--prompt", prompt), ("--system", system or "")):
        utf8(name, os.fsencode(text))
    if not prompt.strip():
        raise MedusaError("--prompt is empty; give the user's message")
    if no_template and system:
        raise MedusaError("--system needs the chat template; leave out --no-template")

    from medusa_cli.session import Pieces, Session

    session = Session.open(checkpoint, base=base, dtype=dtype, tree=tree, plain=plain, weights=weights)
    if no_template:
        ids = session.base.tokenizer.encode(prompt)
    else:
        before = [{"role": "system", "content": system}] if system else []
        ids = session.encode([*before, {"role": "user", "content": prompt}])

    def stream(pieces: Pieces) -> None:
        sys.stdout.write("".join(text for text, _ in pieces))
        sys.stdout.flush()

    done = session.answer(
        ids,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        sampling=sampling,
        on_pieces=None if as_json else stream,
    )
    if as_json:
        answer = {
            "token_ids": done.token_ids,
            "text": done.text,
            "acceptance_length": done.acceptance_length,
            "tokens_per_second": session.rate(done),
            "finish": done.finish,
            "prompt_tokens": len(ids),
        }
        print(json.dumps(answer, ensure_ascii=False))
        return
    print()
    notes.print(
        f"{len(done.token_ids)} tokens, {session.rate(done):.1f} tokens/s, "
        f"acceptance length {done.acceptance_length:.2f}"
        + ("; cut off at --max-new-tokens" if done.finish == "length" else ""),
        style="dim",
    )
