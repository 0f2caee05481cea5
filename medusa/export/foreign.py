"""Medusa heads between two formats: what a reader gives, and the way from there to the kit's heads and back.

What other programs call a Medusa head is always the same: L blocks of x + SiLU(W x + b), then an LM head without
bias. They differ in names, in whose LM head it is, and in whether it covers the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from medusa.base import Base
from medusa.checkpoint import Checkpoint, load_checkpoint
from medusa.errors import MedusaError
from medusa.export.layout import HeadTensors
from medusa.heads import HeadsConfig, MedusaHeads, build_heads
from medusa.tree import Tree

RECIPE = "recipes/smollm2-135m-medusa.yaml"


@dataclass(frozen=True)
class Foreign:
    """What a reader gives.

    Attributes:
        format: its name.
        source: what was read.
        files: those that hold nothing but heads.
        heads: the weights.
        base_name: the base that the source names; None if it does not.
        base_folder: where the base lies if the source brings it; used as it is.
        write_base: writes the base out of a merged model into an empty folder; None if it is no part of one.
        tree: the source's tree, if it has one.
        vocab_size: V, if the source says so.
        note: what a reader had to decide, for people; None: nothing.
    """

    format: str
    source: Path
    heads: HeadTensors
    files: tuple[Path, ...] = ()
    base_name: str | None = None
    base_folder: Path | None = None
    write_base: Callable[[Path], None] | None = None
    tree: Tree | None = None
    vocab_size: int | None = None
    note: str | None = None


@torch.no_grad()
def to_heads(foreign: Foreign, base: Base) -> MedusaHeads:
    """The kit's heads of foreign ones, for `base`, which is loaded.

    LM heads that are the base's own, row by row, become shared ones: the same guesses, one matrix to read. Those that
    `extended` filled up become pruned ones again.

    Raises:
        MedusaError: the heads are of another hidden size or vocabulary than the base's.
    """
    tensors, where = shortened(foreign.heads), foreign.source
    if tensors.hidden_size != base.hidden_size:
        raise MedusaError(
            f"{where}: the heads' hidden size is {tensors.hidden_size}, the base {base.name} has {base.hidden_size}; "
            "give the base they were trained for with --base"
        )
    weight = base.model.get_output_embeddings().weight.detach().cpu()
    _check_vocabulary(foreign, tensors.draft_vocab, base, weight.shape[0])
    rows = weight if tensors.draft_vocab is None else weight[tensors.draft_vocab]
    own = tensors.lm_heads is not None and not all(_same(one, rows) for one in tensors.lm_heads)
    # Without blocks (axolotl's default, medusa_num_layers: 0) a head is its LM head: one block that changes nothing.
    blocks = [head or [_identity(tensors)] for head in tensors.blocks]
    config = HeadsConfig(
        kind="medusa",
        num_heads=len(blocks),
        hidden_size=base.hidden_size,
        vocab_size=weight.shape[0],
        num_layers=len(blocks[0]),
        lm_head="own" if own else "shared",
        draft_vocab_size=None if tensors.draft_vocab is None else len(tensors.draft_vocab),
    )
    with torch.device("meta"):
        heads = build_heads(config)
    # clone: a file may repeat one tensor under several names, and a head's layers must not share memory.
    state = {
        f"heads.{h}.{number}.linear.{part}": tensor.clone().contiguous()
        for h, head in enumerate(blocks)
        for number, pair in enumerate(head)
        for part, tensor in zip(("weight", "bias"), pair)
    }
    if own:
        matrices = tensors.lm_heads * (len(blocks) if len(tensors.lm_heads) == 1 else 1)
        state["lm_head"] = torch.stack(matrices)
    if tensors.draft_vocab is not None:
        state["draft_vocab"] = tensors.draft_vocab.clone()
    heads.load_state_dict(state, strict=True, assign=True)
    return heads.eval().requires_grad_(False)


def _check_vocabulary(foreign: Foreign, vocab: torch.Tensor | None, base: Base, size: int) -> None:
    heads = foreign.heads
    whole = heads.lm_heads is not None and heads.draft_vocab is None
    found = heads.lm_heads[0].shape[0] if whole else foreign.vocab_size
    if found is not None and found != size:
        raise MedusaError(
            f"{foreign.source}: the heads' vocabulary has {found} tokens, the base {base.name} has {size}; "
            "give the base they were trained for with --base"
        )
    if vocab is not None and not bool(((vocab >= 0) & (vocab < size)).all()):
        raise MedusaError(
            f"{foreign.source}: the draft vocabulary holds ids outside the {size} tokens of the base {base.name}; "
            "give the base they were trained for with --base"
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two matrices hold the same numbers, whatever their dtypes."""
    return (
        one.shape == other.shape
        and torch.equal(one, other.to(one.dtype))
        and torch.equal(one.to(other.dtype), other)
    )


def _identity(tensors: HeadTensors) -> tuple[torch.Tensor, torch.Tensor]:
    size, like = tensors.hidden_size, next(tensors.tensors())
    return like.new_zeros(size, size), like.new_zeros(size)


def from_checkpoint(folder: Path, base: Base, target: str) -> tuple[Checkpoint, HeadTensors]:
    """A checkpoint's heads with LM heads over the whole vocabulary, which most formats want.

    An LM head shared with the base is written out for each head, which changes no guess. A pruned one is extended to
    all V tokens by rows that are the mean of the V' there are. No row can stand for "never": a zero row's logit is 0,
    and so above every negative one. The mean row's logit is the mean of the head's logits, which is never above the
    largest: the best guess stays the best (up to rounding), and so does every other whose logit is above the mean.

    Args:
        folder: the checkpoint.
        base: its base, loaded; the tensors get its dtype.
        target: the format's name, for messages.

    Raises:
        MedusaError: the heads are sequential, do not belong to the base, or overflow its dtype.
    """
    checkpoint = load_checkpoint(folder, base)
    heads = checkpoint.heads
    check_kind(heads.config, folder, target)
    weight = base.model.get_output_embeddings().weight.detach()
    if heads.draft_vocab is None and heads.config.vocab_size != weight.shape[0]:
        raise MedusaError(
            f"{folder} guesses among {heads.config.vocab_size} tokens and the base's LM head has {weight.shape[0]} "
            "rows; export with the base that they were trained for"
        )
    count = 1 if heads.lm_head is None else heads.config.num_heads
    matrices = [heads.draft_weight(k, weight).detach() for k in range(1, count + 1)]
    if heads.draft_vocab is not None:
        matrices = [extended(one, heads.draft_vocab, weight.shape[0]) for one in matrices]
    tensors = HeadTensors(
        blocks=[
            [(block.linear.weight.detach().cpu(), block.linear.bias.detach().cpu()) for block in head]
            for head in heads.heads
        ],
        lm_heads=[one.cpu().clone() for one in matrices],
    )
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.tensors()):
        raise MedusaError(
            f"{folder}: some weights are too large for {weight.dtype}; export in another --dtype"
        )
    return checkpoint, tensors


def check_kind(config: HeadsConfig, folder: Path, target: str) -> None:
    """Raises MedusaError: the heads are sequential, and `target` runs parallel ones only."""
    if config.kind != "medusa":
        raise MedusaError(
            f"{folder} holds {config.kind} heads, and {target} runs medusa heads only: its heads do not see the tokens "
            f"guessed before them; train some with `medusa train --recipe {RECIPE}`"
        )


def extended(rows: torch.Tensor, draft_vocab: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[V', H] -> [V, H]: the rows at their tokens' places, their mean everywhere else; see `from_checkpoint`."""
    whole = rows.double().mean(dim=0).to(rows.dtype).expand(vocab_size, -1).clone()
    whole[draft_vocab] = rows
    return whole


def shortened(heads: HeadTensors) -> HeadTensors:
    """Undoes `extended` where all LM heads are its work; else the heads as they are. The draft vocabulary is sorted.

    A row that is repeated need not be a filler: models pad their vocabulary. So it must be the mean of the rest, too.
    """
    if heads.lm_heads is None or heads.draft_vocab is not None:
        return heads
    first = heads.lm_heads[0]
    twice = (first[1:] == first[:-1]).all(dim=1).nonzero()
    if not len(twice):
        return heads
    filled = (first == first[twice[0]]).all(dim=1)
    vocab = (~filled).nonzero().flatten()
    for matrix in heads.lm_heads:
        fillers, rows = matrix[filled], matrix[vocab]
        close = len(vocab) > 0 and bool((fillers == fillers[:1]).all())
        mean = rows.double().mean(dim=0)
        if not close or not torch.allclose(
            fillers[0].double(), mean, rtol=2**-7, atol=1e-6
        ):  # bfloat16's rounding
            return heads
    return HeadTensors(heads.blocks, [matrix[vocab] for matrix in heads.lm_heads], vocab)


def remarks(config: HeadsConfig) -> list[str]:
    """What `from_checkpoint` changed, in words for people."""
    said = []
    if config.lm_head == "shared":
        said.append("the base's LM head is written out for the heads")
    if config.draft_vocab_size is not None:
        said.append(
            f"the {config.draft_vocab_size:,} tokens of the pruned vocabulary became all {config.vocab_size:,}: the "
            "rows that were not there are the mean of the others, so that each head's best guess stays the best"
        )
    return said
