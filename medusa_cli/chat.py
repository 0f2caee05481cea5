"""`medusa chat`: a conversation in the terminal that shows which tokens came from the heads."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from medusa_cli.common import (
    BaseOption,
    CheckpointOption,
    Dtype,
    DtypeOption,
    TreeOption,
    Weights,
    WeightsOption,
    examples,
    notes,
    out,
)

if TYPE_CHECKING:
    from medusa_cli.session import Pieces, Session

EXAMPLES = examples(
    "medusa chat",
    'medusa chat --system "You sell outdoor gear. Answer briefly."',
    "medusa chat --checkpoint runs/demo/medusa --plain",
    "printf 'do you have rain jackets?\\nand for kids?\\n' | medusa chat",
)
HELP = "/plain heads off or on   /system TEXT   /reset forget the conversation   /quit"


def chat(
    checkpoint: CheckpointOption = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the assistant is told first.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    dtype: DtypeOption = Dtype.auto,
    weights: WeightsOption = Weights.full,
    plain: Annotated[bool, typer.Option("--plain", help="Start with the heads off.")] = False,
    tree: TreeOption = None,
    base: BaseOption = None,
) -> None:
    """Talk to the base. Tokens that heads guessed and the base confirmed are underlined in colour."""
    from medusa_cli.session import Session

    session = Session.open(checkpoint, base=base, dtype=dtype, tree=tree, plain=plain, weights=weights)
    Chat(session, system, max_new_tokens, plain).run()


class Chat:
    """The loop: a line in, an answer out.

    Args:
        session: what answers.
        system: the system message; None: the template's own.
        max_new_tokens: most tokens of an answer.
        plain: start with the heads off.
    """

    def __init__(self, session: Session, system: str | None, max_new_tokens: int, plain: bool):
        self.session, self.system, self.max_new_tokens, self.plain = session, system, max_new_tokens, plain
        self.messages: list[dict[str, str]] = []

    def run(self) -> None:
        """Reads until /quit or the input's end."""
        at_terminal = sys.stdin.isatty()
        notes.print(f"{self.session.base.name}; {self._mode()}. {HELP}", style="dim", markup=False)
        while True:
            try:
                line = input("\n> " if at_terminal else "").strip()
            except EOFError:
                break
            except UnicodeDecodeError:
                notes.print("that was not UTF-8 text; say it again", style="yellow")
                continue
            if not at_terminal and line:
                out.print(
                    Text(f"> {line}", style="bold")
                )  # a transcript without its questions makes no sense
            if line in ("/quit", "/exit"):
                break
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _mode(self) -> str:
        if self.plain or self.session.tree.width == 1:
            return "heads off"
        return f"tree of {self.session.tree.width} nodes, heads' tokens underlined"

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/plain":
            self.plain = not self.plain
            self.session.set_plain(self.plain)
            notes.print(self._mode(), style="dim")
        elif word == "/reset":
            self.messages.clear()
            notes.print("forgotten", style="dim")
        elif word == "/system":
            self.system = rest.strip() or None
            self.messages.clear()
            notes.print(
                f"system message {'set' if self.system else 'removed'}, conversation reset", style="dim"
            )
        else:
            notes.print(f"no such command: {word}. {HELP}", style="yellow", markup=False)

    def _turn(self, line: str) -> None:
        before = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*self.messages, {"role": "user", "content": line}]
        ids = self.session.encode([*before, *asked])
        room = self.session.engine.max_length - len(ids)
        if room < 1:
            notes.print("the conversation fills the base's context; /reset starts a new one", style="yellow")
            return
        said: list[str] = []

        def show(pieces: Pieces) -> None:
            said.extend(text for text, _ in pieces)
            for text, guessed in pieces:
                out.print(Text(text, style="underline cyan" if guessed else ""), end="", soft_wrap=True)
            out.file.flush()

        try:
            done = self.session.answer(
                ids, max_new_tokens=min(self.max_new_tokens, room), on_pieces=show, reuse=True
            )
        except KeyboardInterrupt:
            # Ctrl-C ends the answer, not the chat. What was said stands, as its reader has read it.
            out.print()
            notes.print("stopped", style="dim")
            self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
            return
        out.print()
        self.messages = [*asked, {"role": "assistant", "content": done.text}]
        guessed = sum(done.from_heads)
        notes.print(
            f"{len(done.token_ids)} tokens, {guessed} from heads, "
            f"acceptance length {done.acceptance_length:.2f}, "
            f"{self.session.rate(done):.1f} tokens/s" + (", cut off" if done.finish == "length" else ""),
            style="dim",
        )
