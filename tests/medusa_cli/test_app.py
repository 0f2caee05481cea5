"""How the command ends, in a process of its own: what a shell, a script and a newcomer see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def medusa(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "medusa_cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "COLUMNS": "100", "TERM": "dumb", **env},
    )


COMMANDS = [
    "base fetch",
    "base list",
    "base show",
    "data prompts",
    "data magpie",
    "data distill",
    "data merge",
    "data states",
    "train",
    "calibrate",
    "cost",
    "tree search",
    "tree show",
    "import",
    "export",
    "inspect",
    "generate",
    "chat",
    "doctor",
    "demo",
]


def test_the_list_of_commands_is_whole():
    help_text = medusa("--help").stdout
    for command in COMMANDS:
        assert f" {command.split()[0]} " in help_text


def test_help_imports_no_torch():
    program = (
        "import sys; from medusa_cli.commands import app; print([m for m in sys.modules if m == 'torch'])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_page_ends_with_examples(command):
    from typer.testing import CliRunner

    from medusa_cli.commands import app

    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert f"medusa {command}" in result.stdout.partition("Examples")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--promt", "x"), "no such option: --promt; did you mean --prompt?"),
        (("genrate",), "no such command 'genrate'. Did you mean 'generate'"),
        (("tree", "shwo"), "did you mean 'show'"),
        (("generate",), "missing option '--prompt'"),
        (("generate", "--prompt", "x", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("generate", "--prompt", "x", "--dtype", "float8"), "--dtype"),
        (("generate", "--prompt", ""), "--prompt is empty"),
        (("generate", "--prompt", "  \n"), "--prompt is empty"),
        (("generate", "--prompt", b"\xff"), "--prompt is not UTF-8"),
        (("generate", "--prompt", "x", "--system", b"a\xff"), "--system is not UTF-8"),
        (("generate", "--prompt", "x", "--checkpoint", "nowhere"), "nowhere: no such folder"),
        (("generate", "--prompt", "x", "--no-template", "--system", "y"), "--no-template"),
        (("calibrate", "--checkpoint", "nowhere", "--states", "nowhere"), "nowhere"),
        (("demo", "--recipe", "nowhere.yaml"), "cannot read the recipe nowhere.yaml"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments, message, tmp_path):
    result = medusa(*arguments)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert message.lower() in result.stderr.lower()
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_recipe_with_an_unknown_key_names_the_nearest(tmp_path):
    recipe = tmp_path / "demo.yaml"
    recipe.write_text(
        "base: smollm2-135m\nanswers: {max_new_token: 3}\nheads: {hydra: {recipe: hydra.yaml}}\n"
    )
    result = medusa("demo", "--recipe", str(recipe), "--dry-run")
    assert result.returncode == 2
    assert "did you mean 'answers.max_new_tokens'" in result.stderr


def test_an_override_with_an_unknown_key_names_the_nearest(tmp_path):
    result = medusa(
        "train", "--out", str(tmp_path / "out"), "data.train=a", "data.validation=b", "training.epoch=3"
    )
    assert result.returncode == 2
    assert "did you mean 'training.epochs'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_with_130_and_no_traceback(tmp_path):
    """The command waits for a prompt on stdin, which never comes."""
    child = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "medusa_cli", "generate", "--prompt", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in child.stderr:  # the last module imported before it reads stdin
        if "train_heads" in line:
            break
    time.sleep(2)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert out == ""


def test_doctor_says_what_is_there_and_what_brings_the_rest(tmp_path):
    result = medusa("doctor", "--json", MEDUSA_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert {item["name"]: item["state"] for item in found["core"]}["torch"] == "ok"
    neuron = next(item for item in found["optional"] if item["name"] == "neuronx-distributed-inference")
    assert neuron["state"] == "missing"
    assert "medusa-kit[neuron]" in neuron["remedy"]
    base = next(item for item in found["models"] if item["name"] == "base smollm2-135m")
    assert base["state"] == "missing"
    assert base["remedy"] == "medusa base fetch smollm2-135m"


def test_doctor_exits_with_1_when_a_core_package_is_broken(tmp_path):
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("raise OSError('libfoo.so.1: cannot open')")
    result = medusa("doctor", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "libfoo.so.1" in result.stdout
    assert "make install" in result.stdout
    assert "safetensors" in result.stderr


def test_input_that_is_not_utf8_is_bad_input():
    command = [sys.executable, "-m", "medusa_cli", "generate", "--prompt", "-"]
    result = subprocess.run(command, input=b"ab\xff", capture_output=True, timeout=200)
    assert result.returncode == 2
    assert b"standard input is not UTF-8 text (byte 2)" in result.stderr


@pytest.mark.skipif(
    not Path("/dev/full").is_char_device(), reason="only Linux has a device that is always full"
)
def test_a_full_disk_under_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "medusa_cli", "--help"], stdout=full, stderr=subprocess.PIPE, timeout=200
        )
    assert result.returncode == 2
    assert result.stderr.decode().strip().startswith("error: cannot write the output")
    assert b"Traceback" not in result.stderr


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m medusa_cli --help | head -c1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, timeout=200)
    assert result.returncode in (0, 141)  # 0 if it had written everything before
    assert result.stderr == b""
