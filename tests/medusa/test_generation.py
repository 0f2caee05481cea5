import pytest
import torch

from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.generation import Request, generate
from medusa.tree import Tree
from tests.medusa.models import small_heads, small_model


def plain(ids: list[int], new: int = 30) -> list[int]:
    return next(
        generate(Engine(small_model(), max_length=128), [Request(ids=ids, max_new_tokens=new)], eos_ids=set())
    ).token_ids


@pytest.mark.parametrize("tree", [None, Tree.chain(3)])
def test_nothing_is_kept_after_the_end_of_turn(tree):
    """Untrained heads win tokens on this prompt, so the end-of-turn token falls inside a step's tokens too."""
    whole = plain([5] * 8)
    engine = Engine(small_model(), small_heads(scale=0.0), tree, max_length=128)
    for eos in sorted(set(whole)):
        done = next(generate(engine, [Request(ids=[5] * 8, max_new_tokens=30)], eos_ids={eos}))
        assert done.token_ids == whole[: whole.index(eos) + 1]
        assert done.finish == "stop"
        assert len(done.token_ids) == 1 + sum(done.accepted)
        assert len(done.from_heads) == len(done.token_ids)


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_the_length_limit_is_exact(new):
    engine = Engine(small_model(), small_heads(scale=0.0), Tree.chain(3), max_length=128)
    done = next(generate(engine, [Request(ids=[5] * 8, max_new_tokens=new)], eos_ids=set()))
    assert done.token_ids == plain([5] * 8, new)
    assert done.finish == "length"


def test_later_requests_can_be_made_from_earlier_answers():
    """A source yields None while it waits; multi-turn distillation is made this way."""
    engine = Engine(small_model(), batch=3, max_length=128)
    ready, seen = [Request(ids=[5, 6], max_new_tokens=4, key=0)], []

    def source():
        while len(seen) < 4:
            yield ready.pop() if ready else None

    for done in generate(engine, source(), eos_ids=set()):
        seen.append(done)
        ready.append(Request(ids=[5, 6, *done.token_ids], max_new_tokens=4, key=done.key + 1))
    assert [done.key for done in seen] == [0, 1, 2, 3]
    assert seen[0].token_ids + seen[1].token_ids == plain([5, 6], 8)


def test_a_source_that_waits_for_nothing_is_an_error_not_a_hang():
    with pytest.raises(MedusaError, match="stuck"):
        list(generate(Engine(small_model()), iter([None]), eos_ids=set()))


def test_rows_are_free_again_after_an_interrupt():
    engine = Engine(small_model(), batch=2, max_length=128)
    running = generate(engine, [Request(ids=[5], max_new_tokens=n) for n in (3, 60)], eos_ids=set())
    next(running)
    running.close()
    assert [
        len(done.token_ids) for done in generate(engine, [Request(ids=[7], max_new_tokens=5)], eos_ids=set())
    ] == [5]


def test_callback_sees_every_token_in_order():
    seen: dict[int, list[int]] = {0: [], 1: []}
    engine = Engine(small_model(), small_heads(scale=0.0), Tree.chain(2), batch=2, max_length=128)
    requests = [Request(ids=[5 + i] * 6, max_new_tokens=12, key=i) for i in range(2)]
    done = generate(
        engine,
        requests,
        eos_ids=set(),
        on_tokens=lambda key, pairs: seen[key].extend(token for token, _ in pairs),
    )
    assert {item.key: item.token_ids for item in done} == seen


def test_acceptance_length_counts_the_root():
    engine = Engine(small_model(), max_length=64)
    done = next(generate(engine, [Request(ids=[5], max_new_tokens=9)], eos_ids=set()))
    assert done.acceptance_length == 1.0 and len(done.accepted) == 8


@pytest.mark.parametrize(
    ("values", "says"), [({"max_new_tokens": 0}, "at least 1"), ({"stop": ("x",)}, "need the tokenizer")]
)
def test_rules_that_make_no_sense(values, says):
    with pytest.raises(MedusaError, match=says):
        list(generate(Engine(small_model()), [Request(ids=[5], **values)], eos_ids=set()))


def test_prefill_time_is_part_of_the_whole():
    done = next(generate(Engine(small_model()), [Request(ids=[5], max_new_tokens=3)], eos_ids=set()))
    assert 0 < done.prefill_seconds <= done.seconds


def test_no_gradient_is_kept():
    engine = Engine(small_model(), max_length=64)
    next(generate(engine, [Request(ids=[5], max_new_tokens=3)], eos_ids=set()))
    assert not engine.hidden.requires_grad
    assert torch.isfinite(engine.hidden).all()


@pytest.mark.parametrize("tree", [None, Tree.chain(3)])
def test_a_kept_prefix_changes_the_work_and_not_the_answers(tree, monkeypatch):
    """Second turns follow first ones in the rows that hold them; answers and states are those of a fresh engine."""
    starts = []
    plain_prefill = Engine.prefill

    def prefill(self, row, ids, *, start=0, **values):
        starts.append(start)
        return plain_prefill(self, row, ids, start=start, **values)

    monkeypatch.setattr(Engine, "prefill", prefill)
    first = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 12]]
    results = {}
    for reuse in (False, True):
        engine = Engine(small_model(), small_heads(scale=0.0), tree, batch=2, max_length=128)
        answers = {}
        for turn in range(3):
            prompts = [
                ids + [3 + turn] * turn + answers.get((turn - 1, n), []) for n, ids in enumerate(first)
            ]
            requests = [
                Request(ids=ids, max_new_tokens=9, key=n, want_hidden=True) for n, ids in enumerate(prompts)
            ]
            for done in generate(engine, requests, eos_ids=set(), reuse=reuse):
                answers[turn, done.key] = done.token_ids
                results.setdefault((turn, done.key), []).append(done)
            first = [ids + answers[turn, n] for n, ids in enumerate(first)] if turn == 0 else first
        first = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 12]]
    for without, with_reuse in results.values():
        assert without.token_ids == with_reuse.token_ids
        torch.testing.assert_close(without.hidden, with_reuse.hidden, atol=1e-5, rtol=1e-4)
    assert set(starts[:9]) == {0}
    assert max(starts[9:]) >= 10
