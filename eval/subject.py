"""What a run measures, and how: the options, and the base, heads, trees and engine that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from eval.decode import longest
from eval.prompts import Prompts
from eval.results import Mode
from medusa.base import Base, load_base
from medusa.checkpoint import Checkpoint, load_checkpoint
from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.tree import Tree


@dataclass(frozen=True)
class Options:
    """What to run; the command line's options, by the same names.

    Attributes:
        checkpoint: folder of the heads.
        data: `test` or a file.
        out: folder for results.json, report.html and summary.md.
        command: as it was typed, for the record.
        base: name, folder or Hub id; None: the one the checkpoint names.
        limit: conversations; None: all.
        dtype: `float32` or `bfloat16`.
        weights: `full`, or `int8` for the base's linear layers, in every mode.
        batch: conversations decoded together.
        max_new_tokens: of each answer.
        repeats: of every measurement.
        warmup: conversations answered before the first measurement.
        seed: of the subset and of the bootstrap.
        turns: `first` or `all`; None: see `load_prompts`.
        tree: a file; None: the checkpoint's tree.
        peers: see `open_peers`.
        peer_conversations: how many conversations peers answer.
        vllm_url: see `open_peers`.
        device: where base and heads go.
        cost_repeats: steps timed at each width of the step-cost curve.
        resume: go on with an interrupted run in `out`.
    """

    checkpoint: Path
    data: str
    out: Path
    command: str
    base: str | None = None
    limit: int | None = None
    dtype: str = "bfloat16"
    weights: str = "full"
    batch: int = 1
    max_new_tokens: int = 256
    repeats: int = 3
    warmup: int = 1
    seed: int = 0
    turns: str | None = None
    tree: Path | None = None
    peers: str = "auto"
    peer_conversations: int = 6
    vllm_url: str | None = None
    device: str = "cpu"
    cost_repeats: int = 15
    resume: bool = False


@dataclass(frozen=True)
class Subject:
    """What is measured, loaded.

    Attributes:
        base: with its model and tokenizer.
        checkpoint: heads, tree, calibration.
        trees: each mode's.
        engine: on the base and the heads.
    """

    base: Base
    checkpoint: Checkpoint
    trees: dict[Mode, Tree]
    engine: Engine


def open_subject(options: Options, prompts: Prompts, engine_class: type[Engine] = Engine) -> Subject:
    """Loads the base, the checkpoint and the trees, and makes the engine.

    Raises:
        MedusaError: one of them cannot be loaded or does not fit the others.
    """
    base = _load_base(options)
    checkpoint = load_checkpoint(options.checkpoint, base)
    tree = Tree.from_json(options.tree) if options.tree else checkpoint.tree
    chain = Tree.chain(tree.depth or checkpoint.heads.config.num_heads)
    engine = engine_class(
        base.model,
        checkpoint.heads,
        tree,
        batch=options.batch,
        max_length=longest(base, prompts.rows, options.max_new_tokens),
    )
    return Subject(base, checkpoint, {"plain": Tree(), "tree": tree, "chain": chain}, engine)


def _load_base(options: Options) -> Base:
    """The base asked for, or the one that the checkpoint names."""
    dtype = getattr(torch, options.dtype)
    if options.base is not None:
        return load_base(options.base, dtype=dtype, device=options.device, weights=options.weights)
    name = load_checkpoint(options.checkpoint).config["base"].get("name")
    try:
        return load_base(str(name), dtype=dtype, device=options.device, weights=options.weights)
    except MedusaError as error:
        raise MedusaError(
            f"{options.checkpoint} belongs to the base {name!r}, which cannot be loaded ({error}); "
            "say with --base where it is"
        ) from error
