"""Acceptance rules against the slow obvious ones, on random trees and by the distribution of what they commit."""

import functools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from medusa.acceptance import accept, choose, typical
from medusa.sampling import Draws, SamplingParams, gather_rules
from medusa.tree import Tree
from tests.medusa.test_tree import trees

DEEP = Tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)])


def children_of(tree: Tree, node: int) -> list[int]:
    nodes = [(), *tree.paths]
    return [n for n, path in enumerate(nodes) if path and path[:-1] == nodes[node]]


def walk(tree: Tree, tokens: list[int], chosen: list[int]) -> list[int]:
    """The slow obvious rule: from the root, go to the child that holds the base's token, while there is one."""
    path = [0]
    while True:
        match = [n for n in children_of(tree, path[-1]) if tokens[n] == chosen[path[-1]]]
        if not match:
            return path
        path.append(match[0])


def random_tokens(tree: Tree, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """[W]; siblings hold different tokens, as a head's top-k does; token 0 is a token like others."""
    tokens = torch.zeros(tree.width, dtype=torch.long)
    for node in range(tree.width):
        children = children_of(tree, node)
        tokens[children] = torch.randperm(vocabulary, generator=generator)[: len(children)]
    return tokens


@given(trees(), st.integers(0, 2**31))
def test_accept_equals_walking_the_tree(tree: Tree, seed: int):
    generator = torch.Generator().manual_seed(seed)
    batch = 3
    tokens = torch.stack([random_tokens(tree, 4, generator) for _ in range(batch)])
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


@given(trees(), st.integers(0, 2**31), st.floats(0.02, 0.5), st.floats(0.1, 1.0))
def test_typical_equals_the_paper_spelled_out(tree: Tree, seed: int, epsilon: float, alpha: float):
    generator = torch.Generator().manual_seed(seed)
    tokens = random_tokens(tree, 5, generator)
    p = torch.softmax(2 * torch.randn(tree.width, 5, generator=generator), -1)
    likely, summed = typical(
        tokens[None], p[None], torch.tensor([epsilon]), torch.tensor([alpha]), tree.buffers()
    )
    chosen = p.argmax(-1)
    got = accept(tokens[None], chosen[None], tree.buffers(), likely, summed)
    nodes = [(), *tree.paths]
    best: tuple[int, float, int] = (0, 0.0, 0)
    scores = {0: 0.0}
    for node in range(1, tree.width):
        parent = nodes.index(nodes[node][:-1])
        entropy = -sum(float(q) * np.log(float(q)) for q in p[parent] if q > 0)
        share = float(p[parent, tokens[node]])
        if parent in scores and share > min(epsilon, alpha * np.exp(-entropy)):
            scores[node] = scores[parent] + np.log(share)
            best = max(best, (len(nodes[node]), scores[node], -node))
    assert got.count[0] == best[0] + 1
    # Equally long paths can be equally probable within rounding: the score decides, not the node.
    node = int(got.node[0])
    assert node in scores
    assert scores[node] == pytest.approx(best[1], abs=1e-4)
    assert got.root[0] == chosen[node]


# -- what is committed has the base's distribution ---------------------------------------------------


def language(vocabulary: int, seed: int) -> torch.Tensor:
    """A base whose next token depends on the last one only: [V, V] logits."""
    return 1.5 * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))


def distributions(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """[V, V] by the definition: temperature, top-k, top-p of what is left, in float64."""
    out = np.zeros(logits.shape)
    for last, row in enumerate(logits.double().numpy()):
        p = np.exp(row / params.temperature)
        p /= p.sum()
        order = np.argsort(-p)
        kept = order[: params.top_k or None]
        mass, total = 0.0, p[kept].sum()
        for token in kept:
            if mass >= params.top_p * total:
                break
            out[last, token] = p[token]
            mass += p[token]
    return out / out.sum(-1, keepdims=True)


def rejection(tree: Tree, tokens: list[int], p: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Tree rejection sampling spelled out: siblings in order, then the residual (see `medusa.acceptance`)."""
    node, said = 0, []
    while True:
        left, taken = p[tokens[node]].copy(), None
        for child in children_of(tree, node):
            if rng.random() < left[tokens[child]]:
                taken = child
                break
            left[tokens[child]] = 0.0
            left /= left.sum()
        if taken is None:
            return [*said, int(rng.choice(len(left), p=left))]
        said.append(tokens[taken])
        node = taken


@functools.cache
def draws_of(seed: int) -> Draws:
    return Draws(seed)


def commit_many(
    tree: Tree, tokens: torch.Tensor, logits: torch.Tensor, params: SamplingParams, times: int
) -> list[tuple]:
    """What the kit commits after the root, for many seeds at once."""
    rows = tokens.expand(times, -1)
    rules = gather_rules(
        [SamplingParams(**{**vars(params), "seed": seed}) for seed in range(times)],
        [draws_of(seed) for seed in range(times)],
        [0] * times,
        [[]] * times,
        tree.depth,
        logits.shape[0],
    )
    buffers = tree.buffers()
    chosen, likely, weight = choose(logits[rows], rows, buffers, rules)
    accepted = accept(rows, chosen, buffers, likely, weight)
    said = []
    for row in range(times):
        count = int(accepted.count[row])
        said.append((*rows[row, accepted.path[row, 1:count]].tolist(), int(accepted.root[row])))
    return said


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0),
        SamplingParams(0.6),
        SamplingParams(1.3, top_p=0.8),
        SamplingParams(1.0, top_k=3),
        SamplingParams(0.9, top_p=0.9, top_k=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("tree", [Tree([(0,), (1,), (2,)]), DEEP, Tree.chain(3)], ids=repr)
def test_the_committed_text_has_the_bases_distribution(tree: Tree, params: SamplingParams):
    """Chi-square over what is committed, and the rule of rejection sampling beside it commits as much."""
    vocabulary, times = 6, 5000
    logits = language(vocabulary, seed=3)
    p = distributions(logits, params)
    tokens = random_tokens(tree, vocabulary, torch.Generator().manual_seed(11))
    said = commit_many(tree, tokens, logits, params, times)
    first = int(tokens[0])
    # every continuation that can be committed, with its probability by the chain rule
    chances: dict[tuple, float] = {}

    def spread(node: int, so_far: tuple, chance: float) -> None:
        held = {int(tokens[child]): child for child in children_of(tree, node)}
        for token in range(vocabulary):
            share = chance * p[int(tokens[node]), token]
            if share <= 0:
                continue
            if token in held:
                spread(held[token], (*so_far, token), share)
            else:
                chances[(*so_far, token)] = share

    spread(0, (), 1.0)
    assert sum(chances.values()) == pytest.approx(1.0)
    seen = Counter(said)
    assert set(seen) <= set(chances), f"after {first}: text that the base cannot write"
    common = [text for text, chance in chances.items() if chance * times >= 5]
    rest = times - sum(seen[text] for text in common)
    observed = [seen[text] for text in common] + [rest]
    expected = [chances[text] * times for text in common]
    expected.append(times - sum(expected))
    if expected[-1] < 1:
        observed, expected = (
            observed[:-1],
            [e * sum(observed[:-1]) / sum(expected[:-1]) for e in expected[:-1]],
        )
    assert chisquare(observed, expected).pvalue > 1e-4
    rng = np.random.default_rng(0)
    listed = tokens.tolist()
    reference = [rejection(tree, listed, p, rng) for _ in range(times)]
    lengths = np.mean([len(text) for text in said]), np.mean([len(text) for text in reference])
    assert lengths[0] == pytest.approx(
        lengths[1], abs=4 * np.std([len(t) for t in reference]) * (2 / times) ** 0.5
    )
    assert set(map(tuple, reference)) <= set(chances)


def test_typical_at_temperature_zero_is_greedy():
    logits = language(6, seed=1)
    tokens = random_tokens(DEEP, 6, torch.Generator().manual_seed(2))[None]
    greedy = choose(
        logits[tokens], tokens, DEEP.buffers(), gather_rules([SamplingParams()], [None], [0], [[]], 3, 6)
    )
    params = SamplingParams(acceptance="typical")
    other = choose(logits[tokens], tokens, DEEP.buffers(), gather_rules([params], [None], [0], [[]], 3, 6))
    assert torch.equal(greedy[0], other[0])
    assert other[1] is None


def test_typical_commits_more_than_lossless_and_ends_with_a_sample():
    logits = language(6, seed=4)
    tokens = random_tokens(DEEP, 6, torch.Generator().manual_seed(5))
    lossless = commit_many(DEEP, tokens, logits, SamplingParams(1.0), 400)
    loose = commit_many(DEEP, tokens, logits, SamplingParams(1.0, acceptance="typical"), 400)
    assert np.mean([len(text) for text in loose]) > np.mean([len(text) for text in lossless])
    assert len({text[:-1] for text in loose}) == 1  # the rule itself draws nothing
    assert len({text[-1] for text in loose}) > 2  # the token after it is drawn


def test_total_variation_on_the_real_base(smollm2, request):
    """What a step with the shipped heads commits first is as near to the base's distribution as plain
    draws from it are."""
    from medusa.attention import grouped
    from medusa.base import load_base
    from medusa.cache import CacheView
    from medusa.checkpoint import load_checkpoint
    from medusa.decoding import Engine
    from medusa.step import Step, draft

    base = load_base(str(smollm2), dtype=torch.float32)
    shipped = request.config.rootpath / "checkpoints/smollm2-135m-shopping-hydra"
    heads = load_checkpoint(shipped, base).heads
    tree = Tree([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0)])
    engine = Engine(base.model, heads, tree, max_length=128, pack=False)
    ids = base.tokenizer.encode("A good waterproof jacket for hiking should")
    engine.prefill(0, ids)
    step = Step(base.model, heads, tree)
    with torch.inference_mode(), grouped(base.model.config):
        tokens = draft(heads, step.projections, step.embed, step.tree, engine.hidden, engine.root)
        positions, keys, visible = step._view(engine.lengths, 64)
        slots = engine.lengths[:, None] + torch.arange(tree.width)
        view = CacheView(*engine.cache.rows(0, 1), slots, 64)
        logits = step.lm_head(step.base(tokens, positions, keys, visible, view))
    params = SamplingParams(0.9, top_p=0.95)
    exact = torch.from_numpy(distributions(logits[0, :1], params)[0])
    held = {int(token) for token in tokens[0, 1:5]}
    assert 0.2 < float(exact[list(held)].sum()) < 0.999, "the heads guess something, and not everything"
    drawn = []
    for first in range(0, 1024, 16):
        seeds = range(first, first + 16)
        rules = gather_rules(
            [params] * 16, [Draws(seed) for seed in seeds], [0] * 16, [[]] * 16, 2, logits.shape[-1]
        )
        chosen, likely, weight = choose(logits.expand(16, -1, -1), tokens.expand(16, -1), step.tree, rules)
        accepted = accept(tokens.expand(16, -1), chosen, step.tree, likely, weight)
        said = torch.where(accepted.count > 1, tokens[0, accepted.path[:, min(1, tree.depth)]], accepted.root)
        drawn += said.tolist()

    def variation(sample):
        return float((torch.bincount(sample, minlength=len(exact)) / len(sample) - exact).abs().sum() / 2)

    plain = [variation(torch.multinomial(exact, len(drawn), replacement=True)) for _ in range(20)]
    assert variation(torch.tensor(drawn)) < max(plain) * 1.15
