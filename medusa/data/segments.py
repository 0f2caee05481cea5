"""The base's last hidden states over conversations, cut into segments (`states.py` says what one is)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from medusa.base import Base
from medusa.data.conversations import Row
from medusa.data.template import encode_conversation

Encoded = tuple[list[int], list[tuple[int, int]]]  # a conversation's token ids and its segments' spans


@dataclass
class States:
    """Segments, one after the other.

    Attributes:
        hidden: [N, H] bf16, the state before each token.
        tokens: [N] int64.
        offsets: [S + 1] int64; segment s is [offsets[s], offsets[s + 1]).
        rows: [S], each segment's row of the data.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    offsets: torch.Tensor
    rows: list[int]


@dataclass
class Segment:
    """One segment: its row of the data, tokens [n] and hidden [n, H] bf16."""

    row: int
    tokens: torch.Tensor
    hidden: torch.Tensor


def encode(base: Base, row: Row, max_length: int | None) -> Encoded:
    """A conversation's tokens, up to the last one that counts, and its segments."""
    limit = min(max_length or base.max_length, base.max_length)
    ids, spans = encode_conversation(base.tokenizer, row["messages"], row.get("finish"), limit)
    # Before the very first token there is no state.
    spans = [(max(start, 1), stop) for start, stop in spans if stop > max(start, 1)]
    return ids[: spans[-1][1]] if spans else [], spans


@torch.no_grad()
def run(
    base: Base, encoded: dict[int, Encoded], batch_tokens: int, bar: tqdm | None = None
) -> Iterator[tuple[int, list[Segment]]]:
    """Yields (row, its segments), in batches of conversations of similar length."""
    body = base.model.get_decoder()  # not the LM head: its logits are most of the memory, and not needed
    device = base.model.device
    for batch in _batches({row: len(ids) for row, (ids, _) in encoded.items()}, batch_tokens):
        ids = [torch.tensor(encoded[row][0]) for row in batch]
        # Padded on the right, a causal model needs no mask: no token that counts sees a later one.
        padded = pad_sequence(ids, batch_first=True).to(device)
        hidden = body(input_ids=padded, use_cache=False).last_hidden_state
        for number, row in enumerate(batch):
            segments = []
            for start, stop in encoded[row][1]:
                states = hidden[number, start - 1 : stop - 1].to("cpu", torch.bfloat16, copy=True)
                segments.append(Segment(row, ids[number][start:stop], states))
            yield row, segments
        if bar is not None:
            bar.update(sum(len(part) for part in ids))


def _batches(lengths: dict[int, int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows by length, in groups whose padded size is at most `batch_tokens`; a longer row goes alone."""
    batch: list[int] = []
    for row in sorted(lengths, key=lengths.__getitem__):
        if batch and lengths[row] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def join(segments: Sequence[Segment], hidden_size: int) -> States:
    """Segments one after the other; `hidden_size` gives the shape of none at all."""
    if not segments:
        empty = torch.zeros(0, hidden_size, dtype=torch.bfloat16)
        return States(empty, torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long), [])
    lengths = torch.tensor([0, *(len(segment.tokens) for segment in segments)])
    return States(
        hidden=torch.cat([segment.hidden for segment in segments]),
        tokens=torch.cat([segment.tokens.long() for segment in segments]),
        offsets=lengths.cumsum(0),
        rows=[segment.row for segment in segments],
    )
