"""Which token each head must guess at each place of an answer; shared by training and calibration."""

from __future__ import annotations

import torch

MASKED = -1  # no token to guess here


def reach_of(offsets: torch.Tensor) -> torch.Tensor:
    """How many tokens of its answer follow each token. Head k has something to guess where reach >= k.

    Args:
        offsets: [S + 1] int64, where each answer starts; the last is N.

    Returns:
        [N] int64.
    """
    ends = torch.repeat_interleave(offsets[1:], offsets.diff())
    return ends - 1 - torch.arange(len(ends))


def shifted_tokens(tokens: torch.Tensor, reach: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What each head must guess: head k at place i guesses `tokens[i + k]`, inside the answer only.

    Args:
        tokens: [N] int64; `tokens[i]` is what the base's own LM head predicts at place i.
        reach: [N] int64, of `reach_of`.
        num_heads: K.

    Returns:
        [K, N] int64 token ids, MASKED past the answer's end.
    """
    targets = torch.full((num_heads, len(tokens)), MASKED, dtype=torch.long)
    for k in range(1, min(num_heads, len(tokens) - 1) + 1):
        targets[k - 1, :-k] = torch.where(reach[:-k] >= k, tokens[k:], MASKED)
    return targets
