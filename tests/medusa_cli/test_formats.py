"""`medusa import`, `export` and `inspect` over real checkpoints, as a shell sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa.tree import Tree
from medusa_cli.endings import run


def medusa(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    from medusa_cli.commands import app

    capfd.readouterr()
    code = run(lambda: app, "medusa", [str(word) for word in words])
    said = capfd.readouterr()
    return code, said.out, said.err


@pytest.fixture
def exported(loop, tmp_path, capfd) -> Path:
    folder = tmp_path / "exported"
    words = ["--checkpoint", loop.checkpoints["medusa"], "--base", loop.base, "--format", "medusa"]
    assert medusa(capfd, "export", folder, *words)[0] == 0
    return folder


@pytest.mark.parametrize("name", ["medusa", "vllm", "trtllm", "nxdi"])
def test_there_and_back_the_answer_is_the_same(loop, tmp_path, capfd, name):
    words = ["--checkpoint", loop.checkpoints["medusa"], "--base", loop.base]
    code, out, err = medusa(capfd, "export", *words, "--format", name, tmp_path / "there")
    assert (code, out.strip()) == (0, str(tmp_path / "there")), err
    assert ("written out for the heads" in err) == (name != "vllm")
    code, out, err = medusa(
        capfd, "import", "--from", name, tmp_path / "there", tmp_path / "here", "--base", loop.base
    )
    assert code == 0, err
    assert f"{name} heads are now the checkpoint" in out
    asked = [
        "generate",
        "--prompt",
        "x",
        "--base",
        loop.base,
        "--dtype",
        "float32",
        "--max-new-tokens",
        "40",
        "--json",
    ]
    tree = loop.checkpoints["medusa"] / "tree.json"
    answers = []
    for folder in (loop.checkpoints["medusa"], tmp_path / "here"):
        code, out, err = medusa(capfd, *asked, "--checkpoint", folder, "--tree", tree)
        assert code == 0, err
        answers.append(json.loads(out))
    for answer in answers:
        for name_of_time in [key for key in answer if "second" in key]:
            del answer[name_of_time]
    assert answers[0] == answers[1]


def test_import_finds_the_format_out_and_takes_a_tree(loop, exported, tmp_path, capfd):
    (tmp_path / "tree.json").write_text("[[0], [0, 1]]")
    words = ["import", exported, tmp_path / "here", "--base", loop.base, "--tree", tmp_path / "tree.json"]
    code, out, err = medusa(capfd, *words)
    assert code == 0, err
    assert "medusa heads" in out
    assert Tree.from_json(tmp_path / "here/tree.json") == Tree([(0,), (0, 1)])


def test_import_says_that_it_took_a_chain(loop, exported, tmp_path, capfd):
    (exported / "medusa_choices.json").unlink()
    code, _, err = medusa(capfd, "import", exported, tmp_path / "here", "--base", loop.base)
    assert code == 0
    assert "a chain was taken" in err


def test_inspect_a_checkpoint(loop, capfd):
    code, out, _ = medusa(capfd, "inspect", loop.checkpoints["hydra"])
    assert code == 0
    for said in ("hydra", "6 nodes, 3 deep", "top-1", "head 3", "float32", "257"):
        assert said in out
    facts = json.loads(medusa(capfd, "inspect", loop.checkpoints["hydra"], "--json")[1])
    assert facts["kind"] == "hydra" and len(facts["accuracy"]["top-1"]) == 3


def test_inspect_a_foreign_file(exported, capfd):
    code, out, _ = medusa(capfd, "inspect", exported / "medusa_lm_head.pt")
    assert code == 0
    assert "own" in out and "top-1" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "nxdi", "--checkpoint", "HYDRA", "out"], "hydra heads, and NeuronX"),
        (["--format", "speculators", "--checkpoint", "MEDUSA", "out"], "speculators has no Medusa"),
        (["--format", "gguf", "--checkpoint", "MEDUSA", "out"], "gguf"),
        (["--format", "vllm", "--checkpoint", "nowhere", "out"], "no such folder"),
    ],
)
def test_refusals_end_with_2_and_write_nothing(loop, tmp_path, monkeypatch, capfd, words, message):
    monkeypatch.chdir(tmp_path)
    names = {"HYDRA": str(loop.checkpoints["hydra"]), "MEDUSA": str(loop.checkpoints["medusa"])}
    code, out, err = medusa(capfd, "export", *(names.get(word, word) for word in words))
    assert code == 2 and not out
    assert err.startswith("error: ") and message in err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_ends_with_2_and_writes_nothing(loop, exported, tmp_path, capfd):
    state = torch.load(exported / "medusa_lm_head.pt", weights_only=True)
    state["1.0.linear.bias"][3] = torch.nan
    torch.save(state, exported / "medusa_lm_head.pt")
    code, _, err = medusa(capfd, "import", exported, tmp_path / "here", "--base", loop.base)
    assert code == 2
    assert "NaN or infinity in 1.0.linear.bias" in err
    assert [item.name for item in tmp_path.iterdir()] == ["exported"]
    assert medusa(capfd, "inspect", exported)[0] == 2


def test_the_formats_of_the_options_are_those_of_the_registry():
    from medusa.export.formats import FORMATS
    from medusa_cli.formats import Name

    assert {name.value for name in Name} == set(FORMATS)
