"""The speculators format has no Medusa: both ways say so, and what to use."""

from __future__ import annotations

import pytest

from medusa.errors import MedusaError
from medusa.export.formats import export_heads, import_heads
from tests.medusa.export.small import save_heads


def test_export(llama, tmp_path):
    made = save_heads(tmp_path / "made", llama)
    with pytest.raises(MedusaError, match="speculators has no Medusa.*--format vllm"):
        export_heads(made, tmp_path / "there", "speculators")
    assert not (tmp_path / "there").exists()


def test_import(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/config.json").write_text('{"speculators_model_type": "eagle3"}')
    with pytest.raises(MedusaError, match="speculator of kind eagle3.*nothing to import"):
        import_heads(tmp_path / "there", tmp_path / "here")
