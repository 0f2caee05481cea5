"""A checkpoint comes back whole, or loading says exactly what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

from medusa import checkpoint as checkpoint_module
from medusa.base import load_base
from medusa.calibration import Calibration
from medusa.checkpoint import load_checkpoint, save_checkpoint, save_tree
from medusa.errors import MedusaError
from medusa.heads import HeadsConfig, build_heads
from medusa.tree import Tree
from tests.medusa.training.tiny import HIDDEN, VOCAB, Tiny, make_base, make_tiny

TREE = Tree([(0,), (1,), (0, 0)])
CALIBRATION = Calibration.from_accuracies([[0.5, 0.2], [0.4, 0.1], [0.3, 0.1]])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("checkpoint"))


def random_heads(kind: str = "medusa", **settings):
    config = {"num_heads": 3, "hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": 40, **settings}
    heads = build_heads(HeadsConfig(kind=kind, **config))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
        if heads.draft_vocab is not None:
            heads.draft_vocab.copy_(torch.randperm(VOCAB)[: config["draft_vocab_size"]].sort().values)
    return heads


@pytest.fixture
def saved(tiny: Tiny, tmp_path: Path) -> Path:
    save(tmp_path / "heads", tiny)
    return tmp_path / "heads"


def save(folder: Path, tiny: Tiny, heads=None, **settings) -> None:
    heads = heads or random_heads()
    values = {"base": tiny.base, "provenance": {"made": "by a test"}, "calibration": CALIBRATION, **settings}
    save_checkpoint(
        folder, heads, settings.pop("tree", TREE), **{k: v for k, v in values.items() if k != "tree"}
    )


def rewrite(folder: Path, change) -> None:
    path = folder / "medusa_heads.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("settings", [{}, {"lm_head": "own", "num_layers": 2}, {"draft_vocab_size": None}])
def test_round_trip(tiny: Tiny, tmp_path: Path, kind: str, settings: dict) -> None:
    heads = random_heads(kind, **settings)
    save(tmp_path / "heads", tiny, heads)
    found = load_checkpoint(tmp_path / "heads", tiny.base)
    assert found.tree == TREE
    assert found.calibration == CALIBRATION
    assert found.provenance == {"made": "by a test"}
    assert found.heads.config == heads.config
    assert found.heads.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(found.heads.state_dict()[name], tensor), name
    assert not found.heads.training
    assert not any(parameter.requires_grad for parameter in found.heads.parameters())
    hidden, path = torch.randn(5, HIDDEN), torch.randn(5, 2, HIDDEN)
    torch.testing.assert_close(found.heads.features(2, hidden, path), heads.features(2, hidden, path))


def test_weights_may_be_stored_in_bfloat16_and_load_in_the_base_dtype(tiny: Tiny, tmp_path: Path) -> None:
    heads = random_heads()
    save(tmp_path / "heads", tiny, heads, dtype=torch.bfloat16)
    stored = safetensors.torch.load_file(tmp_path / "heads/medusa_heads.safetensors")
    assert {t.dtype for name, t in stored.items() if name != "draft_vocab"} == {torch.bfloat16}
    assert stored["draft_vocab"].dtype == torch.int64
    loaded = load_checkpoint(tmp_path / "heads", tiny.base).heads
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert {p.dtype for p in load_checkpoint(tmp_path / "heads").heads.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.draft_vocab, heads.draft_vocab)


def test_a_tensor_missing_does_not_load_as_random(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.pop("heads.1.0.linear.weight"))
    with pytest.raises(MedusaError, match=r"heads\.1\.0\.linear\.weight is missing"):
        load_checkpoint(saved)


def test_biases_dropped_are_missed(saved: Path) -> None:
    rewrite(saved, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("bias")])
    with pytest.raises(
        MedusaError, match=r"heads\.0\.0\.linear\.bias is missing.*heads\.2\.0\.linear\.bias is missing"
    ):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(extra=torch.zeros(2)), "extra is left over"),
        (
            lambda t: t.update({"heads.0.0.linear.bias": torch.zeros(HIDDEN + 1)}),
            r"heads\.0\.0\.linear\.bias has shape \[33\], not \[32\]",
        ),
        (
            lambda t: t["heads.2.0.linear.weight"].fill_(torch.nan),
            r"NaN or infinity in heads\.2\.0\.linear\.weight",
        ),
        (
            lambda t: t["heads.0.0.linear.bias"].fill_(torch.inf),
            r"NaN or infinity in heads\.0\.0\.linear\.bias",
        ),
        (lambda t: t["draft_vocab"].fill_(3), "distinct token ids below 64"),
        (lambda t: t["draft_vocab"].add_(VOCAB), "distinct token ids below 64"),
        (lambda t: t.update(draft_vocab=t["draft_vocab"].float()), "draft_vocab has type torch.float32"),
    ],
)
def test_wrong_tensors(saved: Path, change, message: str) -> None:
    rewrite(saved, change)
    with pytest.raises(MedusaError, match=message):
        load_checkpoint(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(saved: Path, keep: int) -> None:
    path = saved / "medusa_heads.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MedusaError, match=r"cannot be read .*cut short"):
        load_checkpoint(saved)


@pytest.mark.parametrize("name", ["config.json", "medusa_heads.safetensors", "tree.json"])
def test_a_file_missing(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(MedusaError, match=f"has no {name}"):
        load_checkpoint(saved)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="is not a folder"):
        load_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=9), "configuration of format 1"),
        (lambda c: c.pop("base"), "configuration of format 1"),
        (lambda c: c["heads"].update(num_haeds=3), "did you mean 'num_heads'"),
        (lambda c: c["heads"].pop("kind"), "kind missing"),
        (lambda c: c["heads"].update(kind="eagle"), "unknown kind 'eagle'"),
        (lambda c: c["heads"].update(num_heads=2), r"heads\.2\.0\.linear\.weight is left over"),
    ],
)
def test_wrong_configuration(saved: Path, change, message: str) -> None:
    config = json.loads((saved / "config.json").read_text())
    change(config)
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(MedusaError, match=message):
        load_checkpoint(saved)


def test_a_tree_deeper_than_the_heads(tiny: Tiny, saved: Path) -> None:
    """3 heads with a depth-4 tree."""
    Tree.chain(4).to_json(saved / "tree.json")
    with pytest.raises(MedusaError, match="needs 4 heads and there are 3"):
        load_checkpoint(saved)
    with pytest.raises(MedusaError, match="needs 4 heads and there are 3"):
        save(saved, tiny, tree=Tree.chain(4))
    with pytest.raises(MedusaError, match="needs 4 heads and there are 3"):
        save_tree(saved, Tree.chain(4))


def test_a_tree_of_ranks_that_heads_do_not_have(saved: Path) -> None:
    Tree([(40,)]).to_json(saved / "tree.json")
    with pytest.raises(MedusaError, match="rank 40 asked of heads that know only 40 tokens"):
        load_checkpoint(saved)


def test_the_tree_alone_can_be_replaced(saved: Path) -> None:
    save_tree(saved, Tree.chain(3))
    assert load_checkpoint(saved).tree == Tree.chain(3)
    with pytest.raises(MedusaError, match="not a heads checkpoint"):
        save_tree(saved / "elsewhere", Tree.chain(3))


def test_counts_of_other_heads(saved: Path) -> None:
    Calibration.from_accuracies([[0.5, 0.2]]).to_json(saved / "calibration.json")
    with pytest.raises(MedusaError, match="is of 1 heads, not 3"):
        load_checkpoint(saved)


def test_heads_of_another_base(tiny: Tiny, saved: Path, tmp_path: Path) -> None:
    other = make_base(tmp_path / "other", seed=1)
    with pytest.raises(
        MedusaError, match=r"was trained for .*: fingerprint [0-9a-f]{12} at training, [0-9a-f]{12} now"
    ):
        load_checkpoint(saved, other)
    with pytest.raises(MedusaError, match="hidden size 32 at training, 48 now"):
        load_checkpoint(saved, make_base(tmp_path / "wider", hidden=48))


def test_heads_of_another_tokenizer(tiny: Tiny, saved: Path, tmp_path: Path) -> None:
    other = make_base(tmp_path / "other", words="x")  # the same weights, other words
    assert other.fingerprint == tiny.base.fingerprint
    with pytest.raises(MedusaError, match=r"tokenizer fingerprint [0-9a-f]{12} at training") as error:
        load_checkpoint(saved, other)
    assert ": fingerprint" not in str(error.value)


def resized(tiny: Tiny, folder: Path, rows: int):
    model = type(tiny.base.model).from_pretrained(tiny.folder / "base")
    model.resize_token_embeddings(rows)
    model.save_pretrained(folder)
    tiny.base.tokenizer.save_pretrained(folder)
    return load_base(str(folder), dtype=torch.float32)


def test_a_base_padded_since_is_the_same_base(tiny: Tiny, saved: Path, tmp_path: Path) -> None:
    padded = resized(tiny, tmp_path / "padded", 128)
    assert padded.vocab_size == 128 > len(padded.tokenizer)
    found = load_checkpoint(saved, padded)
    weight = padded.model.get_output_embeddings().weight
    assert torch.equal(found.heads.draft_weight(1, weight), weight[found.heads.draft_vocab])


def test_a_base_cut_below_what_heads_guess(tiny: Tiny, tmp_path: Path) -> None:
    heads = random_heads(draft_vocab_size=None)
    save(tmp_path / "heads", tiny, heads)
    fewer = dataclasses.replace(resized(tiny, tmp_path / "cut", 60), fingerprint=tiny.base.fingerprint)
    with pytest.raises(MedusaError, match="LM head of 64 rows at training, 60 now, and id 63 is guessed"):
        load_checkpoint(tmp_path / "heads", fewer)


def test_heads_that_are_not_finite_are_not_saved(tiny: Tiny, saved: Path) -> None:
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    heads = random_heads()
    heads.heads[1][0].linear.weight.data[0, 0] = torch.nan
    with pytest.raises(MedusaError, match=r"NaN or infinity in heads\.1\.0\.linear\.weight"):
        save(saved, tiny, heads)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_a_block_repeated_by_reference_is_not_saved(tiny: Tiny, tmp_path: Path) -> None:
    """Depth 2 with one block twice: both layers would train and store one weight."""
    heads = random_heads(num_layers=2)
    heads.heads[0] = torch.nn.Sequential(*[heads.heads[0][0]] * 2)
    with pytest.raises(MedusaError, match="share one weight"):
        save(tmp_path / "heads", tiny, heads)
    assert not (tmp_path / "heads" / "config.json").exists()


def test_a_save_cut_off_anywhere_leaves_the_old_or_the_new(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies at each rename in turn, as SIGKILL would: no clean-up runs. Other files of the folder stay."""
    old, new = random_heads(), random_heads()
    real_replace, real_rename, left = os.replace, os.rename, [0]

    class Killed(BaseException):
        pass

    def dying(real):
        def call(*args):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real(*args)

        return call

    outcomes = []
    for moment in range(40):
        folder = tmp_path / str(moment)
        save(folder, tiny, old)
        (folder / "training").mkdir()
        (folder / "training" / "state.pt").write_text("kept")
        left[0] = moment
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying(real_replace))
            patch.setattr(os, "rename", dying(real_rename))
            try:
                save(folder, tiny, new, tree=Tree.chain(2))
                done = True
            except Killed:
                done = False
        found = load_checkpoint(folder, tiny.base)
        is_new = found.tree == Tree.chain(2)
        expected = (new if is_new else old).state_dict()
        assert all(torch.equal(found.heads.state_dict()[name], tensor) for name, tensor in expected.items())
        assert (folder / "training" / "state.pt").read_text() == "kept"
        assert not (folder / checkpoint_module._READY).exists()
        outcomes.append(is_new)
        if done:
            break
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert outcomes.count(True) > 3  # some deaths fell between the moves


def test_the_card_has_the_hub_metadata(tiny: Tiny, tmp_path: Path) -> None:
    card = {
        "license": "apache-2.0",
        "base_model": "org/base",
        "language": "en",
        "figures": {"speedup": "2.00"},
    }
    save(tmp_path / "heads", tiny, card=card)
    text = (tmp_path / "heads/README.md").read_text()
    header, body = text.removeprefix("---\n").split("\n---\n", 1)
    metadata = yaml.safe_load(header)
    assert metadata["license"] == "apache-2.0"
    assert metadata["base_model"] == "org/base"
    assert "speculative-decoding" in metadata["tags"]
    assert metadata["pipeline_tag"] == "text-generation"
    assert "| top-1 | 0.500 | 0.400 | 0.300 |" in body
    assert "| speedup | 2.00 |" in body
