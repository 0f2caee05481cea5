"""What is said of heads, whoever made them."""

from __future__ import annotations

import json

import pytest
import torch

from medusa.calibration import Calibration
from medusa.errors import MedusaError
from medusa.export.describe import describe
from medusa.export.formats import export_heads
from tests.medusa.export.small import foreign_heads, save_heads


def test_a_checkpoint(llama, tmp_path):
    made = save_heads(tmp_path / "made", llama, pruned=True, num_layers=2)
    facts = describe(made)
    assert facts["accuracy"] is None
    Calibration.from_accuracies([[0.5, 0.2, 0.1], [0.4, 0.1, 0.1], [0.3, 0.1, 0.0]]).to_json(
        made / "calibration.json"
    )
    facts = describe(made)
    assert facts == describe(made / "medusa_heads.safetensors") == describe(made / "config.json")
    assert facts["kind"] == "medusa" and facts["format"] == "medusa-kit"
    assert (facts["num_heads"], facts["num_layers"], facts["lm_head"]) == (3, 2, "shared")
    assert (facts["hidden_size"], facts["vocab_size"], facts["draft_vocab_size"]) == (32, 258, 104)
    assert facts["dtype"] == "float32"
    assert facts["parameters"] == 3 * 2 * (32 * 32 + 32)
    assert facts["bytes"] == 4 * facts["parameters"] + 8 * 104
    assert facts["tree"]["width"] == 8 and facts["tree"]["depth"] == 3
    assert facts["accuracy"]["top-2"] == pytest.approx([0.7, 0.5, 0.4])
    assert 1 < facts["expected_acceptance_length"] < 4
    json.dumps(facts)


@pytest.mark.parametrize(
    ("name", "lm_head", "base"),
    [
        ("medusa", "own", "llama"),
        ("vllm", "one for all", None),
        ("trtllm", "own", None),
        ("nxdi", "own", "in the same folder"),
    ],
)
def test_foreign_heads(llama, tmp_path, name, lm_head, base):
    made = save_heads(tmp_path / "made", llama)
    facts = describe(export_heads(made, tmp_path / name, name, base=str(llama.path)))
    assert facts["format"] == name and facts["kind"] == "medusa"
    assert (facts["num_heads"], facts["num_layers"], facts["hidden_size"], facts["vocab_size"]) == (
        3,
        1,
        32,
        258,
    )
    assert facts["lm_head"] == lm_head
    assert facts["base"] == base
    assert facts["dtype"] == "float32"
    json.dumps(facts)


def test_a_bare_file(llama, tmp_path):
    torch.save(foreign_heads(llama, heads=2, layers=3).half().state_dict(), tmp_path / "some.pt")
    facts = describe(tmp_path / "some.pt")
    assert (facts["format"], facts["num_heads"], facts["num_layers"]) == ("medusa", 2, 3)
    assert facts["dtype"] == "float16"
    assert facts["base"] is None and facts["tree"] is None


def test_what_holds_no_heads(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(MedusaError, match="holds no heads; give a folder"):
        describe(tmp_path / "notes.txt")
    with pytest.raises(MedusaError, match="no heads in a format that is known"):
        describe(tmp_path)
