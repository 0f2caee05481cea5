"""`--weights int8`: the same tokens with and without heads, and costs of its own."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from medusa_cli import session
from medusa_cli.commands import app
from medusa_cli.common import Dtype, Weights


def run(*words: str, **more: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False, **more)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_generate_is_the_same_with_and_without_heads(loop, kind):
    words = ["generate", "--prompt", "hello", *loop.options(kind), "--weights", "int8", "--json"]
    tree, plain = json.loads(run(*words)), json.loads(run(*words, "--plain"))
    assert tree["token_ids"] == plain["token_ids"] == loop.said(len(plain["token_ids"]))
    assert tree["acceptance_length"] > 3
    assert plain["acceptance_length"] == 1.0


def test_chat_answers(loop):
    words = ["chat", *loop.options(), "--weights", "int8", "--max-new-tokens", "11"]
    assert "日é🛒" in run(*words, input="hi\n")


def test_a_session_has_the_quantized_base_and_plain_heads(loop):
    opened = session.Session.open(
        loop.checkpoints["hydra"], base=str(loop.base), dtype=Dtype.float32, weights=Weights.int8
    )
    assert opened.base.weights == "int8"
    kinds = {type(module).__name__ for module in opened.engine.model.modules()}
    assert "Int8Linear" in kinds
    assert not {"Linear", "PackedLinear"} & kinds
    assert "Int8Linear" not in {type(module).__name__ for module in opened.engine.heads.modules()}


def test_costs_of_int8_and_full_weights_are_not_mixed_up(loop, tmp_path):
    about = {}
    for weights in ("full", "int8"):
        file = tmp_path / f"{weights}.json"
        run("cost", *loop.options(), "--widths", "1,4", "--weights", weights, "--out", str(file))
        about[weights] = json.loads(file.read_text())["about"]
        assert about[weights].pop("weights") == weights
    assert about["full"] == about["int8"]
