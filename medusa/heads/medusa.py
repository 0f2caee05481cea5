"""Medusa heads: parallel, each sees the base's hidden state only (arXiv 2401.10774, section 2.1.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from medusa.heads.base import DraftHeads
from medusa.heads.config import HeadsConfig


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), with W and b zero at the start, so that the block is the identity."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        return x + F.silu(self.linear(x))


class MedusaHeads(DraftHeads):
    """K heads of L residual blocks each."""

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        # A comprehension, never `[block] * L`: that repeats one module, and its L layers share one weight.
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )

    def features(self, k: int, hidden: torch.Tensor, path: torch.Tensor | None = None) -> torch.Tensor:
        """See `DraftHeads.features`; the path is ignored."""
        return self.heads[k - 1](hidden)
