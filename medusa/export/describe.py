"""What heads are, whoever made them: the facts that `medusa inspect` prints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from medusa.checkpoint import load_checkpoint
from medusa.export.foreign import Foreign
from medusa.export.formats import is_checkpoint, read_foreign
from medusa.export.sources import Source
from medusa.tree import Tree

TOPS = (1, 2, 3, 5, 10)


def describe(path: str | os.PathLike) -> dict[str, Any]:
    """Facts about a checkpoint of the kit or heads in a foreign format.

    Returns:
        JSON values: format, kind, num_heads, num_layers, lm_head (shared, own, or one for all), hidden_size,
        vocab_size, draft_vocab_size, dtype, parameters, bytes, base, tree (width, depth, paths), accuracy
        ({"top-1": one share for each head, ...}), expected_acceptance_length, note. None where the source does not say.

    Raises:
        MedusaError: there are no heads there, or they are not whole.
    """
    source = Source.open(path)
    return _own(source.folder) if is_checkpoint(source) else _foreign(read_foreign(path))


def _own(folder: Path) -> dict[str, Any]:
    found = load_checkpoint(folder)
    config, calibration = found.heads.config, found.calibration
    tensors = list(found.heads.state_dict().values())
    accuracy = None
    if calibration is not None:
        accuracy = {f"top-{top}": calibration.accuracy(top) for top in TOPS if top <= calibration.top_k}
    return {
        "format": "medusa-kit",
        "kind": config.kind,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "lm_head": config.lm_head,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        **_sizes(tensors),
        "base": found.config["base"].get("name"),
        "tree": _tree(found.tree),
        "accuracy": accuracy,
        "expected_acceptance_length": calibration.expected(found.tree) if calibration is not None else None,
        "note": None,
    }


def _foreign(found: Foreign) -> dict[str, Any]:
    heads = found.heads
    own = {None: "shared", 1: "one for all"}.get(heads.lm_heads and len(heads.lm_heads), "own")
    if len(heads.blocks) == 1 and heads.lm_heads:
        own = "own"
    pruned = heads.draft_vocab is not None
    return {
        "format": found.format,
        "kind": "medusa",
        "num_heads": len(heads.blocks),
        "num_layers": len(heads.blocks[0]),
        "lm_head": own,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.lm_heads[0].shape[0] if heads.lm_heads and not pruned else found.vocab_size,
        "draft_vocab_size": len(heads.draft_vocab) if pruned else None,
        **_sizes(list(heads.tensors())),
        "base": "in the same folder" if found.write_base or found.base_folder else found.base_name,
        "tree": _tree(found.tree) if found.tree is not None else None,
        "accuracy": None,
        "expected_acceptance_length": None,
        "note": found.note,
    }


def _sizes(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Memory that several tensors share counts once."""
    once = {tensor.data_ptr(): tensor for tensor in tensors}.values()
    weights = [tensor for tensor in once if tensor.is_floating_point()]
    return {
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights})),
        "parameters": sum(tensor.numel() for tensor in weights),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in once),
    }


def _tree(tree: Tree) -> dict[str, Any]:
    return {"width": tree.width, "depth": tree.depth, "paths": [list(path) for path in tree.paths]}
