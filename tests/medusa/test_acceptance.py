import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.acceptance import accept, sample
from medusa.tree import Tree
from tests.medusa.test_tree import trees


def walk(tree: Tree, tokens: list[int], chosen: list[int]) -> list[int]:
    """The slow obvious rule: from the root, go to the child that holds the base's token, while there is one."""
    nodes = [(), *tree.paths]
    path = [0]
    while True:
        children = [
            n for n, p in enumerate(nodes) if len(p) == len(nodes[path[-1]]) + 1 and p[:-1] == nodes[path[-1]]
        ]
        match = [n for n in children if tokens[n] == chosen[path[-1]]]
        if not match:
            return path
        path.append(match[0])


@given(trees(), st.integers(0, 2**31))
def test_accept_equals_walking_the_tree(tree: Tree, seed: int):
    generator = torch.Generator().manual_seed(seed)
    batch, nodes = 3, [(), *tree.paths]
    tokens = torch.zeros(batch, tree.width, dtype=torch.long)
    for row in range(
        batch
    ):  # siblings hold different tokens, as a head's top-k does; token 0 is a token like others
        for parent in nodes:
            children = [n for n, path in enumerate(nodes) if path and path[:-1] == parent]
            tokens[row, children] = torch.randperm(4, generator=generator)[: len(children)]
    chosen = torch.randint(0, 4, (batch, tree.width), generator=generator)
    accepted = accept(tokens, chosen, tree.buffers())
    for row in range(batch):
        path = walk(tree, tokens[row].tolist(), chosen[row].tolist())
        assert accepted.count[row] == len(path)
        assert accepted.node[row] == path[-1]
        assert accepted.path[row, : len(path)].tolist() == path
        assert accepted.root[row] == chosen[row, path[-1]]


def test_token_zero_does_not_match_as_padding():
    tree = Tree([(0,), (1,), (1, 0)])
    tokens = torch.tensor([[7, 5, 6, 0]])
    chosen = torch.tensor([[9, 0, 0, 0]])  # no child of the root is 9
    assert accept(tokens, chosen, tree.buffers()).count.tolist() == [1]


def test_sample_is_greedy_at_temperature_zero():
    logits = torch.randn(4, 3, 11, generator=torch.Generator().manual_seed(0))
    draws = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits, torch.zeros(4), torch.ones(4), draws), logits.argmax(-1))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.3, 0.8, 1.0]))
def test_sample_inverts_the_nucleus_distribution(seed: int, temperature: float, top_p: float):
    logits = torch.randn(7, generator=torch.Generator().manual_seed(seed))
    probabilities = torch.softmax(logits / temperature, -1).tolist()
    kept, mass = {}, 0.0
    for token in sorted(range(7), key=lambda t: -probabilities[t]):
        if mass >= top_p:
            break
        kept[token] = probabilities[token]
        mass += probabilities[token]
    draws = (torch.arange(2000) + 0.5) / 2000
    size = len(draws)
    tokens = sample(
        logits.expand(1, size, 7), torch.tensor([temperature]), torch.tensor([top_p]), draws[None]
    )[0]
    share = torch.bincount(tokens, minlength=7) / size
    for token in range(7):
        assert abs(share[token] - kept.get(token, 0.0) / sum(kept.values())) < 2e-3


def test_rows_have_their_own_rule():
    logits = torch.tensor([[[0.0, 0.1, 0.0]], [[0.0, 0.1, 0.0]]])
    tokens = sample(logits, torch.tensor([0.0, 1.0]), torch.ones(2), torch.tensor([[0.99], [0.99]]))
    assert tokens.tolist() == [[1], [2]]


@pytest.mark.parametrize("flat", [True, False])
def test_nucleus_of_a_large_vocabulary_is_exact_whether_or_not_it_is_small(flat):
    """A flat distribution's nucleus has more than the thousand tokens that are looked at first."""
    size = 5000
    logits = torch.linspace(0.0, 0.1 if flat else 30.0, size)[torch.randperm(size)]
    probabilities = torch.softmax(logits, -1)
    order = probabilities.argsort(descending=True)
    count = int((probabilities[order].cumsum(0) < 0.9).sum()) + 1
    assert (count > 1024) == flat
    draws = torch.rand(1, 4000, generator=torch.Generator().manual_seed(0))
    tokens = sample(logits.expand(1, 4000, size), torch.tensor([1.0]), torch.tensor([0.9]), draws)
    assert set(tokens.unique().tolist()) <= set(order[:count].tolist())
    if not flat:
        assert len(tokens.unique()) > count // 2
