"""Heads out of vLLM's format; `vllm.py` writes it, and says what it is and where that stands.

Read here, from vLLM 0.32.0 as well:
- vllm/model_executor/models/medusa.py lines 62-92: `blocks.{h}.layers.{l}.weight`, `.bias` with `medusa_fc_bias`; one
  `lm_head.weight` with `original_lm_head`, else `lm_heads.{h}.weight`; lines 171-173 and 182-188: `token_map` counts
  only if `truncated_vocab_size` is below `vocab_size`, and a whole LM head is then cut by it.
- vllm/transformers_utils/configs/medusa.py lines 49-54: any key with "num" and "heads" in it is `num_heads`, any with
  "num" and "layers" `num_hidden_layers`, the last one in the file.

A tensor that vLLM would leave out (medusa.py lines 174-180) is an error here. `logit_scale` (line 94) changes no guess,
and is not read. The tree is a chain, which is what vLLM walks.
"""

from __future__ import annotations

from typing import Any

import torch

from medusa.errors import MedusaError
from medusa.export.foreign import Foreign
from medusa.export.layout import HeadTensors, Layout
from medusa.export.sources import CONFIG, Source
from medusa.tree import Tree

TOKEN_MAP = "token_map"
OWN = Layout("blocks.{h}.layers.{l}.{part}", "lm_heads.{h}.weight")
ONE = Layout("blocks.{h}.layers.{l}.{part}", "lm_head.weight")


def recognises(source: Source) -> bool:
    """Whether this is a Medusa model of vLLM."""
    config = source.config
    if config.get("model_type") == "medusa" or "MedusaModel" in (config.get("architectures") or ()):
        return True
    return source.file is not None and any(name.startswith("blocks.") for name in source.names())


def read(source: Source) -> Foreign:
    """Reads a Medusa model of vLLM.

    Raises:
        MedusaError: there is none; the token map does not fit the configuration; see `Layout.read`.
    """
    if not source.shards:
        raise MedusaError(f"{source.path} has no model.safetensors; copy the heads again")
    tensors = source.tensors()
    config = _as_vllm_reads(source.config)
    vocabulary, rows = source.number("vocab_size"), source.number("truncated_vocab_size")
    token_map = tensors.pop(TOKEN_MAP, None)
    pruned = rows is not None and vocabulary is not None and rows < vocabulary
    if pruned != (token_map is not None):
        has = "holds a token_map" if token_map is not None else "holds no token_map"
        raise MedusaError(
            f"{source.path} {has}, and config.json says vocab_size {vocabulary} and truncated_vocab_size {rows}; "
            "set it right, or vLLM guesses other tokens"
        )
    if token_map is not None:
        _check_map(token_map, rows, vocabulary, source)
    one = bool(source.config.get("original_lm_head")) or (not source.config and "lm_head.weight" in tensors)
    if token_map is not None and not one:
        raise MedusaError(
            f"{source.path} has own LM heads over a pruned vocabulary, for which vLLM has no place; get heads with "
            "original_lm_head, or whole ones"
        )
    biases = bool(source.config.get("medusa_fc_bias")) or not source.config
    if not biases and any(name.endswith(".bias") for name in tensors):
        raise MedusaError(
            f"{source.path} holds biases, which vLLM leaves out without a word unless {CONFIG} says "
            '"medusa_fc_bias": true; set it'
        )
    found = (ONE if one else OWN).read(
        tensors,
        source.path,
        num_heads=source.number("num_heads", config),
        num_layers=source.number("num_hidden_layers", config),
        biases=biases,
    )
    if token_map is not None:
        lm_heads = [_cut(matrix, token_map) for matrix in found.lm_heads]
        found = HeadTensors(found.blocks, lm_heads, token_map.long())
        if lm_heads[0].shape[0] != len(token_map):
            raise MedusaError(
                f"{source.path}: lm_head.weight has {lm_heads[0].shape[0]} rows and the token_map {len(token_map)}; "
                "get the whole file"
            )
    return Foreign(
        format="vllm",
        source=source.path,
        files=tuple(source.shards),
        heads=found,
        tree=Tree.chain(len(found.blocks)),
        vocab_size=vocabulary,
    )


def _as_vllm_reads(config: dict[str, Any]) -> dict[str, Any]:
    values = dict(config)
    for name in config:
        if "num" in name and "heads" in name:
            values["num_heads"] = config[name]
        elif "num" in name and "layers" in name:
            values["num_hidden_layers"] = config[name]
    return values


def _check_map(token_map: torch.Tensor, rows: int | None, vocabulary: int | None, source: Source) -> None:
    whole = token_map.dim() == 1 and not token_map.is_floating_point() and len(token_map) == rows
    if (
        not whole
        or len(token_map.unique()) != rows
        or not bool(((token_map >= 0) & (token_map < vocabulary)).all())
    ):
        raise MedusaError(
            f"{source.path}: token_map must hold {rows} distinct token ids below {vocabulary}; get the whole file"
        )


def _cut(matrix: torch.Tensor, token_map: torch.Tensor) -> torch.Tensor:
    whole = matrix.shape[0] > max(len(token_map), int(token_map.max()))
    return matrix[token_map.long()] if whole else matrix
