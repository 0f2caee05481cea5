"""From the raw figures of conversations to those of a run. Pure: the same records give the same results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval import stats
from eval.results import MODES, Chain, Conversation, Group, Interval, Mode, Part, Prefill


def own(conversation: Conversation, mode: Mode) -> tuple[float, float, float]:
    """One conversation's tokens, seconds and seconds of prefill in a mode.

    Turns are summed within each repeat; the median repeat counts, so that one repeat during which another
    process took the machine does not.
    """
    answers = [turn.answers[mode] for turn in conversation.turns]
    repeats = list(zip(*(answer.repeats for answer in answers), strict=True))
    return (
        stats.typical([sum(timing.tokens for timing in turns) for turns in repeats]),
        stats.typical([sum(timing.seconds for timing in turns) for turns in repeats]),
        stats.typical([sum(timing.prefill for timing in turns) for turns in repeats]),
    )


def own_speedups(conversations: Sequence[Conversation], mode: Mode = "tree") -> list[float]:
    """Every conversation's own speedup."""
    speedups = []
    for conversation in conversations:
        tokens, seconds, _ = own(conversation, mode)
        plain_tokens, plain_seconds, _ = own(conversation, "plain")
        speedups.append((tokens / seconds) / (plain_tokens / plain_seconds))
    return speedups


def accepted(conversations: Sequence[Conversation], mode: Mode) -> list[list[int]]:
    """The tokens committed by each step, for each answer in a mode."""
    return [turn.answers[mode].accepted for conversation in conversations for turn in conversation.turns]


def parts(conversations: Sequence[Conversation], label: str, seed: int) -> dict[str, Part]:
    """Figures for each value of a label (`source`, `intent` or `category`); unlabelled ones left out."""
    found: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        if (value := getattr(conversation, label)) is not None:
            found.setdefault(value, []).append(conversation)
    return {
        value: Part(
            n=len(members),
            speedup=_speedup(
                [own(member, "tree") for member in members], [own(m, "plain") for m in members], seed
            ),
            acceptance_length=stats.acceptance_length(accepted(members, "tree")),
        )
        for value, members in sorted(found.items())
    }


def _speedup(
    fast: Sequence[tuple], slow: Sequence[tuple], seed: int, *, decode_only: bool = False
) -> Interval:
    """Speedup from (tokens, seconds, prefill seconds) rows."""

    def columns(rows: Sequence[tuple]) -> tuple[list, list]:
        return [row[0] for row in rows], [row[1] - (row[2] if decode_only else 0) for row in rows]

    return stats.speedup(*columns(fast), *columns(slow), seed=seed)


def _of_group(group: Group, conversations: Sequence[Conversation], mode: Mode) -> tuple[float, float, float]:
    """A group's tokens, wall-clock seconds and seconds of prefill."""
    members = [own(conversations[number], mode) for number in group.members]
    tokens, prefill = sum(row[0] for row in members), sum(row[2] for row in members)
    return tokens, stats.typical(group.seconds[mode]), prefill


def aggregate(
    conversations: Sequence[Conversation], groups: Sequence[Group], *, depth: int, chain_depth: int, seed: int
) -> dict[str, Any]:
    """The fields of `Results` that follow from its raw figures.

    Args:
        conversations: raw figures.
        groups: which were decoded together; the unit of the headline and its interval (at batch 1, a
        conversation).
        depth: the tree's.
        chain_depth: the chain's.
        seed: of the bootstrap.
    """
    rows = {mode: [_of_group(group, conversations, mode) for group in groups] for mode in MODES}
    repeats = len(groups[0].seconds["plain"])
    by_repeat = []
    for repeat in range(repeats):
        rates = {
            mode: stats.rate(
                [row[0] for row in rows[mode]], [group.seconds[mode][repeat] for group in groups]
            )
            for mode in ("plain", "tree")
        }
        by_repeat.append(rates["tree"] / rates["plain"])
    answers = {
        mode: [turn.answers[mode] for conversation in conversations for turn in conversation.turns]
        for mode in MODES
    }
    prompt_tokens = sum(turn.prompt_tokens for conversation in conversations for turn in conversation.turns)
    prefill = sum(own(conversation, "plain")[2] for conversation in conversations)
    chain_accepted = accepted(conversations, "chain")
    tree_accepted = accepted(conversations, "tree")
    return {
        "speedup": _speedup(rows["tree"], rows["plain"], seed),
        "speedup_decode_only": _speedup(rows["tree"], rows["plain"], seed, decode_only=True),
        "speedup_by_repeat": by_repeat,
        "acceptance_length": stats.acceptance_length(tree_accepted),
        "tokens_per_second": {
            mode: stats.rate([row[0] for row in rows[mode]], [row[1] for row in rows[mode]]) for mode in MODES
        },
        "tokens_per_second_decode_only": {
            mode: stats.rate([row[0] for row in rows[mode]], [row[1] - row[2] for row in rows[mode]])
            for mode in MODES
        },
        "acceptance_rate": stats.acceptance_rate(tree_accepted, depth),
        "chain": Chain(
            depth=chain_depth,
            speedup=_speedup(rows["chain"], rows["plain"], seed),
            acceptance_length=stats.acceptance_length(chain_accepted),
            acceptance_rate=stats.acceptance_rate(chain_accepted, chain_depth),
        ),
        "time_to_first_token": {
            mode: stats.typical([t.first_token for answer in answers[mode] for t in answer.repeats])
            for mode in MODES
        },
        "prefill": Prefill(tokens=prompt_tokens, seconds=prefill, tokens_per_second=prompt_tokens / prefill),
        "by_source": parts(conversations, "source", seed),
        "by_intent": parts(conversations, "intent", seed),
        "by_category": parts(conversations, "category", seed),
    }
