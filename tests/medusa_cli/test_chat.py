"""`medusa chat` through a pipe: turns, commands, the figures after each answer, which tokens are marked."""

from __future__ import annotations

import pytest
from rich.console import Console
from typer.testing import CliRunner

from medusa_cli import chat as module
from medusa_cli.commands import app
from tests.medusa_cli.looper import TEXT


def chat(loop, lines: str, *words: str) -> tuple[str, str]:
    """(stdout, stderr) of a chat that reads `lines`."""
    arguments = ["chat", *loop.options(), "--max-new-tokens", "22", *words]
    result = CliRunner().invoke(app, arguments, input=lines, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.fixture(autouse=True)
def fresh_consoles(monkeypatch):
    """Consoles that look up sys.stdout anew: the runner exchanges it."""
    monkeypatch.setattr(module, "out", Console(highlight=False, width=200))
    monkeypatch.setattr(module, "notes", Console(stderr=True, highlight=False, width=200))


def test_each_line_is_a_turn_with_its_figures(loop):
    said, notes = chat(loop, "hello\nand now?\n")
    assert said == f"> hello\n{2 * TEXT}\n> and now?\n{2 * TEXT}\n"
    assert notes.count("22 tokens") == 2
    assert "from heads" in notes
    assert "acceptance length 3." in notes
    assert "tokens/s, cut off" in notes


def test_plain_turns_the_heads_off_and_on(loop):
    said, notes = chat(loop, "hello\n/plain\nhello\n/plain\nhello\n/quit\nnever\n")
    assert said.count(2 * TEXT) == 3
    figures = [line for line in notes.splitlines() if "tokens/s" in line]
    assert ["acceptance length 1.00" in line for line in figures] == [False, True, False]
    assert "never" not in said


def test_the_conversation_grows_and_reset_forgets_it(loop, monkeypatch):
    lengths = []
    from medusa_cli.session import Session

    encode = Session.encode

    def recorded(self, messages):
        lengths.append(len(messages))
        return encode(self, messages)

    monkeypatch.setattr(Session, "encode", recorded)
    chat(loop, "a\nb\n/reset\nc\n/system be kind\nd\n/system\ne\n", "--system", "x")
    assert lengths == [2, 4, 2, 2, 1]


def test_an_unknown_command_says_which_there_are(loop):
    said, notes = chat(loop, "/help\n")
    assert "no such command: /help" in notes
    assert "/reset" in notes
    assert said == "> /help\n"


def test_a_full_context_is_said_and_can_be_left(loop):
    said, notes = chat(loop, f"{'x' * 600}\n/reset\nhello\n")
    assert "fills the base's context" in notes
    assert 2 * TEXT in said


def test_marked_is_what_heads_guessed(loop):
    """In the terminal's own codes: underlined are all tokens of a step but its last."""
    from medusa_cli.common import Dtype
    from medusa_cli.session import Session

    session = Session.open(loop.checkpoints["hydra"], base=str(loop.base), dtype=Dtype.float32)
    pieces = []
    done = session.answer(
        session.encode([{"role": "user", "content": "x"}]), max_new_tokens=22, on_pieces=pieces.extend
    )
    assert [guessed for _, guessed in pieces] == done.from_heads
    assert sum(done.from_heads) > 12
    assert "".join(text for text, _ in pieces) == done.text == 2 * TEXT
    console = Console(force_terminal=True, color_system="standard", width=200)
    module.out = console
    with console.capture() as capture:
        module.Chat(session, None, 22, False)._turn("x")
    marked = [part.partition("m")[2] for part in capture.get().split("\x1b[4;36") if part][1:]
    assert len(marked) == sum(bool(text) for text, guessed in pieces if guessed)
