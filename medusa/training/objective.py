"""What a step minimises: every head's loss over one batch, as one module that accelerate can wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from medusa.errors import MedusaError
from medusa.heads import DraftHeads
from medusa.training.losses import fused_cross_entropy, plain_cross_entropy, sample_vocabulary


class Objective(nn.Module):
    """The heads with the parts of the base that they need; the base's weights are no parameters of it.

    Args:
        heads: trained.
        base: a `medusa.base.Base`; its input embeddings and LM head are read, frozen.
        loss: `"cross_entropy"` (fused), `"sampled_cross_entropy"` (fused, over a part of the vocabulary for
            each batch; in training mode only) or `"plain_cross_entropy"`. See `medusa.training.losses`.
        sampled: how many tokens that are no target of the batch the sampled loss takes.
        head_decay: head k's mean loss weighs head_decay ** k (arXiv 2401.10774, section 2.2.1).
    """

    def __init__(
        self,
        heads: DraftHeads,
        base: Any,
        *,
        loss: str = "cross_entropy",
        sampled: int = 1024,
        head_decay: float = 0.8,
    ):
        super().__init__()
        self.heads = heads
        lm_head = base.model.get_output_embeddings()
        if getattr(lm_head, "bias", None) is not None:
            raise MedusaError(f"base {base.name}: its LM head has a bias, which draft heads do not carry")
        # In a tuple, so that they are not registered: nothing trains, saves or broadcasts them.
        self._base = (base.model.get_input_embeddings(), lm_head.weight.detach())
        self._loss, self._sampled, self._head_decay = loss, sampled, head_decay
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
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(next(heads.parameters()).dtype)
        with torch.no_grad():
            embedded = embed(tokens).to(hidden.dtype) if heads.sequential else None
        losses = self._losses(targets, lm_head)
        total, sums = hidden.new_zeros((), dtype=torch.float32), []
        for k in range(1, heads.config.num_heads + 1):
            rows = (targets[k - 1] >= 0).nonzero().flatten()
            places = rows[:, None] + torch.arange(k, device=rows.device)
            path = embedded[places] if embedded is not None else None
            loss = losses(k, heads.features(k, hidden[rows], path), targets[k - 1, rows])
            total = total + self._head_decay**k * loss / counts[k - 1].clamp(min=1)
            sums.append(loss.detach())
        return total, torch.stack(sums)

    def _losses(
        self, targets: torch.Tensor, lm_head: torch.Tensor
    ) -> Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]:
        """(k, features [n, H], targets [n]) -> the sum of head k's loss, for the heads of one batch."""
        heads, sample, frozen = self.heads, None, None
        if self._loss == "sampled_cross_entropy" and self.training:
            sample = sample_vocabulary(targets, heads.config.draft_size, self._sampled)
        if heads.lm_head is None:  # all heads share one matrix, gathered and turned once for all of them
            weight = heads.draft_weight(1, lm_head)
            if sample is None:
                frozen = weight, self._turned_weight(weight)
            else:
                frozen = weight[sample.ids], weight[sample.ids].t().contiguous()

        def loss_of(k: int, features: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            if frozen is not None:
                weight, turned = frozen
            else:
                weight, turned = heads.draft_weight(k, lm_head), None
                weight = weight if sample is None else weight[sample.ids]
            if self._loss == "plain_cross_entropy":
                return plain_cross_entropy(features, weight, wanted)
            if sample is None:
                return fused_cross_entropy(features, weight, wanted, turned=turned)
            places = sample.places[wanted]
            return fused_cross_entropy(features, weight, places, turned=turned, bias=sample.bias)

        return loss_of

    def _turned_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """[H, V'] contiguous copy of a frozen LM head, made once."""
        key = (weight.data_ptr(), weight.dtype, weight.shape)
        if self._turned is None or self._turned[0] != key:
            self._turned = (key, weight.t().contiguous())
        return self._turned[1]
