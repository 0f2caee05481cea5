"""What a run measures, and how: the options, and the base, heads, trees and engine that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval.decode import longest
from eval.prompts import Prompts
from eval.results import Mode
from medusa.base import load_base
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
        resume: go on with an interrupted run in `out`.
    """

    checkpoint: Path
    data: str
    out: Path
    command: str
    base: str | None = None
    limit: int | None = None
    dtype: str = "bfloat16"
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
    resume: bool = False


@dataclass(frozen=True)
class Subject:
    """What is measured, loaded.

    Attributes:
        base: a `medusa.base.Base`.
        checkpoint: heads, tree, calibration.
        trees: each mode's.
        engine: on the base and the heads.
    """

    base: Any
    checkpoint: Checkpoint
    trees: dict[Mode, Tree]
    engine: Engine


def open_subject(options: Options, prompts: Prompts, engine_class: type[Engine] = Engine) -> Subject:
    """Loads the base, the checkpoint and the trees, and makes the engine.

    Raises:
        MedusaError: one of them cannot be loaded or does not fit the others.
    """
    name = options.base or _base_name(options.checkpoint)
    base = load_base(name, dtype=getattr(torch, options.dtype))
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


def _base_name(folder: Path) -> str:
    name = load_checkpoint(folder).config["base"].get("name")
    if not name:
        raise MedusaError(f"{folder} does not say which base it belongs to; give --base")
    return name
