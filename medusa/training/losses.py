"""The loss of one head: the obvious one, and the fast one that is tested against it.

The LM head decides what training costs: [rows, V'] logits for every head, of which only [rows, H] gradients
are wanted. Cross-entropy's gradient has a closed form, so `fused_cross_entropy` computes loss *and* gradient
chunk by chunk during the forward pass: no logits outlive their chunk and the backward pass is one
multiplication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# (features [n, H], weight [V', H], targets [n] int64) -> float32 scalar: the sum over rows, differentiable.
HeadLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

CHUNK_ROWS = 256  # 8 MB of float32 logits at V' = 8192: fits the caches of a core, and fills a matrix product


def plain_cross_entropy(features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over rows of -log softmax(features @ weight.T)[target].

    Args:
        features: [n, H] of any float dtype.
        weight: [V', H].
        targets: [n] int64 in [0, V').

    Returns:
        float32 scalar; 0 for no rows.
    """
    logits = F.linear(features, weight.to(features.dtype)).float()
    return F.cross_entropy(logits, targets, reduction="sum")


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        turned: torch.Tensor | None,
    ) -> torch.Tensor:
        needs_features, needs_weight = ctx.needs_input_grad[:2]
        if turned is None and needs_features:
            # F.linear on a contiguous [H, V'] copy: plain `@` on bf16 misses oneDNN's fast path on some CPUs.
            turned = weight.t().contiguous()
        loss = features.new_zeros((), dtype=torch.float32)
        features_grad = torch.empty_like(features) if needs_features else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, len(features), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            wanted = targets[rows, None]
            log_p = torch.log_softmax(F.linear(features[rows], weight), dim=-1, dtype=torch.float32)
            loss -= log_p.gather(1, wanted).sum()
            if not (needs_features or needs_weight):
                continue
            # d loss / d logits = softmax - one-hot, written over the log-probabilities.
            gradient = log_p.exp_().scatter_add_(1, wanted, log_p.new_full(wanted.shape, -1.0))
            gradient = gradient.to(features.dtype)
            if features_grad is not None:
                features_grad[rows] = F.linear(gradient, turned)
            if weight_grad is not None:
                weight_grad += (gradient.t() @ features[rows]).float()
        ctx.save_for_backward(features_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(
        ctx: Any, upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        features_grad, weight_grad = ctx.saved_tensors
        if features_grad is not None:
            features_grad = features_grad * upstream.to(features_grad.dtype)
        if weight_grad is not None:
            weight_grad = (weight_grad * upstream).to(ctx.weight_dtype)
        return features_grad, weight_grad, None, None


def fused_cross_entropy(
    features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, turned: torch.Tensor | None = None
) -> torch.Tensor:
    """`plain_cross_entropy` with at most CHUNK_ROWS x V' logits alive, and no second pass in backward.

    Under autocast the matrix products run in its dtype; softmax and sums are float32 always. A frozen weight
    costs no gradient.

    Args:
        features, weight, targets: as for `plain_cross_entropy`.
        turned: [H, V'] contiguous `weight.T` of the products' dtype, if the caller keeps one (a frozen LM
            head).
    """
    device = features.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        features, weight = features.to(dtype), weight.to(dtype)
    else:
        weight = weight.to(features.dtype)
    if turned is not None and turned.dtype != features.dtype:
        turned = turned.to(features.dtype)
    with torch.autocast(device, enabled=False):
        return _FusedCrossEntropy.apply(features, weight, targets, turned)
