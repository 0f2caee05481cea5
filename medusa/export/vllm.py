"""Medusa heads as vLLM loads them, for `vllm serve BASE --speculative-config` with method medusa and this folder.

Read from vLLM 0.32.0, vllm/model_executor/models/medusa.py, which is the only place that says what the format is:

- lines 19-38: a head is `layers` of x + SiLU(W x + b), and has b only if the config says `medusa_fc_bias`; a bias in
  the file would otherwise be left out without a word, as every tensor of an unknown name is (lines 167-180).
- lines 75-92: with `original_lm_head` all heads share one matrix, `lm_head.weight`; it is never the base's own, so it
  is written out. Without it each head has `lm_heads.K.weight`, always over the whole vocabulary.
- lines 107-137, 171-173: `token_map` [V'] says which tokens the rows of a pruned matrix stand for; it is read only if
  `truncated_vocab_size` is below `vocab_size`.

and from what stands around it:

- transformers_utils/configs/medusa.py, lines 48-53: any key with "num" and "heads" in it becomes `num_heads`, any with
  "num" and "layers" `num_hidden_layers`; so the config holds one of each and nothing beside them.
- config/speculative.py, lines 1319-1324: a `vocab_size` unlike the base's is replaced, and the pruning with it. Lines
  1452-1457: `num_speculative_tokens` is how many heads are made; the others are left out.
- model_executor/model_loader/default_loader.py, lines 507-517 and 562-567: the loader checks that every parameter was
  loaded, and `load_weights` does not count `token_map` among them (lines 171-173, 202), so that heads with a pruned
  vocabulary stop it: "not initialized from checkpoint: {'token_map'}". `LOADER` turns that check off.

vLLM walks the chain of each head's best token; a tree has no place in the format.
"""

from __future__ import annotations

import os
from pathlib import Path

import safetensors.torch
import torch

from medusa.base import Base
from medusa.checkpoint import PROVENANCE, load_checkpoint
from medusa.errors import MedusaError
from medusa.files import atomic_folder, write_json
from medusa.heads import MedusaHeads

WEIGHTS = "model.safetensors"
# For vLLM 0.32's --model-loader-extra-config, `model_loader_extra_config` of vllm.LLM, where heads have a token map.
LOADER = {"enable_weights_track": False}


def export_vllm(checkpoint_dir: str | os.PathLike, out_dir: str | os.PathLike, base: Base) -> Path:
    """Writes a checkpoint's medusa heads in vLLM's format: config.json, model.safetensors, and where they come from.

    Args:
        checkpoint_dir: the heads.
        out_dir: a folder, which is replaced whole or not at all.
        base: the heads' base, loaded: its LM head is written out where the heads share it. Weights are written in its
            dtype.

    Returns:
        `out_dir`.

    Raises:
        MedusaError: the heads are not of a kind that vLLM runs, do not belong to the base, or cannot be written.
    """
    checkpoint = load_checkpoint(checkpoint_dir, base)
    heads, config = checkpoint.heads, checkpoint.heads.config
    if not isinstance(heads, MedusaHeads):
        raise MedusaError(
            f"{checkpoint_dir} holds {config.kind} heads, and vLLM runs medusa heads only; "
            "train some with `medusa train` and a recipe of kind medusa"
        )
    if heads.lm_head is not None and heads.draft_vocab is not None:
        raise MedusaError(
            f"{checkpoint_dir}: vLLM has no place for own LM heads over a pruned vocabulary; "
            "train heads with lm_head=shared, or without draft_vocab_size"
        )
    vocabulary = base.config.get_text_config().vocab_size
    # A draft vocabulary of all tokens is none to vLLM, which then reads no token map.
    pruned = heads.draft_vocab is not None and config.draft_size < vocabulary
    if not pruned and config.vocab_size != vocabulary:
        raise MedusaError(
            f"{checkpoint_dir} guesses among {config.vocab_size} tokens and the base's config.json says {vocabulary}, "
            "which is what vLLM takes; train heads with a draft_vocab_size"
        )
    lm_head = base.model.get_output_embeddings().weight
    target = Path(out_dir)
    with atomic_folder(target) as folder:
        safetensors.torch.save_file(
            _tensors(heads, lm_head, pruned), folder / WEIGHTS, metadata={"format": "pt"}
        )
        write_json(
            folder / "config.json",
            {
                "model_type": "medusa",
                "architectures": ["MedusaModel"],
                "dtype": str(lm_head.dtype).removeprefix("torch."),
                "hidden_size": config.hidden_size,
                "num_heads": config.num_heads,
                "num_hidden_layers": config.num_layers,
                "medusa_fc_bias": True,
                "vocab_size": vocabulary,
                "truncated_vocab_size": config.draft_size,
                "original_lm_head": heads.lm_head is None,
            },
        )
        write_json(folder / PROVENANCE, checkpoint.provenance)
    return target


def _tensors(heads: MedusaHeads, base_lm_head: torch.Tensor, pruned: bool) -> dict[str, torch.Tensor]:
    """The heads' tensors under vLLM's names, and the LM head that they read.

    Args:
        heads: K heads of L blocks.
        base_lm_head: [V, H], the base's.
        pruned: whether the heads guess among V' < V tokens.
    """
    tensors = {}
    for k, head in enumerate(heads.heads):
        for number, block in enumerate(head):
            tensors[f"blocks.{k}.layers.{number}.weight"] = block.linear.weight  # [H, H]
            tensors[f"blocks.{k}.layers.{number}.bias"] = block.linear.bias  # [H]
    if heads.lm_head is not None:
        tensors |= {f"lm_heads.{k}.weight": weight for k, weight in enumerate(heads.lm_head)}  # [V, H] each
    elif pruned:
        tensors |= {
            "lm_head.weight": base_lm_head[heads.draft_vocab],
            "token_map": heads.draft_vocab,
        }  # V' rows
    else:
        tensors["lm_head.weight"] = base_lm_head  # [V, H]
    # clone: safetensors refuses tensors that share memory, as the rows of one parameter do
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
