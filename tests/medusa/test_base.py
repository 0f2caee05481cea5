from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.base import base_folder, fetch_base, load_base, open_base, resolve_base
from medusa.errors import MedusaError
from tests.medusa.data.bases import make_model, make_tokenizer, save_base


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("bases") / "tiny")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as part:
            found |= {name: part.get_tensor(name) for name in part.keys()}
    return found


def test_a_loaded_base_is_frozen_and_knows_its_sizes(folder: Path) -> None:
    base = load_base(str(folder), dtype=torch.float32)
    assert not base.model.training
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert (base.hidden_size, base.max_length) == (32, 512)
    assert base.vocab_size == base.model.get_output_embeddings().weight.shape[0] == len(base.tokenizer)
    assert base.eos_ids == {2}


def test_without_weights_a_base_says_the_same(folder: Path) -> None:
    loaded, opened = load_base(str(folder)), open_base(str(folder))
    assert opened.model is None
    for what in ("fingerprints", "hidden_size", "vocab_size", "max_length", "eos_ids"):
        assert getattr(loaded, what) == getattr(opened, what), what


def test_several_end_of_turn_tokens_come_from_the_generation_configuration(copy: Path) -> None:
    path = copy / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [0, 2]}))
    assert open_base(str(copy)).eos_ids == load_base(str(copy)).eos_ids == {0, 2}


def test_the_fingerprint_does_not_depend_on_the_dtype_it_is_loaded_in_nor_on_shards(
    folder: Path, tmp_path: Path
) -> None:
    whole = load_base(str(folder), dtype=torch.float32)
    assert load_base(str(folder), dtype=torch.bfloat16).fingerprint == whole.fingerprint
    sharded = tmp_path / "sharded"
    whole.model.save_pretrained(sharded, max_shard_size="30KB")
    whole.tokenizer.save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert open_base(str(sharded)).fingerprint == whole.fingerprint


def test_the_fingerprint_ignores_padding_rows(folder: Path, tmp_path: Path) -> None:
    padded = tmp_path / "padded"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(folder)) + 20)
    model.save_pretrained(padded)
    AutoTokenizer.from_pretrained(folder).save_pretrained(padded)
    found = load_base(str(padded))
    assert found.fingerprint == open_base(str(folder)).fingerprint
    assert found.vocab_size == open_base(str(folder)).vocab_size + 20


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_other_weights_have_another_fingerprint(copy: Path, name: str) -> None:
    before = open_base(str(copy)).fingerprint
    values = tensors(copy)
    values[name][-1] += 1
    save_file(values, copy / "model.safetensors", metadata={"format": "pt"})
    assert open_base(str(copy)).fingerprint != before


def test_a_large_tensor_is_sampled_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    from medusa.base import weights_fingerprint

    weight = torch.zeros(40_000, 16)
    prints = set()
    for row in (None, 0, -1):
        changed = weight.clone()
        if row is not None:
            changed[row] = 1
        save_file({"w": changed}, tmp_path / "model.safetensors")
        prints.add(weights_fingerprint(tmp_path, 1, tied=False))
    assert len(prints) == 3


def test_a_stored_copy_of_a_tied_lm_head_does_not_count(tmp_path: Path) -> None:
    from medusa.base import weights_fingerprint

    weight = torch.randn(8, 4)
    save_file({"model.embed_tokens.weight": weight}, tmp_path / "model.safetensors")
    before = weights_fingerprint(tmp_path, 8, tied=True)
    both = {"model.embed_tokens.weight": weight, "lm_head.weight": weight.clone()}
    save_file(both, tmp_path / "model.safetensors")
    assert weights_fingerprint(tmp_path, 8, tied=True) == before
    assert weights_fingerprint(tmp_path, 8, tied=False) != before


def test_another_tokenizer_or_template_has_another_fingerprint(folder: Path, copy: Path) -> None:
    before = open_base(str(folder))
    tokenizer = make_tokenizer(template="{{ messages[0]['content'] }}")
    tokenizer.save_pretrained(copy)
    after = open_base(str(copy))
    assert after.template_fingerprint != before.template_fingerprint
    assert after.tokenizer_fingerprint == before.tokenizer_fingerprint
    tokenizer.add_tokens(["kettle-shaped"])
    tokenizer.save_pretrained(copy)
    assert open_base(str(copy)).tokenizer_fingerprint != before.tokenizer_fingerprint


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere/at-all", "no base at"),
        ("not a name", "no base at"),
        ("some-org/never-downloaded", "cannot get the base"),
    ],
)
def test_a_base_that_is_not_there_is_an_error_that_names_the_known_ones(name: str, words: str) -> None:
    with pytest.raises(MedusaError, match=words) as caught:
        resolve_base(name)
    assert "smollm2-135m" in str(caught.value)


def test_a_folder_that_is_no_base_is_an_error(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(MedusaError, match=r"config\.json"):
        resolve_base(str(tmp_path))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(MedusaError, match="damaged"):
        open_base(str(copy))
    weights.unlink()
    with pytest.raises(MedusaError, match=r"no \.safetensors"):
        open_base(str(copy))


def test_an_unknown_known_base() -> None:
    with pytest.raises(MedusaError, match="no known base"):
        fetch_base("gpt-5")


def test_the_real_base_is_fetched_once(smollm2: Path) -> None:
    stamp = (smollm2 / "model.safetensors").stat().st_mtime_ns
    said: list[str] = []
    assert fetch_base("smollm2-135m", log=said.append) == smollm2 == base_folder("smollm2-135m")
    assert not said
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == stamp
    base = load_base("smollm2-135m")
    assert base.model.dtype == torch.bfloat16
    assert (base.hidden_size, base.vocab_size, base.max_length, base.eos_ids) == (576, 49152, 8192, {2})
    assert "Licence: Apache-2.0" in (smollm2 / "README.md").read_text()
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())
    assert "<|im_start|>" in base.tokenizer.chat_template


def test_model_seed_is_what_makes_test_bases_differ() -> None:
    a, b = (dict(make_model(300, seed).named_parameters())["lm_head.weight"] for seed in (0, 1))
    assert not torch.equal(a, b)


def test_weights_that_the_configuration_asks_for_and_the_file_lacks(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(MedusaError, match=r"weights lack model.layers.\d+.* and \d+ more") as caught:
        load_base(str(copy))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"hidden_size": 48}, {"hidden_size": "a"}, {"model_type": "nothing"}])
def test_a_configuration_that_does_not_fit_is_one_line(copy: Path, changes: dict) -> None:
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(MedusaError, match="that transformers can") as caught:
        load_base(str(copy))
    assert "\n" not in str(caught.value)
