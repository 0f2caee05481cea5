"""From foreign heads to the kit's and back: what a pruned vocabulary becomes, and what a base must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.errors import MedusaError
from medusa.export.foreign import Foreign, extended, from_checkpoint, remarks, shortened, to_heads
from medusa.export.layout import HeadTensors
from medusa.heads import HeadsConfig
from tests.medusa.export.small import PRUNED, save_heads


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(1, 12), more=st.integers(0, 9), hidden=st.integers(1, 6), seed=st.integers(0, 9999))
def test_an_extended_vocabulary_keeps_the_best_guess_and_all_above_the_mean(rows, more, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, hidden, generator=generator, dtype=torch.float64)
    vocab = torch.randperm(rows + more, generator=generator)[:rows]
    x = torch.randn(20, hidden, generator=generator, dtype=torch.float64) - 0.5
    before, after = x @ matrix.T, x @ extended(matrix, vocab, rows + more).T
    assert after[:, vocab].allclose(before)
    assert after.amax(dim=1).allclose(
        before.amax(dim=1)
    )  # a zero row would win where all logits are negative
    for row in range(len(x)):
        above = int((before[row] > before[row].mean() + 1e-9).sum())
        best = vocab[before[row].topk(above).indices]
        assert after[row].topk(above).indices.equal(best)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 12),
    more=st.integers(2, 9),
    heads=st.integers(1, 3),
    seed=st.integers(0, 9999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_shortened_undoes_extended(rows, more, heads, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    vocab = torch.randperm(rows + more, generator=generator)[:rows]
    made = [torch.randn(rows, 5, generator=generator).to(dtype) for _ in range(heads)]
    whole = [extended(matrix, vocab, rows + more) for matrix in made]
    found = shortened(HeadTensors([[]], whole))
    if rows == 1:  # its own mean: every row is the same
        return
    if not (whole[0][1:] == whole[0][:-1]).all(dim=1).any():  # no two fillers side by side: left as it is
        assert found.draft_vocab is None
        return
    assert found.draft_vocab.equal(vocab.sort().values)
    for matrix, kept in zip(made, found.lm_heads, strict=True):
        assert kept.equal(matrix[vocab.argsort()])


def test_padding_rows_are_no_pruning():
    matrix = torch.randn(10, 4)
    matrix[7:] = 0
    assert shortened(HeadTensors([[]], [matrix])).draft_vocab is None


def foreign(lm_heads=None, hidden: int = 32, **values) -> Foreign:
    pair = (torch.randn(hidden, hidden), torch.randn(hidden))
    return Foreign("medusa", Path("there"), HeadTensors([[pair], [pair]], lm_heads), **values)


def test_lm_heads_equal_to_the_bases_are_shared(llama):
    weight = llama.model.get_output_embeddings().weight
    assert to_heads(foreign([weight, weight.clone()]), llama).config.lm_head == "shared"
    assert to_heads(foreign([weight]), llama).config.lm_head == "shared"
    assert to_heads(foreign(), llama).config.lm_head == "shared"
    other = weight.clone()
    other[5, 3] += 1
    heads = to_heads(foreign([weight, other]), llama)
    assert heads.config.lm_head == "own"
    assert heads.lm_head[1].equal(other)
    assert to_heads(foreign([other]), llama).lm_head.shape == (2, llama.vocab_size, llama.hidden_size)


def test_heads_of_another_base(llama):
    with pytest.raises(MedusaError, match=r"hidden size is 48, the base .* has 32.*--base"):
        to_heads(foreign(hidden=48), llama)
    with pytest.raises(MedusaError, match=r"vocabulary has 300 tokens, the base .* has 258.*--base"):
        to_heads(foreign([torch.randn(300, 32)] * 2), llama)
    with pytest.raises(MedusaError, match="vocabulary has 1000 tokens"):
        to_heads(foreign(vocab_size=1000), llama)


def test_sequential_heads_are_refused_with_the_recipe(llama, tmp_path):
    save_heads(tmp_path / "heads", llama, kind="hydra")
    with pytest.raises(MedusaError, match=r"hydra heads.*recipes/smollm2-135m-medusa\.yaml"):
        from_checkpoint(tmp_path / "heads", llama, "NxDI")
    assert Path(__file__).parents[3].joinpath("recipes/smollm2-135m-medusa.yaml").is_file()


def test_a_checkpoint_gives_whole_matrices(llama, tmp_path):
    save_heads(tmp_path / "own", llama, pruned=True, lm_head="own", num_layers=2)
    checkpoint, tensors = from_checkpoint(tmp_path / "own", llama, "NxDI")
    assert [len(head) for head in tensors.blocks] == [2, 2, 2]
    for matrix, rows in zip(tensors.lm_heads, checkpoint.heads.lm_head, strict=True):
        assert matrix.shape == (258, 32)
        assert matrix[PRUNED].equal(rows)
    save_heads(tmp_path / "shared", llama)
    _, tensors = from_checkpoint(tmp_path / "shared", llama, "NxDI")
    assert len(tensors.lm_heads) == 1
    assert tensors.lm_heads[0].equal(llama.model.get_output_embeddings().weight)


def test_what_was_changed_is_said():
    config = HeadsConfig("medusa", 3, 32, 258, draft_vocab_size=40)
    assert [text.split()[:3] for text in remarks(config)] == [
        ["the", "base's", "LM"],
        ["the", "40", "tokens"],
    ]
    assert remarks(HeadsConfig("medusa", 3, 32, 258, lm_head="own")) == []
