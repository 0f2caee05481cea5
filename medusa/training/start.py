"""The heads that a run begins with: new ones, or those of a checkpoint that learn on."""

from __future__ import annotations

from typing import Any

import torch

from medusa.base import Base
from medusa.checkpoint import Checkpoint, load_checkpoint
from medusa.errors import MedusaError
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.training.batches import choose_draft_vocab
from medusa.training.recipe import Recipe
from medusa.training.sources import token_frequencies


def first_heads(recipe: Recipe, base: Base, source: Any) -> tuple[DraftHeads, dict[str, Any] | None]:
    """Heads in float32 on the CPU, with gradients.

    New heads are the identity, and their draft vocabulary is the training answers'. Heads of a checkpoint keep theirs:
    their LM head's rows, and what they learnt, belong to it.

    Args:
        recipe: `heads` says what they are, `training.start` where they come from.
        base: what they are trained for.
        source: the training answers.

    Returns:
        The heads, and for the provenance what they were trained on before; None for new ones.

    Raises:
        MedusaError: the checkpoint cannot be loaded, is of another base, or holds heads of another shape.
    """
    wanted = HeadsConfig(
        hidden_size=base.hidden_size, vocab_size=base.vocab_size, **recipe.heads.model_dump()
    )
    if recipe.training.start is None:
        torch.manual_seed(recipe.training.seed)
        heads = build_heads(wanted)
        if wanted.draft_vocab_size is not None:
            score = token_frequencies(source, base)
            heads.draft_vocab.copy_(choose_draft_vocab(score, wanted.draft_vocab_size, base.eos_ids))
        heads.start_lm_heads(base.model.get_output_embeddings().weight)
        return heads, None
    found = load_checkpoint(recipe.training.start, base, dtype=torch.float32)
    config = found.heads.config
    other = [name for name, value in wanted.to_dict().items() if value != getattr(config, name)]
    if other:
        differences = ", ".join(
            f"{name} {getattr(config, name)}, not {getattr(wanted, name)}" for name in other
        )
        raise MedusaError(
            f"training.start {recipe.training.start}: its heads have {differences}; change `heads` in the recipe"
        )
    return found.heads.train().requires_grad_(True), _history(found)


def _history(found: Checkpoint) -> dict[str, Any]:
    """What a checkpoint was trained on, the checkpoints that it began with included."""
    kept = ("command", "data", "recipe", "training", "started_from")
    return {name: found.provenance[name] for name in kept if name in found.provenance}
