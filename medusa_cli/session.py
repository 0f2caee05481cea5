"""Base, heads and engine, opened together the way `generate`, `chat`, `cost` and `tree search` need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medusa.base import Base, load_base
from medusa.checkpoint import CONFIG, load_checkpoint
from medusa.data.template import encode_prompt
from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.files import read_json
from medusa.generation import Completion, Request, generate
from medusa.heads import DraftHeads
from medusa.tree import Tree
from medusa_cli.common import Dtype, checkpoint_folder, device, notes

MOST_CONTEXT = 8192  # the cache is allocated whole; longer conversations are rare and memory is not free

Pieces = list[tuple[str, bool]]  # new text, and whether a head guessed it


def base_of(folder: Path) -> str:
    """The name of the base that a checkpoint was trained for.

    Raises:
        MedusaError: the folder is not a checkpoint.
    """
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    try:
        return config["base"]["name"]
    except (KeyError, TypeError) as error:
        raise MedusaError(
            f"{folder} is not a heads checkpoint: it has no {CONFIG} that names its base"
        ) from error


def open_base(name: str, dtype: Dtype) -> Base:
    """Loads a base, saying so: fetching it takes a while the first time."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar for each tensor that is read says nothing to anyone
    chosen = dtype.resolve()
    with notes.status(f"loading {name} in {str(chosen).removeprefix('torch.')}"):
        return load_base(name, dtype=chosen, device=device())


def open_heads(
    checkpoint: Path | None, base: str | None, dtype: Dtype, tree: Path | None = None
) -> tuple[Base, DraftHeads, Tree]:
    """A checkpoint's base, heads and tree; `tree` names a file to use instead."""
    folder = checkpoint_folder(checkpoint)
    loaded = open_base(base or base_of(folder), dtype)
    found = load_checkpoint(folder, loaded)
    return loaded, found.heads, Tree.from_json(tree) if tree else found.tree


@dataclass
class Session:
    """One row of an engine, with what turns messages into tokens and tokens into text."""

    base: Base
    engine: Engine
    tree: Tree

    @classmethod
    def open(
        cls,
        checkpoint: Path | None,
        *,
        base: str | None,
        dtype: Dtype,
        tree: Path | None = None,
        plain: bool = False,
    ) -> Session:
        """Loads what is needed: with `plain` and a named base, no heads at all."""
        if plain and base and checkpoint is None:
            loaded, heads, chosen = open_base(base, dtype), None, Tree()
        else:
            loaded, heads, chosen = open_heads(checkpoint, base, dtype, tree)
        length = min(loaded.max_length, MOST_CONTEXT)
        engine = Engine(loaded.model, heads, Tree() if plain else chosen, max_length=length)
        return cls(loaded, engine, chosen)

    def set_plain(self, plain: bool) -> None:
        """Turns the heads off or on between answers."""
        self.engine.set_tree(Tree() if plain else self.tree)

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Messages in the base's chat template, up to where its answer begins."""
        return encode_prompt(self.base.tokenizer, messages)

    @staticmethod
    def rate(completion: Completion) -> float:
        """Tokens per second of an answer, prefill included."""
        return len(completion.token_ids) / completion.seconds if completion.seconds > 0 else 0.0

    def answer(
        self,
        ids: list[int],
        *,
        max_new_tokens: int,
        stop: tuple[str, ...] = (),
        on_pieces: Callable[[Pieces], None] | None = None,
        reuse: bool = False,
    ) -> Completion:
        """Decodes one answer, greedily.

        Args:
            ids: the prompt.
            max_new_tokens: most tokens of the answer.
            stop: strings before which it ends.
            on_pieces: called with what each step added.
            reuse: read only what the prompt adds to the conversation so far.
        """

        def relay(key: object, tokens: list[tuple[int, str]]) -> None:
            # The last token of a step is the base's own; those before it are guesses that it agreed with.
            *guessed, (_, own) = tokens
            on_pieces([(text, True) for _, text in guessed] + [(own, False)])

        request = Request(ids, max_new_tokens=max_new_tokens, stop=stop)
        return next(
            generate(
                self.engine,
                [request],
                eos_ids=self.base.eos_ids,
                tokenizer=self.base.tokenizer,
                on_tokens=relay if on_pieces else None,
                reuse=reuse,
            )
        )
