"""Heads out of vLLM's format: what `vllm.py` writes comes back, and what vLLM would drop in silence is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from medusa.checkpoint import load_checkpoint
from medusa.errors import MedusaError
from medusa.export.formats import export_heads, import_heads
from medusa.tree import Tree
from tests.medusa.export.small import PRUNED, assert_same_heads, save_heads


@pytest.mark.parametrize("changes", [{}, {"num_layers": 2}, {"lm_head": "own"}, {"pruned": True}])
def test_round_trip(llama, tmp_path, changes):
    made = save_heads(tmp_path / "made", llama, **changes)
    export_heads(made, tmp_path / "there", "vllm", base=str(llama.path))
    import_heads(tmp_path / "there", tmp_path / "here", base=str(llama.path))
    found, expected = load_checkpoint(tmp_path / "here", llama), load_checkpoint(made, llama)
    assert found.heads.config == expected.heads.config
    for name, tensor in expected.heads.state_dict().items():
        assert found.heads.state_dict()[name].equal(tensor), name
    assert found.tree == Tree.chain(3)
    assert_same_heads(made, tmp_path / "here", llama)


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


def change_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def there(llama, tmp_path) -> Path:
    made = save_heads(tmp_path / "made", llama, pruned=True)
    return export_heads(made, tmp_path / "there", "vllm", base=str(llama.path))


def test_keys_that_vllm_rewrites_are_read_as_it_reads_them(llama, there, tmp_path):
    change_config(there, num_heads=None, medusa_num_heads=3, num_hidden_layers=None, medusa_num_layers=1)
    import_heads(there, tmp_path / "here", base=str(llama.path))
    assert load_checkpoint(tmp_path / "here", llama).heads.config.num_heads == 3


def test_no_biases_are_zero_ones(llama, there, tmp_path):
    change_tensors(there, lambda t: [t.pop(name) for name in list(t) if name.endswith("bias")])
    change_config(there, medusa_fc_bias=None)
    import_heads(there, tmp_path / "here", base=str(llama.path))
    heads = load_checkpoint(tmp_path / "here", llama).heads
    assert not any(block.linear.bias.any() for head in heads.heads for block in head)


def test_a_whole_lm_head_is_cut_by_the_token_map(llama, there, tmp_path):
    whole = llama.model.get_output_embeddings().weight.clone()
    change_tensors(there, lambda t: t.update({"lm_head.weight": whole}))
    import_heads(there, tmp_path / "here", base=str(llama.path))
    heads = load_checkpoint(tmp_path / "here", llama).heads
    assert heads.config.lm_head == "shared"
    assert heads.draft_vocab.tolist() == PRUNED


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"medusa_fc_bias": None}, None, r'leaves out without a word unless .* "medusa_fc_bias": true'),
        ({"truncated_vocab_size": 258}, None, "holds a token_map, and config.json says"),
        ({}, lambda t: t.pop("token_map"), "holds no token_map"),
        (
            {},
            lambda t: t.update(token_map=torch.zeros(104, dtype=torch.long)),
            "104 distinct token ids below 258",
        ),
        ({}, lambda t: t.update(token_map=t["token_map"].float()), "104 distinct token ids below 258"),
        ({}, lambda t: t.update(token_map=t["token_map"] + 100), "104 distinct token ids below 258"),
        ({"original_lm_head": False}, None, "own LM heads over a pruned vocabulary"),
        ({"num_heads": 4}, None, r"blocks\.3\.layers\.0\.weight is missing"),
        ({"num_heads": "3"}, None, "num_heads must be a whole number, not '3'"),
        ({"num_hidden_layers": 2}, None, r"blocks\.0\.layers\.1\.weight is missing"),
        ({}, lambda t: t.update(extra=torch.zeros(3)), "extra is left over"),
        (
            {},
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:90]}),
            "90 rows and the token_map 104",
        ),
        ({"vocab_size": 1000}, None, "vocabulary has 1000 tokens"),
    ],
)
def test_what_vllm_would_not_say(llama, there, tmp_path, config, change, message):
    change_config(there, **config)
    if change:
        change_tensors(there, change)
    with pytest.raises(MedusaError, match=message):
        import_heads(there, tmp_path / "here", base=str(llama.path))
    assert not (tmp_path / "here").exists()
