import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa.errors import MedusaError
from medusa.tree import Tree


@st.composite
def trees(draw, depth: int = 4, ranks: int = 4, nodes: int = 14) -> Tree:
    """Random valid trees: a node is added under the root or under a node that is there already."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, nodes))):
        stem = draw(st.sampled_from([(), *[path for path in paths if len(path) < depth]]))
        path = (*stem, draw(st.integers(0, ranks - 1)))
        if path not in paths:
            paths.append(path)
    return Tree(draw(st.permutations(paths)))


@given(trees())
def test_buffers_equal_the_obvious_definition(tree: Tree):
    buffers = tree.buffers()
    nodes = [(), *tree.paths]
    for i, path in enumerate(nodes):
        assert buffers.depths[i] == len(path)
        for j, other in enumerate(nodes):
            assert buffers.mask[i, j] == (path[: len(other)] == other)
        line = [nodes.index(path[:d]) for d in range(len(path) + 1)]
        assert buffers.ancestors[i].tolist() == line + [i] * (tree.depth + 1 - len(line))
        if path:
            assert nodes[buffers.parents[i]] == path[:-1]
            assert buffers.ranks[i] == path[-1]


@given(trees())
def test_levels_find_every_node_under_its_parent(tree: Tree):
    nodes, at = [(), *tree.paths], 1
    for depth, level in enumerate(tree.buffers().levels, start=1):
        assert level.paths.shape == (len(level.drafters), depth)
        for slot, rank in zip(level.slots.tolist(), level.ranks.tolist(), strict=True):
            parent = nodes[level.drafters[slot]]
            assert (*parent, rank) == nodes[at]
            assert level.paths[slot].tolist() == [nodes.index(parent[:d]) for d in range(depth)]
            at += 1
        assert level.top_k == int(level.ranks.max()) + 1
    assert at == tree.width


@given(trees())
def test_order_of_paths_does_not_matter(tree: Tree):
    assert Tree(reversed(tree.paths)) == tree
    assert hash(Tree(reversed(tree.paths))) == hash(tree)


@given(trees())
def test_json_round_trip(tmp_path_factory, tree: Tree):
    file = tmp_path_factory.mktemp("tree") / "tree.json"
    tree.to_json(file)
    assert Tree.from_json(file) == tree


def test_the_published_choice_format_is_a_bare_list(tmp_path):
    file = tmp_path / "choices.json"
    file.write_text(json.dumps([[0], [0, 0], [1], [0, 1]]))
    assert Tree.from_json(file).paths == ((0,), (1,), (0, 0), (0, 1))


def test_the_empty_tree_is_plain_decoding():
    tree = Tree()
    assert (tree.width, tree.depth, tree.top_k) == (1, 0, 0)
    assert tree.buffers().levels == ()
    assert tree.buffers().mask.tolist() == [[True]]


def test_chain():
    assert Tree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([(0,), (1, 0)], "orphan.*parent \\[1\\]"),
        ([(0,), (0,)], "twice"),
        ([()], "empty path"),
        ([(-1,)], "ranks"),
        ([(True,)], "ranks"),
        ([("a",)], "ranks"),
    ],
)
def test_a_tree_that_is_none_is_refused(paths, says):
    with pytest.raises(MedusaError, match=says):
        Tree(paths)


def test_three_heads_cannot_fill_a_tree_of_depth_four():
    with pytest.raises(MedusaError, match=r"\[0, 0, 0, 0\] needs 4 heads and there are 3"):
        Tree.chain(4).check(num_heads=3, vocabulary=100)


def test_more_guesses_than_tokens_are_refused():
    with pytest.raises(MedusaError, match="rank 5"):
        Tree([(5,)]).check(num_heads=1, vocabulary=5)


@pytest.mark.parametrize("text", ['{"paths": 3}', "[1, 2]", "{", '{"paths": [[1, 0]]}'])
def test_a_file_that_holds_no_tree_names_the_file(tmp_path, text):
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(MedusaError, match="tree.json"):
        Tree.from_json(file)


def test_mask_lives_on_the_device_that_was_asked_for():
    assert Tree.chain(2).buffers(torch.device("meta")).mask.is_meta


@pytest.mark.parametrize("path", [[[0]], [None], ["0"], [0.0], [True]])
def test_ranks_that_are_no_whole_numbers(path: list) -> None:
    with pytest.raises(MedusaError, match="must hold ranks"):
        Tree([path])
