"""Counts and walks against loops, the published tree, and the figures of the published accuracies."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa.calibration import TOP_K, Calibration, simulate, walk
from medusa.errors import MedusaError
from medusa.tree import Tree


def random_ranks(seed: int, lengths: list[int], heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranks with a peak at 0, and misses past each answer's end."""
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths])
    ranks = np.minimum(rng.geometric(0.45, (offsets[-1], heads)) - 1, TOP_K)
    for stop in offsets[1:]:
        for k in range(1, heads + 1):
            ranks[max(0, stop - k) : stop, k - 1] = TOP_K
    return ranks, offsets


cases = {"seed": st.integers(0, 999), "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=5)}


@given(**cases, heads=st.integers(1, 4))
def test_counts_equal_a_loop(seed: int, lengths: list[int], heads: int) -> None:
    ranks, offsets = random_ranks(seed, lengths, heads)
    calibration = Calibration.from_ranks(ranks, offsets)
    paths: Counter[tuple[int, ...]] = Counter()
    for row in ranks.tolist():
        for depth in range(1, heads + 1):
            if TOP_K in row[:depth]:
                break
            paths[tuple(row[:depth])] += 1
    assert calibration.paths == dict(paths)
    assert calibration.positions == len(ranks)
    for k in range(1, heads + 1):
        assert list(calibration.hits[k - 1]) == [int((ranks[:, k - 1] == r).sum()) for r in range(TOP_K)]
        assert calibration.head_positions[k - 1] == sum(max(0, n - k) for n in lengths)


@given(**cases, width=st.integers(1, 30))
def test_simulated_walk_equals_a_loop(seed: int, lengths: list[int], width: int) -> None:
    ranks, offsets = random_ranks(seed, lengths, 3)
    tree = Calibration.from_ranks(ranks, offsets).best_tree(width)
    known = {(), *tree.paths}
    steps = 0
    for start, stop in itertools.pairwise(offsets):
        place = start
        while place < stop:
            depth = 0
            while depth < 3 and tuple(ranks[place, : depth + 1].tolist()) in known:
                depth += 1
            place += 1 + depth
            steps += 1
        assert place == stop  # nothing is committed past an answer's end
    assert simulate(ranks, offsets, tree) == pytest.approx(len(ranks) / steps)


@given(**cases, width=st.integers(2, 20))
def test_what_is_expected_where_a_walk_starts_is_what_it_commits(
    seed: int, lengths: list[int], width: int
) -> None:
    ranks, offsets = random_ranks(seed, lengths, 3)
    tree = Calibration.from_ranks(ranks, offsets).best_tree(width)
    starts = walk(ranks, offsets, tree)
    counted = Calibration.from_ranks(ranks, offsets, starts=starts)
    assert counted.starts == starts.sum()
    assert counted.expected(tree) == pytest.approx(simulate(ranks, offsets, tree))
    # The accuracies of heads are over all places whatever the walk.
    assert counted.hits == Calibration.from_ranks(ranks, offsets).hits


def test_places_that_are_skipped_are_not_counted() -> None:
    # Every third token is a surprise, and after each both heads are right: decoding never starts at the two places
    # whose guesses miss.
    ranks = np.array([[0, 0], [0, 9], [9, 9]] * 20)
    ranks[-1], ranks[-2, 1] = TOP_K, TOP_K
    counted = Calibration.from_walk(ranks, [0, 60], 3)
    assert (counted.positions, counted.starts) == (60, 20)
    assert counted.expected(counted.best_tree(3)) == simulate(ranks, [0, 60], counted.best_tree(3)) == 3.0
    assert Calibration.from_ranks(ranks, [0, 60]).expected(Tree([(0,), (0, 0)])) == pytest.approx(2.0)


def test_known_walk() -> None:
    # One answer of 6: at place 0 both heads are right (3 tokens), at 3 only the first (2), at 5 none is left.
    ranks = np.array([[0, 0], [9, 9], [9, 9], [0, 5], [9, 9], [10, 10]])
    tree = Tree([(0,), (0, 0)])
    assert simulate(ranks, [0, 6], tree) == 2.0
    assert simulate(ranks, [0, 6], Tree()) == 1.0
    assert Calibration.from_ranks(ranks, [0, 6]).expected(tree) == pytest.approx(1 + 3 / 6)


def test_best_trees_are_nested_and_best() -> None:
    ranks, offsets = random_ranks(7, [400], 2)
    calibration = Calibration.from_ranks(ranks, offsets)
    before: set = set()
    for width in range(1, 20):
        tree = calibration.best_tree(width)
        assert tree.width == width
        assert before <= set(tree.paths)
        before = set(tree.paths)
    # Every tree of three nodes below the root, by exhaustion.
    nodes = [(r,) for r in range(4)] + [(r, s) for r in range(4) for s in range(4)]
    best = 0.0
    for a in nodes:
        for b in nodes:
            for c in nodes:
                chosen = {a, b, c}
                if len(chosen) == 3 and all(len(p) == 1 or p[:1] in chosen for p in chosen):
                    best = max(best, calibration.expected(Tree(chosen)))
    assert calibration.expected(calibration.best_tree(4)) == pytest.approx(best)


def test_json_round_trip(tmp_path: Path) -> None:
    calibration = Calibration.from_ranks(*random_ranks(3, [50, 20], 3))
    calibration.to_json(tmp_path / "calibration.json")
    assert Calibration.from_json(tmp_path / "calibration.json") == calibration


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value.pop("hits"),
        lambda value: value.pop("starts"),
        lambda value: value["hits"][0].pop(),
        lambda value: value["head_positions"].pop(),
        lambda value: value["paths"].append([[99], 3]),
        lambda value: value.update(paths=7),
        lambda value: value.update(starts=-1),
        lambda value: value["paths"][0].__setitem__(1, "5"),
        lambda value: value["paths"][0].__setitem__(1, None),
        lambda value: value.update(positions=float("inf")),
    ],
)
def test_a_spoilt_file_is_refused(spoil) -> None:
    value = Calibration.from_ranks(*random_ranks(3, [50, 20], 3)).to_dict()
    spoil(value)
    with pytest.raises(MedusaError, match="calibration"):
        Calibration.from_dict(value)


def test_independence_predicts_the_published_figures() -> None:
    """Top-1 and top-5 of Vicuna-7B's heads in Medusa's calibration file; what DESIGN.md derives from them.

    DESIGN.md counts nodes without the root. Between top-1 and top-5 the shares fall as 9 : 5 : 3 : 2.
    """
    published = [(0.56, 0.78), (0.32, 0.56), (0.20, 0.42), (0.15, 0.34), (0.12, 0.30)]
    rows = [[top1, *((top5 - top1) * np.array([9, 5, 3, 2]) / 19)] for top1, top5 in published]
    calibration = Calibration.from_accuracies(rows)
    for nodes, predicted in ((8, 2.07), (16, 2.22), (32, 2.32), (63, 2.38)):
        assert calibration.expected(calibration.best_tree(nodes + 1)) == pytest.approx(predicted, abs=0.01)


def test_accuracies_that_are_no_distribution() -> None:
    with pytest.raises(MedusaError, match="head 2"):
        Calibration.from_accuracies([[0.5, 0.2], [0.9, 0.2]])
    with pytest.raises(MedusaError, match="head 2"):
        Calibration.from_accuracies([[0.5, 0.2], [0.9]])


def test_a_tree_deeper_than_the_heads() -> None:
    ranks, offsets = random_ranks(0, [30], 3)
    deep = Tree.chain(4)
    with pytest.raises(MedusaError, match="there are 3"):
        simulate(ranks, offsets, deep)
    with pytest.raises(MedusaError, match="there are 3"):
        Calibration.from_ranks(ranks, offsets).expected(deep)
