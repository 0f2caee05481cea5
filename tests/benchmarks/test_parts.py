"""The parts of a step are the whole of it, each call counts for one part, and nothing stays wrapped."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import parts
from benchmarks.parts import PARTS, REST, PartClock
from medusa import step
from medusa.cost import bushy_tree
from medusa.decoding import Engine
from medusa.step import Body
from medusa.tree import Tree
from tests.medusa.models import small_heads, small_model


@pytest.fixture
def ticking(monkeypatch):
    """Every look at the clock finds it one second later."""
    seconds = itertools.count()
    monkeypatch.setattr(parts.time, "perf_counter", lambda: float(next(seconds)))


def test_a_part_stands_still_while_another_one_runs_inside_it(ticking):
    clock = PartClock()
    with clock.part("base"):  # one second to the next look, three inside, and one to the end
        with clock.part("mask"):
            pass
    found = clock.take(5.0)
    assert found["base"] == 2.0
    assert found["mask"] == 1.0
    assert found[REST] == 2.0
    assert sum(found.values()) == 5.0
    assert sum(clock.take(0.0).values()) == 0.0  # taken once


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_part_of_a_step_is_seen_and_they_sum_to_the_whole(kind, batch):
    model, heads = small_model(), small_heads(kind)
    engine = Engine(model, heads, bushy_tree(8, 3), batch=batch)
    for row in range(batch):
        engine.prefill(row, [5, 6, 7])
    clock = PartClock()
    with clock.installed(model):
        engine.step()
    found = clock.take(100.0)
    assert tuple(found) == PARTS
    assert sum(found.values()) == pytest.approx(100.0)
    assert all(seconds > 0 for seconds in found.values())
    assert found[REST] > 50  # the whole was far longer than the step


def test_plain_decoding_spends_next_to_nothing_on_heads():
    model = small_model()
    engine = Engine(model, None, Tree())
    engine.prefill(0, [5, 6, 7])
    clock = PartClock()
    with clock.installed(model):
        engine.step()
    found = clock.take(1.0)
    assert found["base"] > found["heads"]


def test_the_clock_changes_no_token_and_leaves_nothing_behind():
    model, heads = small_model(), small_heads("hydra")
    before = (step.draft, step.commit, Body.forward, model.get_output_embeddings().forward)

    def tokens(clock: PartClock | None) -> list:
        engine = Engine(model, heads, bushy_tree(8, 3))
        engine.prefill(0, [5, 6, 7])
        if clock is None:
            return [engine.step().tokens.tolist() for _ in range(6)]
        with clock.installed(model):
            return [engine.step().tokens.tolist() for _ in range(6)]

    assert tokens(PartClock()) == tokens(None)
    assert (step.draft, step.commit, Body.forward) == before[:3]
    assert "forward" not in model.get_output_embeddings().__dict__


def test_the_clock_comes_off_after_an_error():
    model = small_model()
    forward = Body.forward
    with pytest.raises(RuntimeError, match="stop"), PartClock().installed(model):
        assert Body.forward is not forward
        raise RuntimeError("stop")
    assert Body.forward is forward
