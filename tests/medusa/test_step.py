"""The step function's shapes are static: it compiles without a graph break and exports, with the same results."""

import shutil

import pytest
import torch

from medusa.attention import grouped
from medusa.cache import TreeCache
from medusa.decoding import Engine
from medusa.generation import Request, generate
from medusa.sampling import Draws, SamplingParams, gather_rules
from medusa.step import Prefill, Step
from medusa.tree import Tree
from tests.medusa.models import FAMILIES, HIDDEN, VOCABULARY, small_heads, small_model
from tests.medusa.test_decoding import BUSHY, answers, prompts

ROWS, CAPACITY, SPAN = 2, 64, 32
WARM = SamplingParams(0.9, top_p=0.9, repetition_penalty=1.3, logit_bias={5: 1.0}, seed=3)


def inputs(model, tree: Tree, *params: SamplingParams):
    """A step's arguments, in the middle of two answers."""
    cache = TreeCache(model.config, ROWS, CAPACITY)
    generator = torch.Generator().manual_seed(0)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    rules = gather_rules(
        params, [Draws(7), Draws(8)], [1, 4], [[3, 9, 4], [11, 7, 6]], tree.depth, VOCABULARY
    )
    return (
        *cache.rows(0, ROWS),
        torch.tensor([9, 14]),
        torch.tensor([4, 6]),
        torch.randn(ROWS, HIDDEN, generator=generator),
        torch.tensor([1, 1]),
        SPAN,
        rules,
    )


def same(got, expected) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "params", [(SamplingParams(),) * 2, (SamplingParams(), WARM)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("tree", [Tree(), BUSHY], ids=repr)
def test_a_step_compiles_whole(kind: str, tree: Tree, params):
    """fullgraph=True raises at the first graph break; the traced graph changes the same cache in the same way."""
    model, heads = small_model(), small_heads(kind, draft_vocab_size=40)
    step = Step(model, heads, tree)
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    eager_inputs, compiled_inputs = inputs(model, tree, *params), inputs(model, tree, *params)
    with torch.inference_mode(), grouped(model.config):
        same(compiled(*compiled_inputs), step(*eager_inputs))
    same(compiled_inputs[:2], eager_inputs[:2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_step_exports(family: str, kind: str):
    model, heads = small_model(family), small_heads(kind)
    step = Step(model, heads, BUSHY).eval()
    params = (SamplingParams(),) * 2
    with torch.no_grad(), grouped(model.config):
        program = torch.export.export(step, inputs(model, BUSHY, *params)[:7])
        exported_inputs, eager_inputs = inputs(model, BUSHY, *params), inputs(model, BUSHY, *params)
        same(program.module()(*exported_inputs[:7]), step(*eager_inputs[:7]))
    same(exported_inputs[:2], eager_inputs[:2])


def test_a_prefill_exports_and_padding_changes_nothing():
    model = small_model()
    prefill = Prefill(model).eval()
    ids = torch.tensor([[5, 6, 7, 8, 8, 8]])

    def arguments(n: int):
        cache = TreeCache(model.config, 1, CAPACITY)
        return (*cache.rows(0, 1), ids[:, :n], torch.tensor(0), torch.tensor(3), SPAN)

    with torch.no_grad(), grouped(model.config):
        plain = prefill(*arguments(4))
        program = torch.export.export(prefill, arguments(6))
        same(program.module()(*arguments(6)), plain)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_compiled_engine_says_the_same(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Rows joining and leaving, trees changing between steps, greedy and sampled."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: compile_(*a, **k, backend="aot_eager"))
    model, heads = small_model(), small_heads(kind)
    for params in (SamplingParams(), SamplingParams(0.8, top_p=0.9, seed=5)):
        expected = answers(Engine(model, heads, batch=3, max_length=128), prompts(), sampling=params)
        engine = Engine(model, heads, BUSHY, batch=3, max_length=128, compile=True)
        assert answers(engine, prompts(), sampling=params) == expected


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile's own backend needs a C++ compiler")
def test_a_step_runs_under_inductor():
    model, heads = small_model(), small_heads("hydra")
    ids = prompts()[0]
    expected = answers(Engine(model, max_length=128), [ids], 8)
    engine = Engine(model, heads, Tree([(0,), (1,), (0, 0)]), max_length=128, compile=True)
    done = next(generate(engine, [Request(ids, 8)], eos_ids={2}))
    assert [done.token_ids] == expected
