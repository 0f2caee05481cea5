"""Heads for NeuronX Distributed Inference (aws-neuron/neuronx-distributed-inference 0.9.0, commit 4bcdc54).

In src/neuronx_distributed_inference:
- models/application_base.py lines 718-728: with `is_medusa`, `medusa_heads.pt` is read from the *base's* folder and its
  tensors join the base's. So a base and its heads are one folder.
- models/llama/modeling_llama.py lines 1172-1187: `medusa_head_{i}` is a Sequential of exactly one residual block
  (`* 1`) and an LM head [V, H] without bias: `medusa_head_{i}.0.linear.weight`, `.bias`, `medusa_head_{i}.1.weight`.
  models/llama4/modeling_llama4_text.py lines 619-645 has the same; no other family reads heads.
- utils/hf_adapter.py lines 810-812 and 910-914: the tree is a list of paths, all prefixes in it, and
  `medusa_speculation_length` the number of its nodes with the root.
- neuronx_distributed/utils/medusa_utils.py (aws-neuron/neuronx-distributed, commit fbac349): TOPK = 10 guesses of each
  head, so ranks are 0..9; `global_topk` of the sampling configuration must be 10 as well (shared/facts/nxdi.json).

Written is such a folder: a copy of the base, medusa_heads.pt, and medusa_tree.json, which inference_demo.py line 228
takes as --medusa-tree-json.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from medusa.base import Base
from medusa.checkpoint import PROVENANCE
from medusa.errors import MedusaError
from medusa.export.foreign import RECIPE, Foreign, from_checkpoint
from medusa.export.layout import Layout
from medusa.export.sources import CONFIG, Source, names_in, read_tensors
from medusa.files import atomic_folder, write_json
from medusa.tree import Tree

WEIGHTS, TREE = "medusa_heads.pt", "medusa_tree.json"
LAYOUT = Layout("medusa_head_{h}.{l}.linear.{part}", "medusa_head_{h}.{l}.weight")
TOP_K = 10
FAMILIES = ("llama", "llama4_text")
_COPIED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def recognises(source: Source) -> bool:
    """Whether this is a base with heads for NxDI, or such heads alone."""
    files = source.files(WEIGHTS)
    return bool(files) and any(LAYOUT.match(name) for name in names_in(files[0]))


def read(source: Source) -> Foreign:
    """Reads the heads; their base is the folder itself, where it has one.

    Raises:
        MedusaError: there are none; see `Layout.read`.
    """
    files = source.files(WEIGHTS)
    if not files:
        raise MedusaError(f"{source.path} has no {WEIGHTS}; copy the heads again")
    tree = source.folder / TREE
    whole = "model_type" in source.config and any(source.folder.glob("*.safetensors"))
    return Foreign(
        format="nxdi",
        source=source.path,
        files=tuple(files),
        heads=LAYOUT.read(read_tensors(files[0]), files[0], num_layers=1),
        base_folder=source.folder if whole else None,
        tree=Tree.from_json(tree) if tree.is_file() else None,
    )


def export(checkpoint_dir: str | os.PathLike, out_dir: str | os.PathLike, base: Base) -> Path:
    """Writes a base and its medusa heads as one folder.

    Args:
        checkpoint_dir: the heads.
        out_dir: a folder, which is replaced whole or not at all.
        base: the heads' base, loaded. Its files are copied; the heads are written in the loaded dtype.

    Returns:
        `out_dir`.

    Raises:
        MedusaError: NxDI cannot hold these heads, this tree or this base; see `from_checkpoint`.
    """
    checkpoint, heads = from_checkpoint(Path(checkpoint_dir), base, "NxDI")
    layers = len(heads.blocks[0])
    if layers != 1:
        raise MedusaError(
            f"{checkpoint_dir}: its heads have {layers} residual blocks and NxDI's have exactly one; train some with "
            f"`medusa train --recipe {RECIPE} heads.num_layers=1`"
        )
    family = base.config.model_type
    if family not in FAMILIES:
        raise MedusaError(
            f"{base.name} is a {family}, and NxDI reads medusa heads of {', '.join(FAMILIES)} only; use --format vllm"
        )
    check_tree(checkpoint.tree, Path(checkpoint_dir))
    with atomic_folder(out_dir) as folder:
        for pattern in _COPIED:
            for file in base.path.glob(pattern):
                if file.name not in (TREE, PROVENANCE):
                    shutil.copyfile(file, folder / file.name)
        if not (folder / CONFIG).is_file():
            raise MedusaError(f"{base.path} holds no {CONFIG}; give the base in the Hugging Face layout")
        torch.save(LAYOUT.write(heads), folder / WEIGHTS)
        write_json(folder / TREE, [list(path) for path in checkpoint.tree.paths])
        write_json(folder / PROVENANCE, checkpoint.provenance)
    return Path(out_dir)


def check_tree(tree: Tree, where: Path) -> None:
    """Raises MedusaError: NxDI cannot walk this tree."""
    if not tree.paths:
        raise MedusaError(
            f"{where}: its tree is empty, and NxDI has no Medusa without one; choose a tree with `medusa tree search`"
        )
    if tree.top_k > TOP_K:
        raise MedusaError(
            f"{where}: its tree has rank {tree.top_k - 1}, and NxDI's heads give {TOP_K} guesses, ranks 0 to "
            f"{TOP_K - 1}; choose another tree with `medusa tree search`"
        )
