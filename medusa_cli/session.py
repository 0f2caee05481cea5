"""Base, heads and engine, opened together the way `generate`, `chat`, `cost` and `tree search` need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medusa.adaptive import AdaptiveTrees
from medusa.base import Base, load_base
from medusa.checkpoint import CONFIG, Checkpoint, load_checkpoint
from medusa.data.template import encode_prompt
from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.files import read_json
from medusa.generation import Completion, Request, generate
from medusa.heads import DraftHeads
from medusa.sampling import SamplingParams
from medusa.tree import Tree
from medusa_cli.common import ADAPTIVE, Dtype, Weights, checkpoint_folder, device, notes

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


def open_base(name: str, dtype: Dtype, weights: Weights = Weights.full) -> Base:
    """Loads a base, saying so: fetching it takes a while the first time."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar for each tensor that is read says nothing to anyone
    chosen = dtype.resolve()
    how = str(chosen).removeprefix("torch.") + (", int8 weights" if weights is Weights.int8 else "")
    with notes.status(f"loading {name} in {how}"):
        return load_base(name, dtype=chosen, device=device(), weights=weights.value)


def open_heads(
    checkpoint: Path | None,
    base: str | None,
    dtype: Dtype,
    tree: Path | None = None,
    weights: Weights = Weights.full,
) -> tuple[Base, DraftHeads, Tree]:
    """A checkpoint's base, heads and tree; `tree` names a file to use instead."""
    loaded, found = open_checkpoint(checkpoint, base, dtype, weights)
    return loaded, found.heads, Tree.from_json(tree) if tree else found.tree


def open_checkpoint(
    checkpoint: Path | None, base: str | None, dtype: Dtype, weights: Weights = Weights.full
) -> tuple[Base, Checkpoint]:
    """A checkpoint and its base."""
    folder = checkpoint_folder(checkpoint)
    loaded = open_base(base or base_of(folder), dtype, weights)
    return loaded, load_checkpoint(folder, loaded)


def open_policy(base: Base, found: Checkpoint) -> AdaptiveTrees:
    """A checkpoint's nested trees, with this machine's step costs: what `medusa cost --save` kept, or measured now.

    Raises:
        MedusaError: the checkpoint was not calibrated.
    """
    from medusa.cost import CostModel, cost_about, cost_file, measure_cost_model

    if found.calibration is None:
        raise MedusaError(f"{found.path} has no calibration; run `medusa calibrate` on it first")
    about = cost_about(base, found.heads)
    file = cost_file(about)
    if file.is_file():
        return AdaptiveTrees.from_calibration(found.calibration, CostModel.from_json(file))
    with notes.status("measuring steps on this machine; `medusa cost --save` keeps them for the next time"):
        cost = measure_cost_model(base, found.heads, batches=[1])
    return AdaptiveTrees.from_calibration(found.calibration, cost)


@dataclass
class Session:
    """One row of an engine, with what turns messages into tokens and tokens into text."""

    base: Base
    engine: Engine
    tree: Tree | AdaptiveTrees

    @classmethod
    def open(
        cls,
        checkpoint: Path | None,
        *,
        base: str | None,
        dtype: Dtype,
        tree: Path | None = None,
        plain: bool = False,
        weights: Weights = Weights.full,
    ) -> Session:
        """Loads what is needed: with `plain` and a named base, no heads at all."""
        heads: DraftHeads | None = None
        chosen: Tree | AdaptiveTrees = Tree()
        if plain and base and checkpoint is None:
            loaded = open_base(base, dtype, weights)
        elif tree == ADAPTIVE:
            loaded, found = open_checkpoint(checkpoint, base, dtype, weights)
            heads, chosen = found.heads, open_policy(loaded, found)
        else:
            loaded, heads, chosen = open_heads(checkpoint, base, dtype, tree, weights)
        engine = Engine(loaded.model, heads, max_length=min(loaded.max_length, MOST_CONTEXT))
        session = cls(loaded, engine, chosen)
        session.set_plain(plain)
        return session

    def set_plain(self, plain: bool) -> None:
        """Turns the heads off or on between answers."""
        if plain:
            self.engine.set_tree(Tree())
        elif isinstance(self.tree, Tree):
            self.engine.set_tree(self.tree)
        else:
            self.engine.set_policy(self.tree)

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
        sampling: SamplingParams | None = None,
        on_pieces: Callable[[Pieces], None] | None = None,
        reuse: bool = False,
    ) -> Completion:
        """Decodes one answer.

        Args:
            ids: the prompt.
            max_new_tokens: most tokens of the answer.
            stop: strings before which it ends.
            sampling: how tokens are chosen; None: greedily.
            on_pieces: called with what each step added.
            reuse: read only what the prompt adds to the conversation so far.
        """

        def relay(key: object, tokens: list[tuple[int, str]]) -> None:
            # The last token of a step is the base's own; those before it are guesses that it agreed with.
            *guessed, (_, own) = tokens
            on_pieces([(text, True) for _, text in guessed] + [(own, False)])

        sampling = sampling or SamplingParams()
        request = Request(ids, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling)
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
