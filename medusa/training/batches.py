"""From cached answers to batches: which segments make a batch, and which token each head must guess.

A *segment* is one assistant turn (see `medusa.data.states`): `hidden[i]` is the state before `tokens[i]`, so
the base's own LM head predicts `tokens[i]` and head k predicts `tokens[i + k]`, inside the segment only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from medusa.errors import MedusaError
from medusa.targets import MASKED, reach_of, shifted_tokens


@dataclass(frozen=True)
class Batch:
    """Rows of whole segments laid end to end.

    Attributes:
        hidden: [N, H], the base's last hidden states.
        tokens: [N] int64; also the root and the true path that a sequential head is shown.
        targets: [K, N] int64 draft ids; MASKED where the segment has ended or the token is not in the draft
            vocabulary.
        reach: [N] int64; how many tokens of the segment follow this one. Head k has an answer where reach >=
            k.
        rows: conversation ids of the segments.
        offsets: [S + 1] int64; where each segment starts.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    targets: torch.Tensor
    reach: torch.Tensor
    rows: list[Any]
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def nonfinite_rows(self) -> list[Any]:
        """Conversation ids of the segments that hold a NaN or an infinity."""
        bad = ~torch.isfinite(self.hidden).all(dim=-1)
        spans = zip(self.rows, self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)
        return [row for row, start, stop in spans if bool(bad[start:stop].any())]


def make_batch(states: Any, num_heads: int, lookup: torch.Tensor | None) -> Batch:
    """Targets for states as `StatesCache.get` and `OnlineStates.get` return them.

    Args:
        states: hidden [N, H], tokens [N], offsets [S + 1], rows.
        num_heads: K.
        lookup: [V] int64, token id -> draft id or MASKED (see `draft_lookup`); None: the vocabulary is whole.
    """
    offsets = states.offsets.long()
    reach = reach_of(offsets)
    targets = shifted_tokens(states.tokens, reach, num_heads)
    if lookup is not None:
        targets = torch.where(targets >= 0, lookup[targets.clamp(min=0)], MASKED)
    return Batch(states.hidden, states.tokens, targets, reach, list(states.rows), offsets)


def plan_epoch(
    lengths: Iterable[int], *, batch_tokens: int, seed: int, epoch: int, world: int = 1, accumulation: int = 1
) -> list[list[list[int]]]:
    """An epoch's batches: [steps][accumulation * world] lists of segment ids; rank r takes every world-th
    from r.

    A function of its arguments only, so that a resumed run sees the very same batches. Every segment comes
    exactly once, and the batches of an epoch hold about the same number of tokens each, so that no step
    stands on a remainder.

    Args:
        lengths: tokens of each segment.
        batch_tokens: tokens wanted in a batch.
        seed, epoch: what the order depends on.
        world: processes.
        accumulation: batches of one process for one optimiser step.

    Raises:
        MedusaError: fewer segments than batches in one step.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    group = world * accumulation
    if len(lengths) < group:
        raise MedusaError(
            f"training: {len(lengths)} answers cannot fill {group} batches a step; "
            "use more data, fewer processes or less gradient accumulation"
        )
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    steps = max(1, min(round(int(lengths.sum()) / (batch_tokens * group)), len(lengths) // group))
    pieces = steps * group
    ends = np.cumsum(lengths[order])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, pieces) / pieces) + 1
    # Every batch has at least one segment, however long its neighbours are.
    for i in range(len(cuts)):
        cuts[i] = min(max(cuts[i], (cuts[i - 1] if i else 0) + 1), len(lengths) - (pieces - 1 - i))
    # Sorted inside a batch: reads of the memory map go forwards.
    batches = [sorted(piece.tolist()) for piece in np.split(order, cuts)]
    return [batches[step * group : (step + 1) * group] for step in range(steps)]


def choose_draft_vocab(frequencies: torch.Tensor, size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """The most frequent answer tokens, in ascending order: [V'] int64 token ids.

    Ties, and places left when fewer tokens occur than fit, go to the lowest ids: byte-pair vocabularies are
        numbered by merge order, so these are the most frequent ones of the tokenizer's own corpus.

    Args:
        frequencies: [V] how often each token occurs, or is expected to; see `token_frequencies`.
        size: V'.
        always: ids to keep whatever their count (end-of-turn and end-of-text).

    Raises:
        MedusaError: `size` is not between the number of `always` ids and V.
    """
    always = sorted(set(always))
    if not len(always) <= size <= len(frequencies):
        raise MedusaError(
            f"draft vocabulary: size {size} must lie between {len(always)} and {len(frequencies)}"
        )
    score = frequencies.double().clone()
    score[always] = torch.inf
    kept = torch.sort(score, descending=True, stable=True).indices[:size]
    return kept.sort().values


def draft_lookup(draft_vocab: torch.Tensor | None, vocab_size: int) -> torch.Tensor | None:
    """[V'] token ids -> [V] draft ids, MASKED for a token that heads do not know; None if they know all."""
    if draft_vocab is None:
        return None
    lookup = torch.full((vocab_size,), MASKED, dtype=torch.long)
    lookup[draft_vocab] = torch.arange(len(draft_vocab))
    return lookup
