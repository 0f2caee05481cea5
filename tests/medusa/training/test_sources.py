"""What a recipe names: token frequencies smoothed by the base, and only the first answers if asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa.data.conversations import load_conversations
from medusa.data.states import OnlineStates, build_states
from medusa.training import load_recipe, train
from medusa.training.batches import draft_lookup, make_batch
from medusa.training.objective import Objective
from medusa.training.sources import First, token_frequencies
from tests.medusa.training.test_objective import make_heads
from tests.medusa.training.tiny import VOCAB, Tiny, make_answers


def test_frequencies_are_counts_with_the_base_as_tie_breaker(tiny: Tiny) -> None:
    source = tiny.train
    states = source.get(range(source.num_segments))
    counts = torch.bincount(states.tokens, minlength=VOCAB)
    frequencies = token_frequencies(source, tiny.base)
    weight = tiny.base.model.get_output_embeddings().weight
    expected = (states.hidden.float() @ weight.T).softmax(-1).sum(0).double()
    # All of a tiny cache's places are taken, so that the sum can be stated exactly.
    torch.testing.assert_close(frequencies, counts + expected / 100, rtol=1e-4, atol=1e-4)


def test_first_answers_only(tiny: Tiny) -> None:
    first = First(tiny.train, 5)
    assert first.num_segments == len(first.lengths) == 5
    assert first.num_tokens == int(tiny.train.lengths[:5].sum())
    assert torch.equal(first.get([4]).tokens, tiny.train.get([4]).tokens)


@pytest.fixture
def conversations(tiny: Tiny, tmp_path: Path) -> Path:
    """Distilled conversations of one and two turns, the second answer in its own context."""
    words = tiny.base.tokenizer.convert_ids_to_tokens
    answers = [" ".join(words(answer[:-1])) for answer in make_answers(12, 5)]
    rows = []
    for number, (first, second) in enumerate(zip(answers[::2], answers[1::2], strict=True)):
        messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": first}]
        finish = ["stop"]
        if number % 2:
            messages += [{"role": "user", "content": "w9"}, {"role": "assistant", "content": second}]
            finish.append("length")
        rows.append({"id": f"row-{number}", "messages": messages, "source": "tiny", "finish": finish})
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_online_states_give_the_loss_of_the_cache(
    tiny: Tiny, conversations: Path, tmp_path: Path, kind: str
) -> None:
    rows = load_conversations(conversations)
    cache = build_states(tiny.base, rows, tmp_path / "states", progress=False)
    online = OnlineStates(tiny.base, rows)
    assert online.lengths.tolist() == cache.lengths.tolist()
    assert cache.num_segments == 9
    heads = make_heads(kind)
    objective = Objective(heads, tiny.base)
    losses = []
    for source in (cache, online):
        batch = make_batch(source.get([7, 2, 4]), 3, draft_lookup(heads.draft_vocab, VOCAB))
        counts = (batch.targets >= 0).sum(1)
        assert counts.min() > 5
        losses.append(objective(batch.hidden, batch.tokens, batch.targets, counts)[0])
    assert losses[0] > 1
    assert torch.equal(losses[0], losses[1])


def test_a_recipe_can_train_online(tiny: Tiny, conversations: Path, tmp_path: Path) -> None:
    data = {"train": str(conversations), "validation": str(conversations), "online": True, "limit": 6}
    recipe = load_recipe(tiny.recipe_file(tmp_path / "recipe.yaml", data=data, training={"epochs": 1}))
    result = train(recipe, tmp_path / "out")
    assert result.steps == result.total_steps >= 1
    assert result.best["positions"] > 50
