"""Batches: every answer once, the same order again, targets inside the answer only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa.errors import MedusaError
from medusa.targets import MASKED
from medusa.training.batches import choose_draft_vocab, draft_lookup, make_batch, plan_epoch


@dataclass
class States:
    hidden: torch.Tensor
    tokens: torch.Tensor
    offsets: torch.Tensor
    rows: list


def states_of(lengths: list[int], seed: int = 0, vocab: int = 30) -> States:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    total = int(offsets[-1])
    tokens = torch.randint(vocab, (total,), generator=generator)
    return States(
        torch.randn(total, 4, generator=generator), tokens, offsets, [f"c{i}" for i in range(len(lengths))]
    )


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    heads=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_targets_equal_a_loop(lengths: list[int], heads: int, seed: int) -> None:
    states = states_of(lengths, seed)
    vocab = torch.tensor(sorted({0, 3, 7, *range(10, 25)}))
    batch = make_batch(states, heads, draft_lookup(vocab, 30))
    place = {int(token): i for i, token in enumerate(vocab)}
    for start, stop in zip(states.offsets[:-1].tolist(), states.offsets[1:].tolist(), strict=True):
        for i in range(start, stop):
            assert batch.reach[i] == stop - 1 - i
            for k in range(1, heads + 1):
                expected = place.get(int(states.tokens[i + k]), MASKED) if i + k < stop else MASKED
                assert batch.targets[k - 1, i] == expected


@given(
    lengths=st.lists(st.integers(1, 400), min_size=4, max_size=60),
    batch_tokens=st.integers(1, 3000),
    world=st.integers(1, 2),
    accumulation=st.integers(1, 2),
)
def test_an_epoch_holds_every_answer_once(lengths, batch_tokens, world, accumulation) -> None:
    plan = plan_epoch(
        lengths, batch_tokens=batch_tokens, seed=1, epoch=0, world=world, accumulation=accumulation
    )
    assert all(len(step) == world * accumulation for step in plan)
    assert all(batch for step in plan for batch in step)
    assert sorted(i for step in plan for batch in step for i in batch) == list(range(len(lengths)))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = list(range(10, 60))
    plan = plan_epoch(lengths, batch_tokens=200, seed=3, epoch=2)
    assert plan == plan_epoch(lengths, batch_tokens=200, seed=3, epoch=2)
    assert plan != plan_epoch(lengths, batch_tokens=200, seed=3, epoch=3)
    assert plan != plan_epoch(lengths, batch_tokens=200, seed=4, epoch=2)
    assert len(plan) == round(sum(lengths) / 200)
    totals = [sum(lengths[i] for i in batch) for step in plan for batch in step]
    assert max(totals) - min(totals) <= 2 * max(lengths)


def test_splitting_a_step_over_processes_keeps_its_answers() -> None:
    lengths = [20] * 40
    steps = plan_epoch(lengths, batch_tokens=50, seed=0, epoch=0, world=2, accumulation=2)
    single = plan_epoch(lengths, batch_tokens=200, seed=0, epoch=0)
    assert [sorted(i for batch in step for i in batch) for step in steps] == [
        sorted(step[0]) for step in single
    ]


def test_too_few_answers() -> None:
    with pytest.raises(MedusaError, match="1 answers cannot fill 2 batches"):
        plan_epoch([5], batch_tokens=10, seed=0, epoch=0, world=2)


def test_draft_vocab_is_the_most_frequent_with_the_special_ones() -> None:
    counts = torch.tensor([0, 5, 0, 9, 1, 0, 7, 0])
    assert choose_draft_vocab(counts, 4, always=[7]).tolist() == [1, 3, 6, 7]
    assert choose_draft_vocab(counts, 6, always=[7]).tolist() == [
        0,
        1,
        3,
        4,
        6,
        7,
    ]  # filled from the lowest ids
    with pytest.raises(MedusaError, match="size 9"):
        choose_draft_vocab(counts, 9)
    lookup = draft_lookup(torch.tensor([1, 3, 6, 7]), 8)
    assert lookup.tolist() == [MASKED, 0, MASKED, 1, MASKED, MASKED, 2, 3]
    assert draft_lookup(None, 8) is None


def test_rows_that_are_not_finite_are_named() -> None:
    batch_states = states_of([3, 4, 5])
    batch_states.hidden[5, 2] = torch.nan
    assert make_batch(batch_states, 2, None).nonfinite_rows() == ["c1"]
