"""Hydra heads: sequential, head k also sees the tokens guessed before it (arXiv 2402.05109, section 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from medusa.heads.base import DraftHeads
from medusa.heads.config import HeadsConfig

# Embeddings are far smaller than last hidden states (SmolLM2: root mean square 0.11 and 1.9), so that a head
# would hardly notice the path it is given: scaled up, the same steps take head 1 from .18 to .25 top-1
# (benchmarks/NOTES.md).
PATH_RMS = 2.0


class HydraHead(nn.Module):
    """hidden + MLP([hidden; embeddings of the k tokens before]), with the MLP's last layer zero at the start.

    Each embedding is brought to a root mean square of PATH_RMS first, whatever the base's are.
    """

    def __init__(self, k: int, size: int, width: int, num_layers: int):
        super().__init__()
        self.input = nn.Linear((1 + k) * size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers - 1))
        self.output = nn.Linear(width, size)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """[..., H], [..., k, H] -> [..., H]."""
        path = F.rms_norm(path, path.shape[-1:]) * PATH_RMS
        x = F.silu(self.input(torch.cat([hidden, path.flatten(-2)], dim=-1)))
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return hidden + self.output(x)


class HydraHeads(DraftHeads):
    """One network for each head, with L hidden layers of `width` units."""

    sequential = True

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        width = config.width or config.hidden_size
        self.heads = nn.ModuleList(
            HydraHead(k, config.hidden_size, width, config.num_layers) for k in range(1, config.num_heads + 1)
        )

    def features(self, k: int, hidden: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """See `DraftHeads.features`."""
        return self.heads[k - 1](hidden, path)
