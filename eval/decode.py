"""Decodes conversations in every mode and takes the times.

All modes are one engine with another tree, and answer the same prompts: a later turn's prompt holds the plain
answers to the earlier ones. Within each turn and repeat the modes (and peers) take turns, in an order that
rotates, so that a machine that slows down or warms up does so for all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.lossless import examine
from eval.peers import Peer
from eval.prompts import Row
from eval.results import MODES, Answer, Conversation, Divergence, Mode, PeerAnswer, Timing, Turn
from medusa.base import Base
from medusa.data.template import encode_prompt
from medusa.decoding import Engine
from medusa.generation import Completion, Request, generate
from medusa.tree import Tree


@dataclass
class Decoded:
    """What decoding a group of conversations gave; those without room for an answer are not among them."""

    conversations: list[Conversation]
    seconds: dict[Mode, list[float]]
    divergences: list[Divergence] = field(default_factory=list)


def prompt_ids(base: Base, row: Row, answers: Sequence[Sequence[int]]) -> list[int]:
    """The prompt of the turn after `answers`: the conversation up to that user message, with them in it.

    Args:
        base: with its model and tokenizer.
        row: system and user messages.
        answers: token ids of the plain answers to the earlier turns.
    """
    messages, turn = [], 0
    for message in row["messages"]:
        messages.append(message)
        if message["role"] == "user":
            if turn == len(answers):
                break
            text = base.tokenizer.decode(list(answers[turn]), skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            turn += 1
    return encode_prompt(base.tokenizer, messages)


def user_messages(row: Row) -> list[str]:
    """What the user says, turn by turn."""
    return [message["content"] for message in row["messages"] if message["role"] == "user"]


def longest(base: Base, rows: Sequence[Row], max_new_tokens: int) -> int:
    """Tokens that the longest conversation can reach, at most the base's context.

    An earlier answer can take more tokens than were decoded, once it has been text: bytes that are no
    character come back as U+FFFD, three bytes each.
    """
    reach = 1
    for row in rows:
        earlier = len(user_messages(row)) - 1
        prompt = len(prompt_ids(base, row, [[]] * earlier))
        reach = max(reach, prompt + 3 * earlier * max_new_tokens + max_new_tokens)
    return min(reach, base.max_length)


class Decoder:
    """Decodes groups of conversations.

    Args:
        base: with its model and tokenizer.
        engine: on the base's model, with heads; as many rows as a group has conversations at most.
        trees: each mode's; plain's is empty.
        max_new_tokens: of each answer.
        repeats: of every measurement.
    """

    def __init__(
        self, base: Base, engine: Engine, trees: Mapping[Mode, Tree], *, max_new_tokens: int, repeats: int
    ):
        self.base, self.engine, self.trees = base, engine, trees
        self.max_new_tokens, self.repeats = max_new_tokens, repeats

    def answer(
        self, mode: Mode, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[list[Completion], list[float], float]:
        """Answers prompts together in a mode.

        Returns:
            The completions in the prompts' order, for each the seconds from the start of all to its first
            token, and the seconds of all.
        """
        self.engine.set_tree(self.trees[mode])
        requests = [Request(list(ids), max_new_tokens, key=number) for number, ids in enumerate(prompts)]
        first: dict[int, float] = {}

        def on_tokens(key: int, _: object) -> None:
            if key not in first:
                first[key] = time.perf_counter() - start

        start = time.perf_counter()
        done = list(generate(self.engine, requests, eos_ids=self.base.eos_ids, on_tokens=on_tokens))
        seconds = time.perf_counter() - start
        done.sort(key=lambda completion: completion.key)
        return done, [first[number] for number in range(len(prompts))], seconds

    def warm_up(self, row: Row) -> None:
        """One short answer in every mode, not timed: the first calls allocate memory and choose kernels."""
        ids = prompt_ids(self.base, row, [])[-self.engine.max_length + 1 :]
        for mode in MODES:
            self.answer(mode, [ids], min(16, self.max_new_tokens))

    def decode(self, rows: Sequence[Row], *, offset: int, peers: Sequence[Peer] = ()) -> Decoded:
        """Decodes a group in every mode, turn by turn.

        Args:
            rows: at most as many as the engine has rows.
            offset: where the rotation of modes starts; another for each group.
            peers: others who answer the same prompts.
        """
        result = Decoded([], {mode: [0.0] * self.repeats for mode in MODES})
        turns: list[list[Turn]] = [[] for _ in rows]
        active = list(range(len(rows)))
        for number in range(max(len(user_messages(row)) for row in rows)):
            prompts: dict[int, list[int]] = {}
            for member in active:
                if number < len(user_messages(rows[member])):
                    history = [turn.answers["plain"].token_ids for turn in turns[member]]
                    ids = prompt_ids(self.base, rows[member], history)
                    if len(ids) < self.engine.max_length:  # else there is no room for an answer
                        prompts[member] = ids
            active = list(prompts)
            if not active:
                break
            measured = self._measure(list(prompts.values()), offset + number, peers)
            for mode in MODES:
                for repeat in range(self.repeats):
                    result.seconds[mode][repeat] += measured.seconds[mode][repeat]
            for place, member in enumerate(active):
                row, ids = rows[member], prompts[member]
                user = user_messages(row)[number]
                turns[member].append(measured.turn(place, user, len(ids)))
                result.divergences += self._compare(measured, place, ids, row["id"], number)
        for row, own in zip(rows, turns, strict=True):
            if own:
                labels = {key: row.get(key) for key in ("id", "source", "intent", "category")}
                result.conversations.append(Conversation(**labels, turns=own))
        return result

    def _measure(self, prompts: Sequence[Sequence[int]], offset: int, peers: Sequence[Peer]) -> _Measured:
        """One turn of a group, by every mode and peer in turn, all repeats."""
        measured = _Measured()
        contestants: list[Any] = [*MODES, *peers]
        for repeat in range(self.repeats):
            start = (offset + repeat) % len(contestants)
            for contestant in contestants[start:] + contestants[:start]:
                if contestant in MODES:
                    done, first, seconds = self.answer(contestant, prompts, self.max_new_tokens)
                    measured.answers.setdefault(contestant, []).append(list(zip(done, first, strict=True)))
                    measured.seconds.setdefault(contestant, []).append(seconds)
                    continue
                timed = []
                for ids in prompts:
                    room = min(self.max_new_tokens, self.engine.max_length - len(ids))
                    timed.append(contestant.answer(list(ids), room))
                measured.peers.setdefault(contestant.name, []).append(timed)
        return measured

    def _compare(
        self, measured: _Measured, place: int, prompt: Sequence[int], conversation: str, turn: int
    ) -> list[Divergence]:
        """Where answers of any mode and repeat leave the first plain one; the same place is told once."""
        plain = measured.answers["plain"][0][place][0].token_ids
        found: list[Divergence] = []
        for mode in MODES:
            for repeat in measured.answers[mode]:
                answer = repeat[place][0].token_ids
                where = {"conversation": conversation, "turn": turn, "mode": mode}
                width = self.trees[mode].width
                divergence = examine(self.base.model, prompt, plain, answer, width=width, **where)
                if divergence is not None and divergence not in found:
                    found.append(divergence)
        return found


@dataclass
class _Measured:
    """One turn of a group. Innermost lists are by member, those around them by repeat."""

    answers: dict[Mode, list[list[tuple[Completion, float]]]] = field(default_factory=dict)
    seconds: dict[Mode, list[float]] = field(default_factory=dict)
    peers: dict[str, list[list[tuple[list[int], float]]]] = field(default_factory=dict)

    def turn(self, place: int, user: str, prompt_tokens: int) -> Turn:
        """One member's record."""
        answers: dict[Mode, Answer] = {}
        for mode in MODES:
            repeats = [repeat[place] for repeat in self.answers[mode]]
            completion = repeats[0][0]
            timings = [
                Timing(
                    tokens=len(done.token_ids),
                    seconds=done.seconds,
                    prefill=done.prefill_seconds,
                    first_token=first,
                )
                for done, first in repeats
            ]
            answers[mode] = Answer(
                token_ids=completion.token_ids,
                finish=completion.finish,
                accepted=completion.accepted,
                repeats=timings,
            )
        plain = answers["plain"].token_ids
        peers = {
            name: PeerAnswer(
                tokens=[len(repeat[place][0]) for repeat in repeats],
                seconds=[repeat[place][1] for repeat in repeats],
                same=repeats[0][place][0] == plain,
            )
            for name, repeats in self.peers.items()
        }
        return Turn(user=user, prompt_tokens=prompt_tokens, answers=answers, peers=peers)
