"""What a step minimises: every head's loss over one batch, as one module that accelerate can wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from medusa.errors import MedusaError
from medusa.heads import DraftHeads
from medusa.training.losses import HeadLoss, fused_cross_entropy, plain_cross_entropy

LOSSES: dict[str, HeadLoss] = {
    "cross_entropy": fused_cross_entropy,
    "plain_cross_entropy": plain_cross_entropy,
}


class Objective(nn.Module):
    """The heads with the parts of the base that they need; the base's weights are no parameters of it.

    Args:
        heads: trained.
        base: a `medusa.base.Base`; its input embeddings and LM head are read, frozen.
        loss: a key of LOSSES.
        head_decay: head k's mean loss weighs head_decay ** k (arXiv 2401.10774, section 2.2.1).
    """

    def __init__(self, heads: DraftHeads, base: Any, *, loss: str = "cross_entropy", head_decay: float = 0.8):
        super().__init__()
        self.heads = heads
        lm_head = base.model.get_output_embeddings()
        if getattr(lm_head, "bias", None) is not None:
            raise MedusaError(f"base {base.name}: its LM head has a bias, which draft heads do not carry")
        # In a tuple, so that they are not registered: nothing trains, saves or broadcasts them.
        self._base = (base.model.get_input_embeddings(), lm_head.weight.detach())
        self._loss = LOSSES[loss]
        self._fused = self._loss is fused_cross_entropy
        self._head_decay = head_decay
        self._turned: tuple[tuple, torch.Tensor] | None = None

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted loss of one batch.

        Args:
            hidden: [N, H], any float dtype.
            tokens: [N] int64; sequential heads are shown the true tokens (teacher forcing).
            targets: [K, N] int64 draft ids, -1 where masked. See `medusa.training.batches.Batch`.
            counts: [K] unmasked targets of the whole optimiser step, all its batches and processes: what sums
                are divided by, so that the step does not depend on how its tokens were split. 0 is safe.

        Returns:
            float32 scalar sum_k head_decay^k * sum_k / counts_k, and the detached sums [K].
        """
        embed, lm_head = self._base
        heads = self.heads
        hidden = (
            hidden.to(next(heads.parameters()).dtype)
            if not torch.is_autocast_enabled(hidden.device.type)
            else hidden
        )
        with torch.no_grad():
            embedded = embed(tokens).to(hidden.dtype) if heads.sequential else None
        total, sums = hidden.new_zeros((), dtype=torch.float32), []
        for k in range(1, heads.config.num_heads + 1):
            rows = (targets[k - 1] >= 0).nonzero().flatten()
            steps = torch.arange(k, device=rows.device)
            path = embedded[rows[:, None] + steps] if embedded is not None else None
            features = heads.features(k, hidden[rows], path)
            weight = heads.draft_weight(k, lm_head)
            wanted = targets[k - 1, rows]
            if self._fused:
                loss = fused_cross_entropy(features, weight, wanted, self._turned_weight(weight))
            else:
                loss = self._loss(features, weight, wanted)
            total = total + self._head_decay**k * loss / counts[k - 1].clamp(min=1)
            sums.append(loss.detach())
        return total, torch.stack(sums)

    def _turned_weight(self, weight: torch.Tensor) -> torch.Tensor | None:
        """[H, V'] contiguous copy of a frozen LM head, made once."""
        if weight.requires_grad:
            return None
        key = (weight.data_ptr(), weight.dtype, weight.shape)
        if self._turned is None or self._turned[0] != key:
            self._turned = (key, weight.t().contiguous())
        return self._turned[1]
