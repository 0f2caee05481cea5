"""TensorRT-LLM's names, its ranks, and Model Optimizer's models with heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from medusa.base import Base
from medusa.checkpoint import load_checkpoint
from medusa.errors import MedusaError
from medusa.export import trtllm
from medusa.export.formats import export_heads, import_heads
from tests.medusa.export.small import TREE, assert_same_heads, foreign_heads, logits, save_heads


@pytest.mark.parametrize("changes", [{}, {"num_layers": 2, "lm_head": "own"}, {"pruned": True}])
def test_round_trip(llama, tmp_path, changes):
    made = save_heads(tmp_path / "made", llama, **changes)
    export_heads(made, tmp_path / "there", "trtllm", base=str(llama.path))
    names = safetensors.torch.load_file(tmp_path / "there/rank0.safetensors")
    assert names["medusa_heads.2.medusa_layers.0.linear.bias"].shape == (32,)
    assert names["medusa_heads.2.lm_head.weight"].shape == (258, 32)
    config = json.loads((tmp_path / "there/config.json").read_text())
    assert config["architecture"] == "MedusaForCausalLM"
    assert config["max_draft_len"] == len(TREE.paths)
    import_heads(tmp_path / "there", tmp_path / "here", base=str(llama.path))
    found, expected = load_checkpoint(tmp_path / "here", llama), load_checkpoint(made, llama)
    assert found.heads.config == expected.heads.config
    assert found.tree == TREE
    assert_same_heads(made, tmp_path / "here", llama)


def split(folder: Path, ways: int) -> None:
    """What load_medusa_hf does for `ways` ranks: rows apart, the vocabulary padded to a multiple first."""
    whole = safetensors.torch.load_file(folder / "rank0.safetensors")
    for rank in range(ways):
        part = {"transformer.ln_f.weight": torch.ones(4)}
        for name, tensor in whole.items():
            padding = -tensor.shape[0] % ways
            padded = torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])])
            part[name] = padded.chunk(ways)[rank].contiguous()
        safetensors.torch.save_file(part, folder / f"rank{rank}.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["mapping"] = {"world_size": ways, "tp_size": ways, "pp_size": 1}
    (folder / "config.json").write_text(json.dumps(config))


def test_ranks_are_put_together(llama, tmp_path):
    made = save_heads(tmp_path / "made", llama, lm_head="own")
    export_heads(made, tmp_path / "there", "trtllm", base=str(llama.path))
    split(tmp_path / "there", 4)
    import_heads(tmp_path / "there", tmp_path / "here", base=str(llama.path))
    assert_same_heads(made, tmp_path / "here", llama)
    (tmp_path / "there/rank2.safetensors").unlink()
    with pytest.raises(MedusaError, match="is in 3 rank files and config.json says tp_size 4"):
        import_heads(tmp_path / "there", tmp_path / "else", base=str(llama.path))


def save_unified(
    folder: Path, base: Base, layers: int, extra: dict[str, torch.Tensor]
) -> torch.nn.ModuleList:
    modules = foreign_heads(base, layers=layers)
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors") | extra
    tensors |= {f"medusa_heads.{name}": tensor for name, tensor in modules.state_dict().items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["medusa"] = {"num_medusa_heads": 3, "num_medusa_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return modules


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_of_model_optimizer(llama, tmp_path, layers):
    modules = save_unified(tmp_path / "there", llama, layers, {})
    import_heads(tmp_path / "there", tmp_path / "here", base=str(llama.path))
    hidden = torch.randn(9, 32)
    found = load_checkpoint(tmp_path / "here", llama).heads
    expected = torch.stack([head(hidden) for head in modules])
    torch.testing.assert_close(logits(found, llama, hidden), expected)


def test_quantized_heads_are_refused(llama, tmp_path):
    scale = {"medusa_heads.0.0.linear.weight_scale": torch.ones(1)}
    save_unified(tmp_path / "there", llama, 1, scale)
    with pytest.raises(MedusaError, match=r"is quantized \(medusa_heads\.0\.0\.linear\.weight_scale\)"):
        import_heads(tmp_path / "there", tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_another_activation_would_run_other_heads(llama, tmp_path, monkeypatch):
    made = save_heads(tmp_path / "made", llama)
    monkeypatch.setattr(llama.config, "hidden_act", "gelu")
    with pytest.raises(MedusaError, match="hidden_act gelu.*silu only"):
        trtllm.export(made, tmp_path / "there", llama)
    assert not (tmp_path / "there").exists()
