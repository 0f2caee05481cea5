"""INT8 weights beside the full ones: time of a step, memory, perplexity, acceptance length.

Both bases are in memory, and their steps are timed in turn, so that a machine's quiet and busy moments are the same for
both. Times are medians with quartiles; nothing else of a figure depends on the machine.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.utils import logging

from eval.prompts import load_prompts
from medusa.base import Base, load_base
from medusa.checkpoint import load_checkpoint
from medusa.cost import bushy_tree
from medusa.data.conversations import load_conversations
from medusa.data.template import encode_conversation, encode_prompt
from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.files import write_json
from medusa.generation import Request, generate
from medusa.hardware import native_bf16, processor
from medusa.heads import DraftHeads
from medusa.tree import Tree

WEIGHTS = ("full", "int8")
NODES = 8
CONTEXT = 200
EXAMPLE = """example:
  python -m benchmarks.int8 --checkpoint checkpoints/smollm2-135m-shopping-hydra \\
      --texts runs/demo/validation.jsonl --prompts 8 --out int8.json
"""


def step_times(
    bases: dict[str, Base], heads: DraftHeads, repeats: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Weights -> `plain` or `tree` -> median, low and high quartile of a step's milliseconds, interleaved."""
    trees = {"plain": Tree(), "tree": bushy_tree(NODES, heads.config.num_heads)}
    prompt = [number % 1000 for number in range(CONTEXT)]
    engines = {}
    for name, base in bases.items():
        engines[name] = Engine(base.model, heads, trees["tree"], max_length=2 * CONTEXT)
        engines[name].prefill(0, prompt)
    times: dict[tuple[str, str], list[float]] = {}
    for repeat in range(repeats + 2):  # the first two allocate memory and choose kernels
        for name, engine in engines.items():
            for kind, tree in trees.items():
                engine.set_tree(tree)
                engine.rewind(0, CONTEXT)
                began = time.perf_counter()
                engine.step()
                if repeat >= 2:
                    times.setdefault((name, kind), []).append(1000 * (time.perf_counter() - began))
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in bases}
    for (name, kind), values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        found[name][kind] = {"median": median, "low": low, "high": high}
    return found


def linear_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes that the linear layers hold, and of them in second copies laid out for small batches.

    A tied LM head's float weight is the embedding's and is there anyway: it does not count.
    """
    embedding = model.get_input_embeddings().weight
    held = packed = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            held += sum(tensor.nbytes for tensor in tensors if tensor is not embedding)
            copy = getattr(module, "packed", None)
            packed += 0 if copy is None else copy.numel() * copy.element_size()
    return {"held": held, "packed": packed}


@torch.inference_mode()
def perplexity(base: Base, rows: Sequence[dict[str, Any]], max_length: int = 1024) -> dict[str, float]:
    """exp of the mean negative log-likelihood of the rows' answers, each token given all text before it."""
    total, count = 0.0, 0
    for row in rows:
        ids, spans = encode_conversation(
            base.tokenizer, row["messages"], row.get("finish"), max_length=max_length
        )
        if not spans:
            continue
        logits = base.model(input_ids=torch.tensor([ids])).logits[0].float()
        for start, stop in spans:
            at = max(start, 1)  # nothing comes before the first token
            loss = F.cross_entropy(logits[at - 1 : stop - 1], torch.tensor(ids[at:stop]), reduction="sum")
            total, count = total + float(loss), count + stop - at
    if not count:
        raise MedusaError("the texts hold no answers of the assistant")
    return {"perplexity": math.exp(total / count), "nll": total / count, "tokens": count}


def decode(
    base: Base, heads: DraftHeads, tree: Tree, prompts: Sequence[list[int]], new: int
) -> tuple[list[list[int]], float]:
    """Answers to the prompts, and the acceptance length over all of their steps."""
    engine = Engine(base.model, heads, tree, max_length=max(map(len, prompts)) + new)
    requests = [Request(ids, new, key=number) for number, ids in enumerate(prompts)]
    done = sorted(generate(engine, requests, eos_ids=base.eos_ids), key=lambda item: item.key)
    steps = [count for item in done for count in item.accepted]
    return [item.token_ids for item in done], sum(steps) / len(steps) if steps else 1.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as they are written."""
    if options.dtype == "auto":
        options.dtype = "bfloat16" if native_bf16("cpu") else "float32"
    dtype = getattr(torch, options.dtype)
    logging.disable_progress_bar()  # of loading weights
    name = options.base or load_checkpoint(options.checkpoint).config["base"]["name"]
    rows = load_conversations(options.texts)[: options.rows]
    bases = {weights: load_base(name, dtype=dtype, weights=weights) for weights in WEIGHTS}
    checkpoint = load_checkpoint(options.checkpoint, bases["full"])
    asked = load_prompts("test", turns="first", limit=options.prompts).rows
    tokenizer = bases["full"].tokenizer
    prompts = [encode_prompt(tokenizer, row["messages"][: _first_user(row) + 1]) for row in asked]
    found: dict[str, Any] = {
        "about": processor()
        | {"dtype": options.dtype, "base": name, "checkpoint": options.checkpoint.name}
        | {"tree": checkpoint.tree.width, "prompts": len(prompts), "texts": len(rows)},
        "step_ms": step_times(bases, checkpoint.heads, options.repeats),
        "linear_bytes": {weights: linear_bytes(base.model) for weights, base in bases.items()},
        "perplexity": {weights: perplexity(base, rows) for weights, base in bases.items()},
        "acceptance_length": {},
        "tree_equals_plain": {},
    }
    plain = {}
    for weights, base in bases.items():
        plain[weights], _ = decode(base, checkpoint.heads, Tree(), prompts, options.new)
        answers, found["acceptance_length"][weights] = decode(
            base, checkpoint.heads, checkpoint.tree, prompts, options.new
        )
        found["tree_equals_plain"][weights] = sum(map(list.__eq__, answers, plain[weights]))
    found["answers_as_full"] = sum(map(list.__eq__, plain["int8"], plain["full"]))
    return found


def _first_user(row: dict[str, Any]) -> int:
    return next(at for at, message in enumerate(row["messages"]) if message["role"] == "user")


def show(found: dict[str, Any], console: Console) -> None:
    """The figures as a table."""
    about = found["about"]
    title = f"{about['base']}, {about['dtype']}, threads: {about['threads']}"
    table = Table("", *WEIGHTS, "int8 / full", title=title)

    def line(what: str, values: Sequence[float], form: str, notes: Sequence[str] = ("", "")) -> None:
        cells = [f"{value:{form}}{note}" for value, note in zip(values, notes, strict=True)]
        table.add_row(what, *cells, f"{values[1] / values[0]:.3f}")

    for kind, what in (("plain", "plain step, ms"), ("tree", f"step of {NODES} nodes, ms")):
        times = [found["step_ms"][weights][kind] for weights in WEIGHTS]
        quartiles = [f" ({t['low']:.1f} to {t['high']:.1f})" for t in times]
        line(what, [t["median"] for t in times], ".1f", quartiles)
    memory = [found["linear_bytes"][weights] for weights in WEIGHTS]
    line("linear layers, MB", [m["held"] / 1e6 for m in memory], ".1f")
    line("with packed copies, MB", [(m["held"] + m["packed"]) / 1e6 for m in memory], ".1f")
    line("perplexity of answers", [found["perplexity"][weights]["perplexity"] for weights in WEIGHTS], ".4f")
    line("acceptance length", [found["acceptance_length"][weights] for weights in WEIGHTS], ".3f")
    console.print(table)
    count = about["prompts"]
    same = " and ".join(f"{found['tree_equals_plain'][weights]} ({weights})" for weights in WEIGHTS)
    tokens = found["perplexity"]["full"]["tokens"]
    console.print(
        f"{about['texts']} texts, {tokens:,} tokens of answers; {count} prompts, tree of {about['tree']} nodes. "
        f"The tree's answers are plain decoding's in {same} of {count}; int8's are the full weights' in "
        f"{found['answers_as_full']} of {count}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.int8",
        description=__doc__.partition("\n")[0],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="the heads")
    parser.add_argument(
        "--texts", required=True, metavar="FILE", help="conversations with answers, for perplexity"
    )
    parser.add_argument("--base", metavar="NAME|DIR|ID", help="the base; by default the checkpoint's")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of activations"
    )
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="texts read at most (32)")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="test prompts answered (8)")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="most tokens of an answer (64)")
    parser.add_argument("--repeats", type=int, default=25, metavar="N", help="steps timed of each kind (25)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch; by default its own choice")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        found = measure(options)
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(found, Console(highlight=False))
    if options.out:
        write_json(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
