"""`medusa generate`: the same tokens with and without heads, whole characters only, and honest figures."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from medusa.errors import MedusaError
from medusa_cli.commands import app
from medusa_cli.generate import generate as command
from tests.medusa_cli.looper import TEXT


def generate(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["generate", "--prompt", "hello", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_json_is_the_same_with_and_without_heads(loop, kind, count):
    words = [*loop.options(kind), "--json", "--max-new-tokens", str(count)]
    tree, plain = json.loads(generate(*words)), json.loads(generate(*words, "--plain"))
    assert tree["token_ids"] == plain["token_ids"] == loop.said(count)
    assert tree["text"] == plain["text"]
    assert tree["finish"] == "length"
    assert plain["acceptance_length"] == 1.0
    assert tree["tokens_per_second"] > 0
    if count == 40:
        assert (
            tree["acceptance_length"] > 3
        )  # the heads know the text; three of them add three tokens to a step


def test_stream_is_the_text_and_never_half_a_character(loop, monkeypatch):
    writes: list[str] = []

    class Recorder:
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Recorder())
    command("hi", checkpoint=loop.checkpoints["hydra"], base=str(loop.base), max_new_tokens=33)
    whole = "".join(writes)
    assert whole == TEXT * 3 + "\n"
    assert all("\ufffd" not in text for text in writes)
    assert sum(bool(text) for text in writes) > 5  # it did come in pieces


def test_stop_string_ends_before_it(loop):
    for extra in ([], ["--plain"]):
        found = json.loads(generate(*loop.options(), "--json", "--stop", "🛒", *extra))
        assert found["text"] == "a日é"
        assert found["finish"] == "stop"


def test_no_template_continues_the_prompt(loop):
    found = json.loads(generate(*loop.options(), "--json", "--no-template", "--max-new-tokens", "3"))
    assert found["prompt_tokens"] == len("hello")


def test_a_system_message_is_part_of_the_prompt(loop):
    def prompt_tokens(*words: str) -> int:
        found = json.loads(generate(*loop.options(), "--json", "--max-new-tokens", "1", *words))
        return found["prompt_tokens"]

    assert prompt_tokens("--system", "be brief") - prompt_tokens() == len("system: be brief") + 1


def test_another_tree_can_be_used(loop, tmp_path):
    (tmp_path / "chain.json").write_text("[[0]]")
    words = [*loop.options(), "--json", "--max-new-tokens", "41", "--tree", str(tmp_path / "chain.json")]
    found = json.loads(generate(*words))
    assert found["token_ids"] == loop.said(41)
    assert 1.8 < found["acceptance_length"] <= 2.0


def test_plain_needs_no_checkpoint_when_the_base_is_named(loop):
    found = json.loads(
        generate("--plain", "--base", str(loop.base), "--dtype", "float32", "--json", "--max-new-tokens", "5")
    )
    assert found["token_ids"] == loop.said(5)


def test_a_prompt_longer_than_the_context_is_refused(loop):
    with pytest.raises(MedusaError, match="context holds 512"):
        CliRunner().invoke(app, ["generate", "--prompt", "x" * 600, *loop.options()], catch_exceptions=False)


def test_a_checkpoint_of_another_base_is_refused(loop, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(loop.base, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, other / "model.safetensors")
    with pytest.raises(MedusaError, match="was trained for"):
        CliRunner().invoke(
            app,
            ["generate", "--prompt", "x", *loop.options()[:2], "--base", str(other)],
            catch_exceptions=False,
        )


@pytest.mark.parametrize(
    "rules", [["--temperature", "0.9"], ["--temperature", "4", "--top-k", "20", "--top-p", "0.95"]]
)
def test_one_seed_gives_one_answer_with_and_without_heads(loop, rules):
    words = [*loop.options(), "--json", "--max-new-tokens", "24", *rules]
    tree, plain = (json.loads(generate(*words, "--seed", "3", *extra)) for extra in ([], ["--plain"]))
    assert tree["token_ids"] == plain["token_ids"]
    assert json.loads(generate(*words, "--seed", "4"))["token_ids"] != tree["token_ids"]


def test_repetition_penalty_and_typical_acceptance_reach_the_engine(loop):
    words = [*loop.options(), "--json", "--max-new-tokens", "20"]
    assert json.loads(generate(*words, "--repetition-penalty", "3"))["token_ids"] != loop.said(20)
    hot = [*words, "--temperature", "1.0", "--seed", "1"]
    loose = json.loads(generate(*hot, "--acceptance", "typical"))
    assert loose["acceptance_length"] >= json.loads(generate(*hot))["acceptance_length"]


def test_adaptive_trees_say_the_same(loop, monkeypatch, tmp_path):
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path))
    words = [*loop.options(), "--json", "--max-new-tokens", "40"]
    assert json.loads(generate(*words, "--tree", "adaptive"))["token_ids"] == loop.said(40)
    cost = CliRunner().invoke(app, ["cost", *loop.options(), "--save"], catch_exceptions=False)
    assert cost.exit_code == 0, cost.output
    assert len(list((tmp_path / "costs").glob("*.json"))) == 1
    assert json.loads(generate(*words, "--tree", "adaptive"))["token_ids"] == loop.said(40)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--top-p", "0"], "top_p must be above 0"),
        (["--repetition-penalty", "-1"], "repetition_penalty must be above 0"),
    ],
)
def test_rules_that_make_no_sense(loop, words, says):
    with pytest.raises(MedusaError, match=says):
        generate(*loop.options(), *words)
