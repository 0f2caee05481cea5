"""Heads of TensorRT-LLM and NVIDIA's Model Optimizer.

A TensorRT-LLM checkpoint (NVIDIA/TensorRT-LLM, read from the stored index, tensorrt_llm/models/medusa/):
- model.py, lines 37-90 (commit 0249976): `medusa_layers` of x + act(W x + b) and `lm_head` without bias; the heads
  are `medusa_heads` of the model, so that names are `medusa_heads.{h}.medusa_layers.{l}.linear.weight`, `.bias` and
  `medusa_heads.{h}.lm_head.weight`. The act is the *base's* `hidden_act`: only a base with SiLU runs Medusa's heads.
- weight.py, load_medusa_hf: all of them are `split` by rows over `tp_size` ranks, and rank r's tensors are in
  `rank{r}.safetensors`; model.py pads the vocabulary to a multiple of `tp_size`. Medusa's own `medusa_lm_head.pt` or
  `.safetensors` with LM heads is what it converts.
- config.py, class MedusaConfig (commit 084a884): `num_medusa_heads`, `num_medusa_layers`, `max_draft_len`: the nodes of
  the tree below the root. NVIDIA/Model-Optimizer at commit a2fbac7 writes the same: modelopt/torch/export/
  tensorrt_llm_utils.py lines 366-374, with `architecture: MedusaForCausalLM`.

The unified checkpoint of Model Optimizer: a model in the Hugging Face layout with the heads in its shards:
modelopt/torch/speculative/plugins/hf_medusa.py lines 63-80 (and export/plugins/mcore_llama.py lines 84-91):
`medusa_heads.{h}.{l}.linear.*`, `medusa_heads.{h}.{L}.weight`, config `medusa: {num_medusa_heads, num_medusa_layers}`.
Quantized ones have scales beside the weights, and are refused.

Written are the heads of a TensorRT-LLM checkpoint of tp_size 1. They are not a model: the base's tensors get their
names from TensorRT-LLM itself. Add these tensors and these keys of config.json to the base's checkpoint; or let
TensorRT-LLM's convert_checkpoint.py (--medusa_model_dir) make both from `medusa export --format medusa`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from medusa.base import Base
from medusa.checkpoint import PROVENANCE
from medusa.errors import MedusaError
from medusa.export.foreign import Foreign, from_checkpoint
from medusa.export.layout import HeadTensors, Layout
from medusa.export.merged import heads_in, is_merged, without_heads
from medusa.export.sources import CONFIG, Source, names_in, read_tensors
from medusa.files import atomic_folder, write_json
from medusa.tree import Tree

PREFIX, WEIGHTS, CHOICES = "medusa_heads.", "rank0.safetensors", "medusa_choices.json"
LAYOUT = Layout("medusa_heads.{h}.medusa_layers.{l}.linear.{part}", "medusa_heads.{h}.lm_head.weight")
UNIFIED = Layout("medusa_heads.{h}.{l}.linear.{part}", "medusa_heads.{h}.{l}.weight")
FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
)  # what MedusaConfig's two parents, LLaMA's and QWen's, read


def recognises(source: Source) -> bool:
    """Whether this is a TensorRT-LLM checkpoint with heads, or a model of Model Optimizer with heads."""
    ranks = [source.file] if source.file is not None else _ranks(source)[:1]
    if ranks and any(LAYOUT.match(name) for name in names_in(ranks[0])):
        return True
    return source.config.get("architecture") == "MedusaForCausalLM" or is_merged(source, UNIFIED)


def read(source: Source) -> Foreign:
    """Reads either kind.

    Raises:
        MedusaError: there are no heads, they are quantized, a rank's file is missing; see `Layout.read`.
    """
    if is_merged(source, UNIFIED):
        said = source.config.get("medusa")
        said = said if isinstance(said, dict) else {}
        tensors = heads_in(source, UNIFIED)
        _check_scales(tensors, source)
        return Foreign(
            format="trtllm",
            source=source.path,
            heads=UNIFIED.read(
                tensors,
                source.path,
                num_heads=source.number("num_medusa_heads", said),
                num_layers=source.number("num_medusa_layers", said),
            ),
            write_base=without_heads(source, UNIFIED, "medusa"),
        )
    tensors = _joined(source)
    _check_scales(tensors, source)
    heads = LAYOUT.read(
        tensors,
        source.path,
        num_heads=source.number("num_medusa_heads"),
        num_layers=source.number("num_medusa_layers"),
    )
    vocabulary = source.number("vocab_size")
    padded = vocabulary is not None and 0 < vocabulary < heads.lm_heads[0].shape[0]
    if padded:  # to a multiple of tp_size
        heads = HeadTensors(heads.blocks, [matrix[:vocabulary] for matrix in heads.lm_heads])
    choices = source.folder / CHOICES
    return Foreign(
        format="trtllm",
        source=source.path,
        heads=heads,
        tree=Tree.from_json(choices) if choices.is_file() else None,
        vocab_size=vocabulary,
    )


def _ranks(source: Source) -> list[Path]:
    """The folder's rank files, in the order of their ranks."""
    numbered = {
        int(m[1]): file
        for file in source.folder.glob("rank*.safetensors")
        if (m := re.fullmatch(r"rank(\d{1,6})\.safetensors", file.name))
    }
    return [numbered[number] for number in sorted(numbered)]


def _joined(source: Source) -> dict[str, torch.Tensor]:
    """The heads' tensors, put together from the ranks that hold a part of them."""
    files = [source.file] if source.file is not None else _ranks(source)
    if not files:
        raise MedusaError(f"{source.path} has no {WEIGHTS}; copy the checkpoint whole")
    parts: dict[str, list[torch.Tensor]] = {}
    for file in files:
        for name, tensor in read_tensors(file, lambda name: name.startswith(PREFIX)).items():
            parts.setdefault(name, []).append(tensor)
    mapping: Any = source.config.get("mapping")
    ways = mapping.get("tp_size", 1) if isinstance(mapping, dict) else 1
    ways = 1 if source.file is not None else ways
    for name, found in parts.items():
        if len(found) != ways:
            raise MedusaError(
                f"{source.path}: {name} is in {len(found)} rank files and {CONFIG} says tp_size {ways}; "
                "copy the checkpoint whole"
            )
        if len({(part.dim(), *part.shape[1:]) for part in found}) > 1:
            raise MedusaError(
                f"{source.path}: the ranks' parts of {name} do not fit each other; get them again"
            )
    return {name: found[0] if ways == 1 else torch.cat(found) for name, found in parts.items()}


def _check_scales(tensors: dict[str, torch.Tensor], source: Source) -> None:
    scales = sorted(name for name in tensors if "scal" in name.rpartition(".")[2])
    if scales:
        raise MedusaError(
            f"{source.path} is quantized ({scales[0]}); import the heads before they were quantized"
        )


def export(checkpoint_dir: str | os.PathLike, out_dir: str | os.PathLike, base: Base) -> Path:
    """Writes medusa heads under TensorRT-LLM's names: rank0.safetensors, config.json, medusa_choices.json.

    Args:
        checkpoint_dir: the heads.
        out_dir: a folder, which is replaced whole or not at all.
        base: the heads' base, loaded; weights are written in its dtype.

    Returns:
        `out_dir`.

    Raises:
        MedusaError: TensorRT-LLM does not run Medusa on this base; see `from_checkpoint`.
    """
    checkpoint, heads = from_checkpoint(Path(checkpoint_dir), base, "TensorRT-LLM")
    text = base.config.get_text_config()
    if text.model_type not in FAMILIES or getattr(text, "hidden_act", None) != "silu":
        raise MedusaError(
            f"{base.name} is a {text.model_type} with hidden_act {getattr(text, 'hidden_act', None)}; TensorRT-LLM "
            f"runs Medusa heads on {', '.join(FAMILIES)} with silu only; use --format vllm"
        )
    tensors = {name: tensor.clone().contiguous() for name, tensor in LAYOUT.write(heads).items()}
    with atomic_folder(out_dir) as folder:
        safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        write_json(
            folder / CONFIG,
            {
                "architecture": "MedusaForCausalLM",
                "dtype": str(heads.lm_heads[0].dtype).removeprefix("torch."),
                "hidden_size": heads.hidden_size,
                "vocab_size": heads.lm_heads[0].shape[0],
                "hidden_act": "silu",
                "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
                "max_draft_len": len(checkpoint.tree.paths),
                "num_medusa_heads": len(heads.blocks),
                "num_medusa_layers": len(heads.blocks[0]),
            },
        )
        write_json(folder / CHOICES, [list(path) for path in checkpoint.tree.paths])
        write_json(folder / PROVENANCE, checkpoint.provenance)
    return Path(out_dir)
