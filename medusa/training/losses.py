"""The loss of one head: the obvious one, and the fast ones that are tested against it.

The LM head decides what training costs: [rows, V'] logits for every head, of which only [rows, H] gradients
are wanted. Cross-entropy's gradient has a closed form, so `fused_cross_entropy` computes loss *and* gradient
chunk by chunk during the forward pass: no logits outlive their chunk and the backward pass is one
multiplication. Where the product itself is what takes the time, `sample_vocabulary` says which columns of it
a batch can do with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

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
        bias: torch.Tensor | None,
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
            log_p = torch.log_softmax(F.linear(features[rows], weight, bias), dim=-1, dtype=torch.float32)
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
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        features_grad, weight_grad = ctx.saved_tensors
        if features_grad is not None:
            features_grad = features_grad * upstream.to(features_grad.dtype)
        if weight_grad is not None:
            weight_grad = (weight_grad * upstream).to(ctx.weight_dtype)
        return features_grad, weight_grad, None, None, None


def fused_cross_entropy(
    features: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    turned: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`plain_cross_entropy` with at most CHUNK_ROWS x V' logits alive, and no second pass in backward.

    Under autocast the matrix products run in its dtype; softmax and sums are float32 always. A frozen weight
    costs no gradient.

    Args:
        features, weight, targets: as for `plain_cross_entropy`.
        turned: [H, V'] contiguous `weight.T` of the products' dtype, if the caller keeps one (a frozen LM
            head).
        bias: [V'] added to the logits, without gradient; see `Sample.bias`.
    """
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
    features, weight = features.to(dtype), weight.to(dtype)
    turned, bias = (None if value is None else value.to(dtype) for value in (turned, bias))
    with torch.autocast(device, enabled=False):
        return _FusedCrossEntropy.apply(features, weight, targets, turned, bias)


@dataclass(frozen=True)
class Sample:
    """A part of the draft vocabulary that stands for the whole of it in one batch.

    Attributes:
        ids: [S] int64 draft ids: every target of the batch, then a random choice of the others.
        bias: [S] float32, what to add to the logits: 0 for targets, log(others / chosen) for the others, so
            that the chosen ones stand for those left out. The softmax's denominator is then unbiased.
        places: [V'] int64, draft id -> its place in `ids`, -1 for those left out.
    """

    ids: torch.Tensor
    bias: torch.Tensor
    places: torch.Tensor


def sample_vocabulary(targets: torch.Tensor, size: int, others: int) -> Sample:
    """Draws from torch's global generator which draft ids a batch's logits are computed for.

    Sampled softmax (arXiv 1412.2007) with the batch's own targets as the candidates that are always there:
    they are the frequent tokens, which hold nearly all of the probability, and few (some 300 of 8,192 in
    1,000 rows).

    Args:
        targets: [...] int64 draft ids, negative where masked.
        size: V'.
        others: how many ids to choose among those that are no target here.
    """
    device = targets.device
    wanted = torch.zeros(size, dtype=torch.bool, device=device)
    wanted[targets[targets >= 0]] = True
    rest = (~wanted).nonzero().flatten()
    chosen = rest[torch.randperm(len(rest), device=device)[:others]]
    known = wanted.nonzero().flatten()
    ids = torch.cat([known, chosen])
    bias = torch.zeros(len(ids), device=device)
    if len(chosen):
        bias[len(known) :] = math.log(len(rest) / len(chosen))
    places = torch.full((size,), -1, dtype=torch.long, device=device)
    places[ids] = torch.arange(len(ids), device=device)
    return Sample(ids, bias, places)
