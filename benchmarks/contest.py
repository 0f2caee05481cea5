"""The section `peers`: others beside us, on the same weights, dtype and prompts, taking turns in one run.

What is timed is the whole of an answer, the prompt's reading included, because that is all that the others tell. Every
answer has the same number of tokens: the end-of-turn token is one like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Protocol

import torch

from benchmarks.records import Answers, Contest
from benchmarks.subject import Prompts, groups
from benchmarks.throughput import decode, ratio
from medusa.base import Base
from medusa.decoding import Engine
from medusa.heads import DraftHeads
from medusa.tree import Tree

OURS = "ours, plain"
LOOKUP = 4  # tokens that prompt lookup guesses: as many as our heads
WARM_UP_TOKENS = 8


class Contestant(Protocol):
    """Answers several prompts at once.

    Attributes:
        name: what it is called.
        how: a few words on how it is run.
        version: of the implementation.
    """

    name: str
    how: str
    version: str

    def answer(self, prompts: Prompts, max_new_tokens: int) -> tuple[list[list[int]], float]:
        """The answers' tokens, `max_new_tokens` each, in the prompts' order, and the seconds that they took."""

    def close(self) -> None:
        """Ends what was started."""


class Ours:
    """Our engine with one tree.

    Args:
        name: what it is called.
        how: a few words.
        base: with its model.
        heads: draft heads; None: plain decoding.
        tree: the tree.
        rows: prompts in flight.
        max_length: most tokens of a prompt and its answer.
    """

    version = ""

    def __init__(
        self,
        name: str,
        how: str,
        base: Base,
        heads: DraftHeads | None,
        tree: Tree,
        *,
        rows: int,
        max_length: int,
    ):
        self.name, self.how = name, how
        self._engine = Engine(base.model, heads, tree, batch=rows, max_length=max_length)

    def answer(self, prompts: Prompts, max_new_tokens: int) -> tuple[list[list[int]], float]:
        """See `Contestant.answer`."""
        began = time.perf_counter()
        tokens = decode(self._engine, prompts, max_new_tokens, reuse=False)
        return tokens, time.perf_counter() - began

    def close(self) -> None:
        """Nothing was started."""


class Transformers:
    """`generate` of the base's own model; prompts of unequal length are padded on the left.

    Args:
        base: with its model, whose linear layers are the kit's where an engine was made on it before.
        lookup: with prompt-lookup decoding, which takes one prompt at a time.
    """

    def __init__(self, base: Base, *, lookup: bool = False):
        self.name = "transformers prompt lookup" if lookup else "transformers"
        what = f"prompt_lookup_num_tokens={LOOKUP}" if lookup else "its dynamic cache"
        self.how = f"generate() on the same weights in memory, our packed linear layers among them, {what}"
        self.version = metadata.version("transformers")
        self._model, self._lookup = base.model, lookup
        # An id that no token has: nothing ends an answer. None would be filled in from the model's own configuration.
        self._end = base.vocab_size

    @torch.inference_mode()
    def answer(self, prompts: Prompts, max_new_tokens: int) -> tuple[list[list[int]], float]:
        """See `Contestant.answer`."""
        from transformers import GenerationConfig

        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._end,
            pad_token_id=0,
            prompt_lookup_num_tokens=LOOKUP if self._lookup else None,
        )
        began = time.perf_counter()
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(ids)) + ids for ids in prompts]
        seen = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        output = self._model.generate(
            input_ids=torch.tensor(padded, device=self._model.device),
            attention_mask=torch.tensor(seen, device=self._model.device),
            generation_config=config,
        )
        tokens = output[:, longest:].tolist()  # waits for the device
        return tokens, time.perf_counter() - began

    def close(self) -> None:
        """Nothing was started."""


def measure_contest(
    contestants: Sequence[Contestant],
    prompts: Prompts,
    *,
    batch: int,
    limit: int,
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Contest]:
    """Lets contestants answer the same groups of prompts in turn, in an order that rotates.

    Args:
        contestants: `OURS` among them, which the ratios refer to.
        prompts: token ids.
        batch: prompts in flight.
        limit: prompts answered, at least one group.
        max_new_tokens: of every answer.
        repeats: rounds for each group.
        progress: called with a few words before each answer.
    """
    answers: dict[str, list[Answers]] = {contestant.name: [] for contestant in contestants}
    ordered = list(contestants)
    for number, group in enumerate(groups(prompts, batch, limit)):
        if number == 0:
            for contestant in ordered:  # the first calls allocate memory and choose kernels
                contestant.answer(group, min(WARM_UP_TOKENS, max_new_tokens))
        found: dict[str, list[list[list[int]]]] = {contestant.name: [] for contestant in ordered}
        for repeat in range(repeats):
            start = (number * repeats + repeat) % len(ordered)
            for contestant in ordered[start:] + ordered[:start]:
                progress(f"{contestant.name}, {batch} in flight")
                tokens, seconds = contestant.answer(group, max_new_tokens)
                found[contestant.name].append(tokens)
                answers[contestant.name].append(
                    Answers(
                        group=number, repeat=repeat, tokens=sum(map(len, tokens)), seconds=seconds, same=True
                    )
                )
        for name, texts in found.items():
            for one, tokens in zip(answers[name][-repeats:], texts, strict=True):
                one.same = tokens == found[OURS][0]
    return [
        Contest(
            batch=batch,
            name=contestant.name,
            how=f"{contestant.how}{f' ({contestant.version})' if contestant.version else ''}",
            answers=answers[contestant.name],
            ratio=ratio(answers[contestant.name], answers[OURS]),
        )
        for contestant in ordered
    ]
