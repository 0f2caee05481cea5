"""What the sections count: steps by width, tokens by mode, answers of contestants. No time is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.contest import OURS, Ours, Transformers, measure_contest
from benchmarks.parts import PARTS
from benchmarks.steps import cost_model, measure_steps
from benchmarks.subject import groups, random_heads, read_prompts
from benchmarks.throughput import MODES, can_pay, measure_throughput, rounds
from benchmarks.vllm_peers import KINDS, VllmContestant, open_vllm, vllm_python
from medusa.checkpoint import load_checkpoint
from medusa.cost import CostModel, StepCost
from medusa.errors import MedusaError
from medusa.tree import Tree
from tests.medusa.models import small_heads, small_model

TOKENS = 12
PROMPTS = [[3, 40, 41, 52], [3, 60, 33, 71, 90], [3, 99], [3, 120, 121, 122, 123, 124]]


def flat_cost(widest: int = 64) -> CostModel:
    """Every step takes as long: trees always pay."""
    curve = [StepCost(1, 1.0, 1.0, 1.0), StepCost(widest, 1.01, 1.01, 1.01)]
    return CostModel({1: curve, 32: curve})


def test_steps_are_measured_by_rows_and_width():
    texts: list[str] = []
    steps = measure_steps(
        small_model(),
        small_heads("hydra"),
        batches=(1, 2),
        widths=(4,),
        repeats=3,
        context=10,
        progress=texts.append,
    )
    assert {(entry.batch, entry.width) for entry in steps.times} >= {(1, 1), (2, 1)}  # plain is always there
    assert len(texts) == 2 * (2 + 3)
    for entry in steps.times:
        assert tuple(entry.parts) == PARTS
        assert len(entry.seconds) == 3
        for place, whole in enumerate(entry.seconds):
            assert sum(part[place] for part in entry.parts.values()) == pytest.approx(whole)
    cost = cost_model(steps, {"dtype": "float32"})
    assert set(cost.curves) == {1, 2}
    assert cost.seconds(1, 1) > 0


def test_widths_without_guesses_are_said_to_be_skipped():
    heads = small_heads("medusa", draft_vocab_size=4)
    steps = measure_steps(small_model(), heads, batches=(1,), widths=(2, 64), repeats=2, context=10)
    assert {entry.width for entry in steps.times} <= {1, 2}
    assert any("64 nodes: the heads have 4 guesses" in line for line in steps.skipped)


def test_every_mode_decodes_the_same_tokens(small):
    checkpoint = load_checkpoint(small.heads_folder, small.base)
    texts: list[str] = []
    found = measure_throughput(
        small.base,
        checkpoint,
        PROMPTS,
        flat_cost(),
        cost_from="a test",
        batches=(1, 3),
        limit=2,
        max_new_tokens=TOKENS,
        repeats=2,
        progress=texts.append,
    )
    assert len(texts) == rounds((1, 3), 2, 2) == (2 + 1) * 2
    assert [(mode.batch, mode.name) for mode in found.modes] == [
        (batch, name) for batch in (1, 3) for name in MODES
    ]
    for mode in found.modes:
        assert [(one.group, one.repeat) for one in mode.passes] == [
            (group, repeat) for group in range(2 if mode.batch == 1 else 1) for repeat in range(2)
        ]
        for one in mode.passes:
            assert one.tokens == mode.batch * (TOKENS - 1)  # the first of each row is the prefill's
            assert one.same
            assert one.seconds > 0
            steps = sum(one.widths.values())
            assert (TOKENS - 1) / 4 <= steps <= TOKENS - 1
            if mode.name == "plain":
                assert one.widths == {1: TOKENS - 1}
            elif mode.name == "tree":
                assert set(one.widths) == {checkpoint.tree.width}
    widths = {mode.name: set().union(*(one.widths for one in mode.passes)) for mode in found.modes}
    assert max(widths["adaptive"]) > 1  # where a step costs the same, a tree is taken
    plain = next(mode for mode in found.modes if mode.name == "plain")
    assert (plain.ratio.low, plain.ratio.mean, plain.ratio.high) == (1.0, 1.0, 1.0)


def test_a_tree_that_cannot_pay_is_left_out_and_named(small):
    checkpoint = load_checkpoint(small.heads_folder, small.base)
    curve = [StepCost(1, 1.0, 1.0, 1.0)]
    found = measure_throughput(
        small.base,
        checkpoint,
        PROMPTS,
        CostModel({1: curve}),
        cost_from="a test",
        batches=(2,),
        limit=1,
        max_new_tokens=4,
        repeats=1,
    )
    assert "tree" not in {mode.name for mode in found.modes}
    assert found.skipped[0].startswith("2 rows, tree")
    # and no wider tree is ever chosen where only plain decoding was measured
    assert {width for mode in found.modes for one in mode.passes for width in one.widths} == {1}


def test_what_can_pay():
    cost = CostModel({1: [StepCost(1, 1.0, 1.0, 1.0), StepCost(5, 3.0, 3.0, 3.0)]})
    assert can_pay(Tree.chain(4), cost, 1)  # five nodes, five tokens at best, three plain steps
    assert not can_pay(Tree([(rank,) for rank in range(4)]), cost, 1)  # two tokens at best


def test_random_heads_are_of_the_same_shape_and_guess_otherwise(small):
    heads = load_checkpoint(small.heads_folder, small.base).heads
    state = torch.random.get_rng_state()
    made = random_heads(heads)
    assert torch.random.get_rng_state().equal(state)
    assert made.config == heads.config
    assert {name: t.shape for name, t in made.state_dict().items()} == {
        name: t.shape for name, t in heads.state_dict().items()
    }
    assert not made.heads[0].output.weight.equal(heads.heads[0].output.weight)
    pruned = small_heads("medusa", draft_vocab_size=8)
    pruned.draft_vocab = torch.arange(8) + 20
    assert random_heads(pruned).draft_vocab.tolist() == pruned.draft_vocab.tolist()


def test_groups():
    prompts = [[number] for number in range(5)]
    assert groups(prompts, 1, 2) == [[[0]], [[1]]]
    assert groups(prompts, 2, 3) == [[[0], [1]], [[2], [3]]]
    assert groups(prompts, 8, 2) == [[[0], [1], [2], [3], [4], [0], [1], [2]]]


def test_prompts_are_held_out_and_must_leave_room(small):
    prompts = read_prompts(small.base, str(small.data), 3, TOKENS)
    assert len(prompts) == 3
    assert all(0 < len(ids) + TOKENS <= small.base.max_length for ids in prompts)
    with pytest.raises(MedusaError, match="lower --max-new-tokens"):
        read_prompts(small.base, str(small.data), 3, small.base.max_length)


@torch.inference_mode()
def greedy(base, ids, count):
    """The obvious loop, which no token ends."""
    text = list(ids)
    for _ in range(count):
        text.append(int(base.model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


def test_contestants_answer_alike_and_past_the_end_token(small, monkeypatch):
    ending = greedy(small.base, PROMPTS[0], TOKENS)[3]
    monkeypatch.setattr(type(small.base), "eos_ids", frozenset({ending}))
    monkeypatch.setattr(small.base.model.generation_config, "eos_token_id", ending)
    size = {"rows": 2, "max_length": 64}
    contestants = [
        Ours(OURS, "a test", small.base, None, Tree(), **size),
        Transformers(small.base),
    ]
    texts: list[str] = []
    found = measure_contest(
        contestants,
        PROMPTS[:2],
        batch=2,
        limit=2,
        max_new_tokens=TOKENS,
        repeats=3,
        progress=texts.append,
    )
    assert [contest.name for contest in found] == [OURS, "transformers"]
    assert len(texts) == 2 * 3
    for contest in found:
        assert [one.tokens for one in contest.answers] == [2 * TOKENS] * 3
        assert all(one.same for one in contest.answers)
        assert contest.ratio.low <= contest.ratio.mean <= contest.ratio.high
    for contestant in (*contestants, Transformers(small.base, lookup=True)):
        assert contestant.answer(PROMPTS[:1], TOKENS)[0] == [greedy(small.base, PROMPTS[0], TOKENS)]


def fake_vllm(folder: Path, worker: str) -> Path:
    """A Python that has a package `vllm` of our own making."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(worker)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


ECHO = """
import types
__version__ = "0.0"
class SamplingParams:
    def __init__(self, **values): self.values = values
class LLM:
    def __init__(self, **settings): self.settings = settings
    def generate(self, prompts, sampling, use_tqdm):
        assert sampling.values["ignore_eos"] and self.settings["enable_prefix_caching"] is False
        print("this is no answer")
        guesses = (self.settings["speculative_config"] or {}).get("num_speculative_tokens", 0)
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(
            token_ids=[guesses] * sampling.values["max_tokens"])]) for _ in prompts]
"""


def test_vllm_workers_start_answer_and_end(small, tmp_path):
    python = vllm_python(fake_vllm(tmp_path, ECHO))
    size = {"rows": 2, "max_length": 64}
    opened, left_out = open_vllm(KINDS, python, small.base, medusa=None, **size)
    assert [contestant.name for contestant in opened] == ["vllm", "vllm ngram"]
    assert left_out == {"vllm medusa": "no medusa heads of this base; name some with --medusa"}
    for contestant, guesses in zip(opened, (0, 4), strict=True):
        tokens, seconds = contestant.answer(PROMPTS[:2], 5)
        assert tokens == [[guesses] * 5] * 2
        assert seconds >= 0
        assert contestant.version == "0.0"
        contestant.close()
        assert contestant._process.poll() == 0


def test_vllm_that_cannot_start_is_left_out_with_its_reason(small, tmp_path):
    python = vllm_python(fake_vllm(tmp_path, "raise ValueError('no such processor')"))
    opened, left_out = open_vllm(("vllm",), python, small.base, rows=1, max_length=64, medusa=None)
    assert opened == []
    assert "ended with code 1: ValueError: no such processor" in left_out["vllm"]


def test_a_python_without_vllm_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(MedusaError, match="No such file"):
        vllm_python(tmp_path / "nowhere")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(MedusaError, match="has no vLLM"):
        vllm_python(python)
    monkeypatch.setattr("benchmarks.vllm_peers.importlib.util.find_spec", lambda name: None)
    assert vllm_python(None) is None


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_itself_with_our_heads(tmp_path):
    """One engine of each kind, all at once, and the same tokens from all."""
    from tests.eval.small import make_base, make_heads

    base = make_base(tmp_path / "base", hidden=128)  # vLLM's attention on CPUs takes heads of 32 and more
    make_heads(tmp_path / "heads", base, kind="medusa")
    opened, left_out = open_vllm(
        KINDS, sys.executable, base, rows=2, max_length=64, medusa=tmp_path / "heads"
    )
    try:
        assert left_out == {}
        for contestant in opened:
            assert isinstance(contestant, VllmContestant)
            tokens, _ = contestant.answer(PROMPTS[:2], TOKENS)
            assert tokens == [greedy(base, ids, TOKENS) for ids in PROMPTS[:2]], json.dumps(contestant.name)
    finally:
        for contestant in opened:
            contestant.close()
