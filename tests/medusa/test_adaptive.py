"""Which tree is chosen, on made-up costs and answers whose best choice can be said beforehand."""

import pytest

from medusa.adaptive import MARGIN, AdaptiveTrees, Share
from medusa.calibration import Calibration
from medusa.cost import CostModel, StepCost
from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.tree import Tree
from tests.medusa.models import small_heads, small_model
from tests.medusa.test_decoding import answers, greedy, prompts

CALIBRATION = Calibration.from_accuracies([[0.6, 0.15, 0.05]] * 3)
WIDTHS = (1, 2, 4, 8, 16)


def costs(slope: float = 0.03, batches: tuple[int, ...] = (1, 8)) -> CostModel:
    """A node more takes `slope` of a plain step more, times the rows."""

    def curve(batch: int) -> list[StepCost]:
        times = {width: 0.1 * (1 + slope * batch * (width - 1)) for width in WIDTHS}
        return [StepCost(width, time, time, time) for width, time in times.items()]

    return CostModel({batch: curve(batch) for batch in batches})


def policy(**values) -> AdaptiveTrees:
    return AdaptiveTrees.from_calibration(CALIBRATION, costs(**values), WIDTHS)


def run(trees: AdaptiveTrees, steps: int, share: float, rows=(0,), count: int = 1) -> list[int]:
    """Widths chosen while every step accepts `share` of what the calibration expects."""
    widths = []
    for _ in range(steps):
        tree = trees.choose(rows, count)
        widths.append(tree.width)
        guesses = share * (CALIBRATION.expected(tree) - 1)
        trees.observe(rows, [guesses] * len(rows))
    return widths


def best_by_hand(model: CostModel, count: int, share: float) -> int:
    def rate(width: int) -> float:
        guesses = CALIBRATION.expected(CALIBRATION.best_tree(width)) - 1
        return (1 + share * guesses) / model.seconds(count, width)

    found = max(WIDTHS, key=rate)
    return found if rate(found) >= MARGIN * rate(1) else 1


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.05, 0.2, 2.0])
@pytest.mark.parametrize("count", [1, 4, 8, 32])
def test_the_first_choice_is_the_calibrations(slope: float, count: int):
    trees = policy(slope=slope)
    for row in range(count):
        trees.start(row)
    chosen = trees.choose(range(count), count).width
    assert chosen == best_by_hand(costs(slope), count, 1.0) or slope == 2.0  # there a probe may come first
    if slope == 0.0:
        assert chosen == 16


def test_useless_heads_end_in_plain_decoding_with_rare_probes():
    trees = policy()
    trees.start(0)
    widths = run(trees, 2000, share=0.0)
    assert widths[0] > 1
    late = widths[200:]
    assert late.count(1) > 0.9 * len(late)
    extra = sum(costs().seconds(1, width) for width in late) / (len(late) * costs().seconds(1, 1))
    assert extra < 1.015


def test_heads_that_become_good_are_found_again():
    trees = policy()
    trees.start(0)
    run(trees, 1500, share=0.0)
    assert max(run(trees, 3000, share=1.0)[-100:]) > 1


def test_more_rows_shrink_the_tree():
    trees = policy(slope=0.03)
    widths = [trees.choose(range(rows), rows).width for rows in (1, 2, 4, 8)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


def test_a_new_prompt_is_not_judged_by_the_rows_last_one():
    trees = policy()
    trees.start(0)
    trees.start(1)
    for _ in range(30):
        trees.choose([0, 1], 2)
        trees.observe([0, 1], [0, 3])
    assert trees.share(0) < 0.5 < trees.share(1)
    trees.start(0)
    assert trees.share(0) > 0.5


def test_share_forgets():
    share = Share(memory=10.0)
    for _ in range(100):
        share.add(0.0, 1.0)
    for _ in range(100):
        share.add(1.0, 1.0)
    assert share.value(0.5, 1.0) == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("batch", [1, 3])
def test_an_adaptive_engine_says_what_plain_decoding_says(batch: int):
    model, heads = small_model(), small_heads("hydra", scale=0.0)
    engine = Engine(model, heads, batch=batch, max_length=128)
    trees = policy(slope=0.01)
    engine.set_policy(trees)
    assert answers(engine, prompts()) == [greedy(model, ids) for ids in prompts()]
    assert len({tree.width for tree in engine._steps}) > 1  # it did change its mind
    engine.set_tree(Tree())
    assert answers(engine, prompts()) == [greedy(model, ids) for ids in prompts()]


def test_trees_that_the_heads_cannot_fill_are_refused():
    engine = Engine(small_model(), small_heads("medusa", num_heads=2), max_length=128)
    with pytest.raises(MedusaError, match="needs 3 heads"):
        engine.set_policy(policy())


def test_a_calibration_without_paths_is_refused():
    empty = Calibration.from_accuracies([[0.0, 0.0]])
    with pytest.raises(MedusaError, match="no path"):
        AdaptiveTrees.from_calibration(empty, costs())
