from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa.data.shards import MANIFEST, open_shard, read_manifest
from medusa.errors import MedusaError


def test_what_is_no_shard_says_which_file_to_remove(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.safetensors"
    for content in (None, b"", b"something else"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(MedusaError, match=f"{path} is missing or damaged .*remove that file"):
            open_shard(path)
    save_file({"hidden": torch.zeros(1)}, path)
    with pytest.raises(MedusaError, match="it has no conversations.*remove that file"):
        open_shard(path)


@pytest.mark.parametrize("content", ["[]", "5", '{"format": 1}'])
def test_a_manifest_of_something_else_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(MedusaError, match="not a hidden-state cache's; give another folder"):
        read_manifest(tmp_path)


def test_a_manifest_that_was_cut_says_to_remove_it(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"format": 1, "shar')
    with pytest.raises(MedusaError, match=r"manifest\.json is missing or damaged; remove that file"):
        read_manifest(tmp_path)
