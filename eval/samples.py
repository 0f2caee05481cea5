"""A few answers to look at, with what the heads guessed told apart."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from eval.results import Answer, Conversation, Piece, Sample
from eval.stats import acceptance_length
from medusa.text import TextStream

SHORTEST = 12  # tokens; below, an acceptance length says little


def pieces(tokenizer: PreTrainedTokenizerBase, answer: Answer) -> list[Piece]:
    """The answer's text in runs of tokens from the heads and runs of the base's own.

    A character of several tokens counts with the token that completes it. Special tokens have no text.
    """
    heads = [False]
    for count in answer.accepted:
        heads += [True] * (count - 1) + [False]
    stream = TextStream(tokenizer)
    found: list[Piece] = []
    for place, (token, head) in enumerate(zip(answer.token_ids, heads, strict=True)):
        text = stream.push(token)
        if place == len(answer.token_ids) - 1:
            text += stream.finish()
        if text and found and found[-1].head == head:
            found[-1].text += text
        elif text:
            found.append(Piece(text=text, head=head))
    return found


def choose_samples(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation]) -> list[Sample]:
    """The answers with the longest, the middle and the shortest acceptance length: not the best ones only."""
    ranked = sorted(
        (
            (acceptance_length([turn.answers["tree"].accepted]), number, place)
            for number, conversation in enumerate(conversations)
            for place, turn in enumerate(conversation.turns)
            if len(turn.answers["tree"].token_ids) >= SHORTEST
        ),
        reverse=True,
    )
    chosen = {
        0: "the most accepted",
        len(ranked) // 2: "the middle one",
        len(ranked) - 1: "the least accepted",
    }
    samples = []
    for rank, why in sorted(chosen.items()) if ranked else ():
        length, number, place = ranked[rank]
        turn = conversations[number].turns[place]
        samples.append(
            Sample(
                conversation=conversations[number].id,
                why=why,
                user=turn.user,
                acceptance_length=length,
                pieces=pieces(tokenizer, turn.answers["tree"]),
            )
        )
    return samples
