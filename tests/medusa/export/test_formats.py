"""Files that are damaged, hostile or of another format: one clear error each, and nothing is written."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

from medusa.checkpoint import load_checkpoint
from medusa.errors import MedusaError
from medusa.export.formats import FORMATS, export_heads, import_heads, recognise
from medusa.export.sources import Source
from medusa.tree import Tree
from tests.medusa.export.small import TREE, foreign_heads, save_heads


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


@pytest.fixture
def there(llama, tmp_path) -> Path:
    """Medusa's own files."""
    folder = tmp_path / "there"
    folder.mkdir()
    torch.save(foreign_heads(llama).state_dict(), folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(
        json.dumps(
            {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": str(llama.path)}
        )
    )
    return folder


def assert_refused(there: Path, message: str, **values: object) -> None:
    out = there.parent / "out"
    before = sorted(there.parent.iterdir())
    with pytest.raises(MedusaError, match=message) as caught:
        import_heads(there, out, **values)
    assert "\n" not in str(caught.value)
    assert sorted(there.parent.iterdir()) == before  # no checkpoint, and no temporary folder either


@pytest.mark.parametrize("protocol", [None, 0, 2, 4, 5])
def test_a_hostile_pickle_is_not_run(there, tmp_path, protocol):
    mark = tmp_path / "mark"
    value = {"0.0.linear.weight": Hostile(f"touch {mark}")}
    path = there / "medusa_lm_head.pt"
    if protocol is None:
        torch.save(value, path)
    else:
        path.write_bytes(pickle.dumps(value, protocol))
    assert_refused(there, "Python objects, which could run a program, .* it was not loaded")
    assert not mark.exists()


@pytest.mark.parametrize("keep", [0, 1, 3, 4, 100, 5000, -1, -200])
def test_truncated_files(there, keep):
    path = there / "medusa_lm_head.pt"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(
        there, "medusa_lm_head.pt cannot be read; was it cut short|or is damaged; it was not loaded"
    )


@pytest.mark.parametrize("keep", [0, 7, 300, -1])
def test_truncated_safetensors(there, llama, keep):
    (there / "medusa_lm_head.pt").unlink()
    path = there / "medusa_lm_head.safetensors"
    safetensors.torch.save_file(foreign_heads(llama).state_dict(), path)
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(there, "medusa_lm_head.safetensors cannot be read .*cut short")


@pytest.mark.parametrize("value", [[torch.ones(2)], {"a": 1}, {1: torch.ones(2)}, torch.ones(2)])
def test_what_is_no_state_dict(there, value):
    torch.save(value, there / "medusa_lm_head.pt")
    assert_refused(there, "is not a dict of tensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1.0.linear.bias"), r"1\.0\.linear\.bias is missing"),
        (lambda t: t.update(extra=torch.ones(2)), "extra is left over"),
        (lambda t: t["2.1.weight"].fill_(torch.nan), r"NaN or infinity in 2\.1\.weight"),
        (lambda t: t["0.0.linear.weight"].fill_(-torch.inf), r"NaN or infinity in 0\.0\.linear\.weight"),
        (
            lambda t: t.update({"0.1.weight": torch.ones(258, 31)}),
            r"0\.1\.weight has shape \[258, 31\], not \[258, 32\]",
        ),
    ],
)
def test_tensors_that_do_not_fit(there, change, message):
    tensors = torch.load(there / "medusa_lm_head.pt", weights_only=True)
    change(tensors)
    torch.save(tensors, there / "medusa_lm_head.pt")
    assert_refused(there, message)


def test_heads_of_another_base(there, llama):
    tensors = {f"{h}.0.linear.{part}": torch.ones(*shape) for h in (0, 1) for part, shape in SHAPES.items()}
    torch.save(tensors | {f"{h}.1.weight": torch.ones(258, 48) for h in (0, 1)}, there / "medusa_lm_head.pt")
    (there / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    assert_refused(there, "hidden size is 48, the base .* has 32", base=str(llama.path))
    assert_refused(there, "does not say which base its heads are for; give it with --base")
    assert_refused(there, "no base at /nowhere", base="/nowhere")


SHAPES = {"weight": (48, 48), "bias": (48,)}


def test_config_files_that_make_no_sense(there):
    (there / "config.json").write_text("[]")
    assert_refused(there, "is not a JSON object")
    (there / "config.json").write_text('{"medusa_num_heads": 3')
    assert_refused(there, "not valid JSON")
    (there / "config.json").write_text('{"medusa_num_heads": -1}')
    assert_refused(there, "medusa_num_heads must be a whole number, not -1")


def test_an_index_that_leaves_its_folder(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "there/model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    assert_refused(tmp_path / "there", r"names \.\./x\.safetensors, which is not in")


def test_what_is_there_already_stays(there, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    for action in (
        lambda: import_heads(there, tmp_path / "mine"),
        lambda: export_heads(there, tmp_path / "mine", "vllm"),
    ):
        with pytest.raises(MedusaError, match="not an empty folder"):
            action()
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    import_heads(there, tmp_path / "empty")
    assert load_checkpoint(tmp_path / "empty").heads.config.num_heads == 3


def test_a_wrong_format_is_told_the_right_one(there, tmp_path):
    assert_refused(there, "no heads of the format nxdi; it looks like medusa: use --from medusa", name="nxdi")
    assert_refused(there, "no format is called 'gguf'; there is: medusa, nxdi", name="gguf")
    (tmp_path / "bare").mkdir()
    assert_refused(tmp_path / "bare", "no heads in a format that is known")
    assert_refused(tmp_path / "bare", "no heads of the format vllm; give the folder", name="vllm")
    with pytest.raises(MedusaError, match="no such file or folder"):
        import_heads(tmp_path / "nothing", tmp_path / "out")


def test_every_format_is_recognised_as_itself(llama, there, tmp_path):
    made = save_heads(tmp_path / "made", llama)
    assert recognise(Source.open(there)) == "medusa"
    for name in FORMATS:
        if name != "speculators":
            folder = export_heads(made, tmp_path / name, name, base=str(llama.path))
            assert recognise(Source.open(folder)) == name
    files = {
        "medusa": "medusa_lm_head.pt",
        "nxdi": "medusa_heads.pt",
        "trtllm": "rank0.safetensors",
        "vllm": "model.safetensors",
    }
    for name, file in files.items():  # by its names alone, whatever it is called
        bare = tmp_path / f"bare-{name}{Path(file).suffix}"
        bare.write_bytes((tmp_path / name / file).read_bytes())
        assert recognise(Source.open(bare)) == name
        import_heads(bare, tmp_path / f"from-{name}", base=str(llama.path))
        assert load_checkpoint(tmp_path / f"from-{name}").tree == Tree.chain(3)


def test_our_own_checkpoint_needs_no_import(llama, tmp_path):
    made = save_heads(tmp_path / "made", llama)
    with pytest.raises(MedusaError, match="is a checkpoint of this kit already"):
        import_heads(made, tmp_path / "here")


def test_the_tree_is_the_given_one_the_sources_or_a_chain(there, tmp_path):
    import_heads(there, tmp_path / "chain")
    assert load_checkpoint(tmp_path / "chain").tree == Tree.chain(3)
    import_heads(there, tmp_path / "given", tree=TREE)
    assert load_checkpoint(tmp_path / "given").tree == TREE
    (there / "medusa_choices.json").write_text("[[0], [1], [0, 2]]")
    import_heads(there, tmp_path / "sources")
    assert load_checkpoint(tmp_path / "sources").tree == Tree([(0,), (1,), (0, 2)])
    assert_refused(there, "needs 4 heads and there are 3", tree=Tree.chain(4))


def test_where_heads_come_from_is_kept(there, tmp_path):
    (there / "provenance.json").write_text('{"command": ["elsewhere"]}')
    import_heads(there, tmp_path / "here")
    imported = load_checkpoint(tmp_path / "here").provenance["imported"]
    assert imported["format"] == "medusa" and imported["source"] == "there"
    assert list(imported["sha256"]) == ["medusa_lm_head.pt"]
    assert imported["provenance"] == {"command": ["elsewhere"]}


def test_weights_too_large_for_the_dtype(llama, tmp_path):
    made = save_heads(tmp_path / "made", llama, scale=1e6)
    with pytest.raises(MedusaError, match=r"too large for torch\.float16; export in another --dtype"):
        export_heads(made, tmp_path / "there", "medusa", base=str(llama.path), dtype=torch.float16)
    export_heads(made, tmp_path / "there", "medusa", base=str(llama.path), dtype=torch.bfloat16)
    state = torch.load(tmp_path / "there/medusa_lm_head.pt", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
