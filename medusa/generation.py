"""Requests in, completions out: in-flight batching and stop rules over an `Engine`.

Rows of the engine are filled as they become free, so a long answer never holds up the others. What is counted is
what is kept: a step's tokens after an end-of-turn token, a stop string or the length limit are not committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.sampling import SamplingParams
from medusa.text import TextStream


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Attributes:
        ids: the prompt's tokens.
        max_new_tokens: most tokens of the answer, the end-of-turn token included.
        sampling: how tokens are chosen; greedily unless said otherwise.
        stop: strings before which the answer ends. Needs a tokenizer.
        key: anything, handed back with the completion.
        want_hidden: keep the last hidden state before each token of the answer.
    """

    ids: list[int]
    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    key: Any = None
    want_hidden: bool = False


@dataclass
class Completion:
    """One answer.

    Attributes:
        key: the request's.
        token_ids: the answer; its last token is the end-of-turn token if the base produced one.
        finish: "stop" (end-of-turn token, or a stop string) or "length".
        text: the answer as text, without special tokens; empty if no tokenizer was given.
        accepted: tokens each step committed. The first token comes from the prefill, so
            `len(token_ids) == 1 + sum(accepted)`.
        prefill_seconds: wall-clock time of the prefill, at whose end the first token is known.
        seconds: wall-clock time from the start of the prefill to the last token; in a batch, other rows' work
            in between is part of it.
        hidden: [n, H], the base's last hidden state before each of the n tokens; None unless asked for.
    """

    key: Any
    token_ids: list[int] = field(default_factory=list)
    finish: str = "length"
    text: str = ""
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    hidden: torch.Tensor | None = None

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per step (tau); 1.0 for an answer that took no step."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else 1.0

    @property
    def from_heads(self) -> list[bool]:
        """For each token whether a head guessed it; the last of each step's tokens is the base's own."""
        flags = [False]
        for count in self.accepted:
            flags += [True] * (count - 1) + [False]
        return flags[: len(self.token_ids)]


class _Row:
    """A request while it is being answered."""

    def __init__(
        self, request: Request, eos_ids: Set[int], tokenizer: PreTrainedTokenizerBase | None, limit: int
    ):
        if request.max_new_tokens < 1:
            raise MedusaError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
        if request.stop and tokenizer is None:
            raise MedusaError("stop strings need the tokenizer")
        self.request, self.eos_ids = request, eos_ids
        self.limit = min(request.max_new_tokens, limit - len(request.ids))
        self.stream = TextStream(tokenizer, request.stop) if tokenizer is not None else None
        self.done = Completion(key=request.key)
        self.states: list[torch.Tensor] = []
        self.began = time.perf_counter()
        self.over = False

    def take(
        self, tokens: list[int], states: torch.Tensor | None, first: bool = False
    ) -> list[tuple[int, str]]:
        """Keeps what the stop rules allow of the newly committed tokens; returns (token, new text) pairs."""
        kept: list[tuple[int, str]] = []
        for token in tokens:
            self.done.token_ids.append(token)
            text = self.stream.push(token) if self.stream is not None and token not in self.eos_ids else ""
            kept.append((token, text))
            if token in self.eos_ids or (self.stream is not None and self.stream.stopped):
                self.done.finish, self.over = "stop", True
            elif len(self.done.token_ids) >= self.limit:
                self.over = True
            if self.over:
                break
        if states is not None:
            self.states.append(states[: len(kept)].clone())
        if not first:
            self.done.accepted.append(len(kept))
        if self.over and self.stream is not None and (rest := self.stream.finish()):
            kept[-1] = (kept[-1][0], kept[-1][1] + rest)
        return kept

    def finish(self) -> Completion:
        self.done.seconds = time.perf_counter() - self.began
        if self.stream is not None:
            self.done.text = self.stream.text
        if self.states:
            self.done.hidden = torch.cat(self.states)
        return self.done


def generate(
    engine: Engine,
    requests: Iterable[Request],
    *,
    eos_ids: Set[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_tokens: Callable[[Any, list[tuple[int, str]]], None] | None = None,
    reuse: bool = False,
) -> Iterator[Completion]:
    """Answers requests, as many at a time as the engine has rows; yields completions as they end.

    Requests are drawn only when a row is free, so a generator may make later ones from earlier completions; one
    that yields None has nothing for now and is asked again after the next step.

    Args:
        engine: its rows must be free.
        requests: the prompts; drawn lazily.
        eos_ids: token ids that end an answer.
        tokenizer: for text and stop strings.
        on_tokens: called with (key, [(token, new text), ...]) after the prefill and after each step, for streaming.
        reuse: start a prefill after what a free row already holds of the prompt: the next turn of a conversation,
            a common system message. Not for measurements, where every prompt must cost the same.

    Raises:
        MedusaError: a prompt is empty or longer than the engine's context, or a stop rule makes no sense.
    """
    waiting: Iterator[Request | None] = iter(requests)
    rows: dict[int, _Row] = {}
    more = True
    try:
        while more or rows:
            while more and len(rows) < engine.batch:
                request = next(waiting, _END)
                if request is None:
                    break
                if request is _END:
                    more = False
                    break
                free = sorted(set(range(engine.batch)) - set(rows))
                number, start = free[0], 0
                if reuse:
                    number = max(free, key=lambda row: engine.kept_prefix(row, request.ids))
                    start = engine.kept_prefix(number, request.ids)
                row = _Row(request, eos_ids, tokenizer, engine.max_length)
                token = engine.prefill(number, request.ids[start:], start=start, sampling=request.sampling)
                row.done.prefill_seconds = time.perf_counter() - row.began
                state = engine.hidden[number : number + 1] if request.want_hidden else None
                kept = row.take([token], state, first=True)
                if on_tokens is not None:
                    on_tokens(request.key, kept)
                rows[number] = row
                if row.over:
                    yield _release(engine, rows, number)
            if not rows:
                if more:
                    raise MedusaError(
                        "no request is in flight and none is ready: the source of requests is stuck"
                    )
                break
            result = engine.step()
            tokens, counts = result.tokens.tolist(), result.counts.tolist()
            for number in sorted(rows):
                row = rows[number]
                states = result.hidden[number] if row.request.want_hidden else None
                kept = row.take(tokens[number][: counts[number]], states)
                if on_tokens is not None:
                    on_tokens(row.request.key, kept)
                if row.over:
                    yield _release(engine, rows, number)
    finally:
        for number in rows:
            engine.free(number)


_END: Any = object()


def _release(engine: Engine, rows: dict[int, _Row], number: int) -> Completion:
    engine.free(number)
    return rows.pop(number).finish()
