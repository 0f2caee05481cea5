"""`--weights int8`: every mode decodes with the same INT8 base, and the results say so."""

from __future__ import annotations

import json

import jsonschema
import pytest

from eval.__main__ import main
from eval.peers import open_peers
from eval.results import load, schema
from medusa.base import load_base
from medusa.errors import MedusaError
from tests.eval.test_run import arguments


def test_a_run_with_int8_weights(small, tmp_path, capsys):
    out = tmp_path / "int8"
    words = arguments(small, out, "--weights", "int8", "--max-new-tokens", "24")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "float32, int8 weights" in " ".join(shown.split())
    found = load(out)
    assert found.settings.weights == "int8"
    assert found.lossless.different == 0
    assert found.lossless.checked > 0
    assert found.acceptance_length > 1
    # What is counted is the base, however it is kept.
    assert found.checkpoint.base_parameters == sum(p.numel() for p in small.base.model.parameters())
    jsonschema.validate(json.loads((out / "results.json").read_text()), json.loads(schema()))
    assert "int8 weights" in (out / "report.html").read_text()
    assert "int8 weights" in (out / "summary.md").read_text()
    full = tmp_path / "full"
    assert main(arguments(small, full)) == 0
    assert load(full).settings.weights == "full"
    capsys.readouterr()
    assert main(["table", str(full), str(out), "--markdown"]) == 0
    assert "| weights | full | int8 |" in capsys.readouterr().out


def test_vllm_does_not_stand_beside_int8_weights(small):
    base = load_base(str(small.base_folder), weights="int8")
    how = {"dtype": "float32", "batch": 1, "max_length": 64, "vllm_url": "http://localhost:1/v1"}
    peers, left_out = open_peers("auto", base, **how)
    assert [peer.name for peer in peers] == ["transformers"]
    assert "full weights" in left_out["vllm"]
    with pytest.raises(MedusaError, match="vllm cannot stand beside --weights int8"):
        open_peers("vllm", base, **how)
