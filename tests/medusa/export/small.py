"""A small base with heads, and what other programs make of their files, written out from their sources."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from medusa.base import Base
from medusa.checkpoint import load_checkpoint, save_checkpoint
from medusa.decoding import Engine
from medusa.generation import Request, generate
from medusa.heads import HeadsConfig, MedusaHeads, build_heads
from medusa.tree import Tree

TREE = Tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
PRUNED = [3, 200, 41, 7, *range(50, 150)]  # not sorted


class Block(nn.Module):
    """What every loader calls ResBlock."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.normal_(self.linear.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


def foreign_heads(
    base: Base, heads: int = 3, layers: int = 1, repeat: bool = False, lm_head: bool = True
) -> nn.ModuleList:
    """Medusa's `medusa_head`. `repeat`: a list that holds one module L times, as in its source."""

    def blocks() -> list[nn.Module]:
        return (
            [Block(base.hidden_size)] * layers if repeat else [Block(base.hidden_size) for _ in range(layers)]
        )

    def end() -> list[nn.Module]:
        return [nn.Linear(base.hidden_size, base.vocab_size, bias=False)] if lm_head else []

    torch.manual_seed(4)
    return nn.ModuleList(nn.Sequential(*blocks(), *end()) for _ in range(heads)).requires_grad_(False)


def save_heads(folder: Path, base: Base, pruned: bool = False, scale: float = 0.1, **changes: object) -> Path:
    """Random heads of the kit as a checkpoint."""
    torch.manual_seed(1)
    values = {"kind": "medusa", "num_heads": 3, "draft_vocab_size": len(PRUNED) if pruned else None} | changes
    heads = build_heads(HeadsConfig(hidden_size=base.hidden_size, vocab_size=base.vocab_size, **values))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, scale)
        if pruned:
            heads.draft_vocab.copy_(torch.tensor(PRUNED))
    save_checkpoint(folder, heads, TREE, base=base, provenance={"base": {"name": str(base.path)}})
    return folder


def logits(heads: MedusaHeads, base: Base, hidden: torch.Tensor) -> torch.Tensor:
    """The kit's heads' logits of all tokens, [K, n, V]; minus infinity where a head cannot guess."""
    weight = base.model.get_output_embeddings().weight
    whole = torch.full((heads.config.num_heads, len(hidden), base.vocab_size), -torch.inf)
    tokens = heads.to_tokens(torch.arange(heads.config.draft_size))
    for k in range(1, heads.config.num_heads + 1):
        whole[k - 1][:, tokens] = heads.draft_logits(k, heads.features(k, hidden), weight)
    return whole


def decoded(heads: MedusaHeads, base: Base, tree: Tree = TREE) -> list[tuple[list[int], list[int]]]:
    """Greedy answers with these heads: tokens, and how many each step committed."""
    engine = Engine(base.model, heads, tree, max_length=128)
    prompts = [[0, 40, 41, 52, 60, 33], [0, 71, 90], [0, 9, 9, 9, 9]]
    requests = [Request(ids=ids, max_new_tokens=30, key=number) for number, ids in enumerate(prompts)]
    done = {item.key: item for item in generate(engine, requests, eos_ids=set())}
    return [(done[number].token_ids, list(done[number].accepted)) for number in range(len(prompts))]


def assert_same_heads(one: Path, other: Path, base: Base) -> None:
    """Two checkpoints draft and decode the same."""
    torch.manual_seed(2)
    hidden = torch.randn(40, base.hidden_size)
    first, second = load_checkpoint(one, base), load_checkpoint(other, base)
    for k in range(first.heads.config.num_heads):
        best = [logits(found.heads, base, hidden)[k].topk(4).indices for found in (first, second)]
        assert best[0].equal(best[1])
    assert decoded(first.heads, base) == decoded(second.heads, base)
