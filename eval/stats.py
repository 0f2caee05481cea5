"""The statistics of a run: ratios of totals and their bootstrap intervals. Pure functions over numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from eval.results import Interval

RESAMPLES = 10_000


def rate(tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """Tokens per second over everything: total tokens / total seconds, so that long answers weigh more."""
    return float(np.sum(tokens) / np.sum(seconds))


def speedup(
    tokens: Sequence[float],
    seconds: Sequence[float],
    plain_tokens: Sequence[float],
    plain_seconds: Sequence[float],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """The ratio of two rates, with a percentile bootstrap interval of 95% over conversations.

    Position i of all four sequences belongs to conversation i. A resample draws whole conversations with
    replacement and keeps each one's pair of measurements together, because they share the prompt and were
    measured next to each other (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3).
    `mean` is the ratio over the conversations as they are, not an average of resamples. With one conversation
    `low` and `high` equal `mean`.

    Args:
        tokens: tokens committed by the mode that is measured.
        seconds: wall-clock seconds that they took.
        plain_tokens: the same of the autoregressive loop.
        plain_seconds: the same of the autoregressive loop.
        seed: of the resampling.
        resamples: how many.

    Raises:
        ValueError: the sequences are empty or differ in length.
    """
    columns = [np.asarray(column, dtype=float) for column in (tokens, seconds, plain_tokens, plain_seconds)]
    count = len(columns[0])
    if count == 0 or any(len(column) != count for column in columns):
        raise ValueError(f"need one figure for each conversation, got {[len(column) for column in columns]}")

    def ratio(sums: Sequence) -> np.ndarray:
        return (sums[0] / sums[1]) / (sums[2] / sums[3])

    mean = float(ratio([column.sum() for column in columns]))
    if count == 1:
        return Interval(mean=mean, low=mean, high=mean)
    # How often each conversation is drawn, rather than which one: the sums are then one small matrix product.
    drawn = np.random.default_rng(seed).multinomial(count, [1 / count] * count, size=resamples)
    low, high = np.percentile(ratio([drawn @ column for column in columns]), [2.5, 97.5])
    return Interval(mean=mean, low=float(low), high=float(high))


def acceptance_length(accepted: Sequence[Sequence[int]]) -> float:
    """Tokens committed per step, the base's own included, over all steps of all answers; 1 without a step.

    Args:
        accepted: for each answer, the tokens committed by each step.
    """
    steps = sum(map(len, accepted))
    return sum(map(sum, accepted)) / steps if steps else 1.0


def acceptance_rate(accepted: Sequence[Sequence[int]], depth: int) -> list[float]:
    """P(depth d accepted | depth d - 1 accepted) for d = 1..depth; depth 0 is always accepted.

    The last step of an answer may have been cut short by its end (EOS, the token limit), so the depth at
    which it stopped is not counted as refused: it was never tried. A depth that was never reached ends the
    list.

    Args:
        accepted: for each answer, the tokens committed by each step, each from 1 to depth + 1.
        depth: the tree's.
    """
    tried = np.zeros(depth + 1, dtype=int)
    taken = np.zeros(depth + 1, dtype=int)
    for steps in accepted:
        for number, tokens in enumerate(steps):
            last = number == len(steps) - 1
            taken[1:tokens] += 1
            tried[1 : tokens if last else tokens + 1] += 1
    rates = []
    for hit, out_of in zip(taken[1:], tried[1:]):
        if out_of == 0:
            break
        rates.append(float(hit / out_of))
    return rates


def typical(values: Sequence[float]) -> float:
    """The median: one repeat that another process on the machine disturbed does not move it."""
    return float(median(values))
