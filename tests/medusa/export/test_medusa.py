"""Medusa's own files: heads alone, of version 2, and merged; made by modules built as its source builds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from medusa.base import Base, load_base
from medusa.checkpoint import load_checkpoint
from medusa.errors import MedusaError
from medusa.export.formats import export_heads, import_heads
from medusa.tree import Tree
from tests.medusa.export.small import TREE, assert_same_heads, decoded, foreign_heads, logits, save_heads


def save_config(folder: Path, base: Base | None, heads: int = 3, layers: int = 1, **more: object) -> None:
    folder.mkdir(exist_ok=True)
    values = {"medusa_num_heads": heads, "medusa_num_layers": layers, **more}
    if base is not None:
        values["base_model_name_or_path"] = str(base.path)
    (folder / "config.json").write_text(json.dumps(values))


def assert_drafts(
    folder: Path, base: Base, modules: nn.ModuleList, lm_head: torch.Tensor | None = None
) -> None:
    """The checkpoint's heads give what the modules give."""
    hidden = torch.randn(20, base.hidden_size)
    found = load_checkpoint(folder, base)
    expected = [head(hidden) if lm_head is None else head(hidden) @ lm_head.T for head in modules]
    torch.testing.assert_close(logits(found.heads, base, hidden), torch.stack(expected))
    plain = decoded(found.heads, base, Tree())
    assert [tokens for tokens, _ in decoded(found.heads, base)] == [tokens for tokens, _ in plain]


@pytest.mark.parametrize(("layers", "repeat"), [(1, False), (2, False), (3, True)])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_version_1(llama, tmp_path, layers, repeat, name):
    modules = foreign_heads(llama, layers=layers, repeat=repeat)
    save_config(tmp_path / "there", llama, layers=layers)
    state = modules.state_dict()
    if name.endswith(".pt"):
        torch.save(state, tmp_path / "there" / name)
    else:  # what safetensors writes of a module with shared weights
        safetensors.torch.save_model(modules, str(tmp_path / "there" / name))
    import_heads(tmp_path / "there", tmp_path / "here")
    config = load_checkpoint(tmp_path / "here").heads.config
    assert (config.num_heads, config.num_layers, config.lm_head) == (3, layers, "own")
    assert_drafts(tmp_path / "here", llama, modules)


def test_blocks_that_a_library_left_out_are_one_module(llama, tmp_path):
    modules = foreign_heads(llama, layers=2, repeat=True)
    save_config(tmp_path / "there", llama, layers=2)
    state = {name: tensor for name, tensor in modules.state_dict().items() if ".1.linear" not in name}
    safetensors.torch.save_file(state, tmp_path / "there/medusa_lm_head.safetensors")
    import_heads(tmp_path / "there", tmp_path / "here")
    assert_drafts(tmp_path / "here", llama, modules)
    del state["2.0.linear.bias"]
    safetensors.torch.save_file(state, tmp_path / "there/medusa_lm_head.safetensors")
    with pytest.raises(MedusaError, match=r"2\.0\.linear\.bias is missing"):
        import_heads(tmp_path / "there", tmp_path / "else")


def test_version_2_shares_the_bases_lm_head(llama, tmp_path):
    modules = foreign_heads(llama, lm_head=False)
    save_config(tmp_path / "there", llama, version="2")
    safetensors.torch.save_file(modules.state_dict(), tmp_path / "there/medusa_lm_head.safetensors")
    import_heads(tmp_path / "there", tmp_path / "here")
    assert load_checkpoint(tmp_path / "here").heads.config.lm_head == "shared"
    assert_drafts(tmp_path / "here", llama, modules, llama.model.get_output_embeddings().weight)
    save_config(tmp_path / "there", llama)
    with pytest.raises(MedusaError, match='no "version": "2"'):
        import_heads(tmp_path / "there", tmp_path / "else")


def test_a_published_config_names_too_few_heads(llama, tmp_path):
    modules = foreign_heads(llama, heads=5)
    save_config(tmp_path / "there", llama, heads=2)
    torch.save(modules.state_dict(), tmp_path / "there/medusa_lm_head.pt")
    found = import_heads(tmp_path / "there", tmp_path / "here")
    assert found.note == "config.json says 2 heads and the file has 5: all are read"
    assert_drafts(tmp_path / "here", llama, modules)
    save_config(tmp_path / "there", llama, heads=6)
    with pytest.raises(MedusaError, match=r"5\.0\.linear\.weight is missing"):
        import_heads(tmp_path / "there", tmp_path / "else")


def test_heads_without_blocks_are_their_lm_heads(llama, tmp_path):
    modules = foreign_heads(llama, layers=0)
    save_config(tmp_path / "there", llama, layers=0)
    torch.save(modules.state_dict(), tmp_path / "there/medusa_lm_head.pt")
    import_heads(tmp_path / "there", tmp_path / "here")
    assert_drafts(tmp_path / "here", llama, modules)


def save_merged(
    folder: Path, base: Base, modules: nn.ModuleList, shards: int, ending: str, shift: float = 0.0
) -> None:
    """What `save_pretrained` leaves of a model with `medusa_head` in it, whose base was trained along."""
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    tensors = {
        name: tensor + shift
        for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    tensors |= {f"medusa_head.{name}": tensor for name, tensor in modules.state_dict().items()}
    config = json.loads((folder / "config.json").read_text())
    config |= {"medusa_num_heads": len(modules), "medusa_num_layers": len(modules[0]) - 1}
    config["architectures"] = ["MedusaModelLlama"]
    (folder / "config.json").write_text(json.dumps(config))
    stem = "model" if ending == "safetensors" else "pytorch_model"
    save = safetensors.torch.save_file if ending == "safetensors" else torch.save
    places = {}
    for number in range(shards):
        name = f"{stem}.{ending}" if shards == 1 else f"{stem}-{number + 1:05d}-of-{shards:05d}.{ending}"
        part = dict(sorted(tensors.items())[number::shards])
        save(part, folder / name)
        places |= dict.fromkeys(part, name)
    if shards > 1:
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("shards", "ending"), [(1, "safetensors"), (3, "safetensors"), (1, "bin"), (2, "bin")]
)
def test_merged_models_come_out_in_two_parts(llama, tmp_path, shards, ending):
    modules = foreign_heads(llama)
    save_merged(tmp_path / "there", llama, modules, shards, ending, shift=0.25)
    import_heads(tmp_path / "there", tmp_path / "here")
    base = load_base(str(tmp_path / "here/base"), dtype=torch.float32)
    assert base.fingerprint != llama.fingerprint  # joint training changed it
    assert "medusa_num_heads" not in json.loads((tmp_path / "here/base/config.json").read_text())
    torch.testing.assert_close(base.model.model.norm.weight, llama.model.model.norm.weight + 0.25)
    assert_drafts(tmp_path / "here", base, modules)


def test_a_named_base_must_be_the_one_that_is_carried(llama, tmp_path):
    save_merged(tmp_path / "same", llama, foreign_heads(llama), 1, "safetensors")
    import_heads(tmp_path / "same", tmp_path / "here", base=str(llama.path))
    assert not (tmp_path / "here/base").exists()
    assert_drafts(tmp_path / "here", llama, foreign_heads(llama))
    save_merged(tmp_path / "other", llama, foreign_heads(llama), 1, "safetensors", shift=0.25)
    with pytest.raises(MedusaError, match="carries a base of its own"):
        import_heads(tmp_path / "other", tmp_path / "else", base=str(llama.path))
    assert not (tmp_path / "else").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 2},
        {"lm_head": "own"},
        {"pruned": True},
        {"pruned": True, "lm_head": "own", "num_layers": 3},
    ],
)
def test_round_trip(llama, tmp_path, changes):
    made = save_heads(tmp_path / "made", llama, **changes)
    export_heads(made, tmp_path / "there", "medusa", base=str(llama.path))
    config = json.loads((tmp_path / "there/config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, changes.get("num_layers", 1))
    import_heads(tmp_path / "there", tmp_path / "here", base=str(llama.path))
    found, expected = load_checkpoint(tmp_path / "here", llama), load_checkpoint(made, llama)
    assert found.heads.config == expected.heads.config
    assert found.tree == TREE
    assert_same_heads(made, tmp_path / "here", llama)


def test_a_shared_lm_head_is_in_the_file_once(llama, tmp_path):
    made = save_heads(tmp_path / "made", llama)
    export_heads(made, tmp_path / "there", "medusa", base=str(llama.path))
    state = torch.load(tmp_path / "there/medusa_lm_head.pt", weights_only=True)
    assert {name for name in state if name.endswith("1.weight")} == {"0.1.weight", "1.1.weight", "2.1.weight"}
    assert len({state[f"{h}.1.weight"].data_ptr() for h in range(3)}) == 1
    modules = foreign_heads(llama)
    modules.load_state_dict(state, strict=True)  # as Medusa loads it, but strictly
    assert_drafts(made, llama, modules)
