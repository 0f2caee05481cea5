"""A base and its heads as one folder for NxDI, read as its loader reads it; and what it cannot hold."""

from __future__ import annotations

import json

import pytest
import torch

from medusa.base import load_base
from medusa.checkpoint import load_checkpoint, save_tree
from medusa.errors import MedusaError
from medusa.export import nxdi
from medusa.export.formats import export_heads, import_heads
from medusa.tree import Tree
from tests.medusa.export.small import TREE, assert_same_heads, foreign_heads, logits, save_heads


@pytest.mark.parametrize("changes", [{}, {"lm_head": "own"}, {"pruned": True}])
def test_round_trip(llama, tmp_path, changes):
    made = save_heads(tmp_path / "made", llama, **changes)
    export_heads(made, tmp_path / "there", "nxdi", base=str(llama.path))
    assert Tree(json.loads((tmp_path / "there/medusa_tree.json").read_text())) == TREE
    assert load_base(str(tmp_path / "there"), dtype=torch.float32).fingerprint == llama.fingerprint
    import_heads(tmp_path / "there", tmp_path / "here")  # the base is there
    found, expected = load_checkpoint(tmp_path / "here", llama), load_checkpoint(made, llama)
    assert found.heads.config == expected.heads.config
    assert found.tree == TREE
    assert_same_heads(made, tmp_path / "here", llama)


def test_the_file_loads_into_its_modules(llama, tmp_path):
    """modeling_llama.py lines 1177-1187: one attribute of the model for each head, which gives the names."""
    made = save_heads(tmp_path / "made", llama, lm_head="own")
    export_heads(made, tmp_path / "there", "nxdi", base=str(llama.path))
    model = torch.nn.Module()
    for number, head in enumerate(foreign_heads(llama)):
        setattr(model, f"medusa_head_{number}", head)
    model.load_state_dict(torch.load(tmp_path / "there/medusa_heads.pt"), strict=True)
    hidden = torch.randn(9, 32)
    expected = torch.stack([getattr(model, f"medusa_head_{number}")(hidden) for number in range(3)])
    torch.testing.assert_close(logits(load_checkpoint(made, llama).heads, llama, hidden), expected)


@pytest.mark.parametrize(
    ("changes", "tree", "message"),
    [
        ({"num_layers": 2}, TREE, r"exactly one; train some with .* heads\.num_layers=1"),
        ({"kind": "hydra"}, TREE, r"hydra heads.*recipes/smollm2-135m-medusa\.yaml"),
        (
            {},
            Tree([(rank,) for rank in range(11)]),
            "rank 10, and NxDI's heads give 10 guesses, ranks 0 to 9",
        ),
        ({}, Tree(), "its tree is empty"),
    ],
)
def test_what_nxdi_cannot_hold(llama, tmp_path, changes, tree, message):
    made = save_heads(tmp_path / "made", llama, **changes)
    save_tree(made, tree)
    with pytest.raises(MedusaError, match=message):
        export_heads(made, tmp_path / "there", "nxdi", base=str(llama.path))
    assert not (tmp_path / "there").exists()


def test_a_family_that_nxdi_reads_no_heads_of(llama, tmp_path, monkeypatch):
    made = save_heads(tmp_path / "made", llama)
    monkeypatch.setattr(llama.config, "model_type", "qwen3")
    with pytest.raises(MedusaError, match="is a qwen3, and NxDI reads medusa heads of llama"):
        nxdi.export(made, tmp_path / "there", llama)


def test_two_blocks_are_not_nxdis(llama, tmp_path):
    (tmp_path / "there").mkdir()
    state = {
        f"medusa_head_{h}.{name}": tensor
        for h, head in enumerate(foreign_heads(llama, layers=2))
        for name, tensor in head.state_dict().items()
    }
    torch.save(state, tmp_path / "there/medusa_heads.pt")
    with pytest.raises(MedusaError, match="is left over"):
        import_heads(tmp_path / "there", tmp_path / "here", base=str(llama.path))
