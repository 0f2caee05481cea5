"""The section `throughput`: tokens per second of plain decoding, one static tree, and adaptive trees, by rows.

What is compared is the decoding of the same tokens: every row decodes as many, the end-of-turn token is one like any
other, and prompts are read before the clock starts. Groups of prompts are decoded by all modes next to each other, in
an order that rotates, so that a machine that slows down does so for all of them; each such pair gives one ratio.

An adaptive mode starts with what the calibration says, and keeps what it learns from the warm-up and from one pass to
the next, as a server does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.records import Mode, Pass, Throughput
from benchmarks.subject import Prompts, groups, random_heads, room
from eval.stats import speedup
from medusa.adaptive import AdaptiveTrees
from medusa.base import Base
from medusa.checkpoint import Checkpoint
from medusa.cost import CostModel
from medusa.decoding import Engine, StepResult
from medusa.generation import Request, generate
from medusa.tree import Tree

PLAIN, STATIC, ADAPTIVE, RANDOM = "plain", "tree", "adaptive", "adaptive, random heads"
MODES = (PLAIN, STATIC, ADAPTIVE, RANDOM)
WARM_UP_TOKENS = 8


class MeteredEngine(Engine):
    """An engine that keeps the time of its prefills and steps, and the widths of the trees that it took."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reset()

    def reset(self) -> None:
        """Sets the meters to zero."""
        self.step_seconds = self.prefill_seconds = 0.0
        self.widths: Counter[int] = Counter()

    def prefill(self, *args: Any, **kwargs: Any) -> int:
        """See `Engine.prefill`."""
        began = time.perf_counter()
        root = super().prefill(*args, **kwargs)  # waits for the device
        self.prefill_seconds += time.perf_counter() - began
        return root

    def step(self) -> StepResult:
        """See `Engine.step`."""
        began = time.perf_counter()
        result = super().step()  # waits for the device
        self.step_seconds += time.perf_counter() - began
        self.widths[self.tree.width] += 1
        return result


def decode(engine: Engine, prompts: Prompts, max_new_tokens: int, *, reuse: bool) -> list[list[int]]:
    """Answers as many prompts as the engine has rows: `max_new_tokens` tokens each, whatever they are.

    Args:
        engine: in its mode.
        prompts: token ids.
        max_new_tokens: of every answer.
        reuse: keep what the rows hold of the prompts, which shortens the prefill.
    """
    requests = [Request(ids, max_new_tokens, key=number) for number, ids in enumerate(prompts)]
    done = sorted(generate(engine, requests, eos_ids=frozenset(), reuse=reuse), key=lambda answer: answer.key)
    return [answer.token_ids for answer in done]


def can_pay(tree: Tree, cost: CostModel, batch: int) -> bool:
    """Whether a step with this tree takes less than D + 1 plain ones, which is what it commits at best."""
    return cost.seconds(batch, tree.width) <= (tree.depth + 1) * cost.seconds(batch, 1)


def measure_throughput(
    base: Base,
    checkpoint: Checkpoint,
    prompts: Prompts,
    cost: CostModel,
    *,
    cost_from: str,
    batches: Sequence[int],
    limit: int,
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Throughput:
    """Decodes groups of prompts in every mode.

    Args:
        base: with its model.
        checkpoint: heads, tree and calibration.
        prompts: token ids.
        cost: seconds of a step by rows and nodes.
        cost_from: a few words on where these come from.
        batches: numbers of rows.
        limit: prompts that are decoded at each number of rows, at least one group.
        max_new_tokens: of every answer, at least 2.
        repeats: rounds for each group.
        progress: called with a few words before each of `rounds(...)` rounds.
    """
    guessless = random_heads(checkpoint.heads)
    modes: list[Mode] = []
    skipped: list[str] = []
    for batch in batches:
        chosen = groups(prompts, batch, limit)
        capacity = room([ids for group in chosen for ids in group], max_new_tokens)
        engine = MeteredEngine(base.model, checkpoint.heads, batch=batch, max_length=capacity)
        other = MeteredEngine(base.model, guessless, batch=batch, max_length=capacity)
        entrants: dict[str, tuple[MeteredEngine, Tree | AdaptiveTrees]] = {PLAIN: (engine, Tree())}
        if can_pay(checkpoint.tree, cost, batch):
            entrants[STATIC] = (engine, checkpoint.tree)
        else:
            most = checkpoint.tree.depth + 1
            skipped.append(
                f"{batch} rows, {STATIC}: a step of {checkpoint.tree.width} nodes takes longer than {most} plain ones, "
                f"and commits at most {most} tokens a row"
            )
        for name, own in ((ADAPTIVE, engine), (RANDOM, other)):
            entrants[name] = (own, AdaptiveTrees.from_calibration(checkpoint.calibration, cost))
        passes = _passes(entrants, chosen, max_new_tokens, repeats, progress)
        modes += [
            Mode(batch=batch, name=name, passes=own, ratio=ratio(own, passes[PLAIN]))
            for name, own in passes.items()
        ]
        del engine, other, entrants  # their caches, before the next ones are made
    return Throughput(max_new_tokens=max_new_tokens, cost=cost_from, modes=modes, skipped=skipped)


def rounds(batches: Sequence[int], limit: int, repeats: int) -> int:
    """How often `measure_throughput` reports progress."""
    return sum(max(1, -(-limit // batch)) * repeats for batch in batches)


def ratio(passes: Sequence[Any], plain: Sequence[Any]) -> Any:
    """The rate of some passes over that of the plain ones next to them, with an interval over the pairs."""
    columns = [[entry.tokens for entry in passes], [entry.seconds for entry in passes]]
    columns += [[entry.tokens for entry in plain], [entry.seconds for entry in plain]]
    return speedup(*columns)


def _passes(
    entrants: Mapping[str, tuple[MeteredEngine, Tree | AdaptiveTrees]],
    chosen: Sequence[Prompts],
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, list[Pass]]:
    """All groups and rounds at one number of rows: mode -> its passes, in the same order for every mode."""
    passes: dict[str, list[Pass]] = {name: [] for name in entrants}
    names = list(entrants)
    for number, group in enumerate(chosen):
        for (
            name
        ) in names:  # fills the rows with the prompts, and lets the policies learn what their heads are worth
            _set(*entrants[name])
            decode(entrants[name][0], group, min(WARM_UP_TOKENS, max_new_tokens), reuse=True)
        answers: dict[str, list[list[list[int]]]] = {name: [] for name in names}
        for repeat in range(repeats):
            progress(f"throughput of {len(group)} row{'s' * (len(group) > 1)}")
            start = (number * repeats + repeat) % len(names)
            for name in names[start:] + names[:start]:
                engine, how = entrants[name]
                _set(engine, how)
                engine.reset()
                answers[name].append(decode(engine, group, max_new_tokens, reuse=True))
                passes[name].append(
                    Pass(
                        group=number,
                        repeat=repeat,
                        tokens=sum(len(row) - 1 for row in answers[name][-1]),
                        seconds=engine.step_seconds,
                        prefill=engine.prefill_seconds,
                        widths=dict(sorted(engine.widths.items())),
                        same=True,
                    )
                )
        for name in names:
            for one, found in zip(passes[name][-repeats:], answers[name], strict=True):
                one.same = found == answers[PLAIN][0]
    return passes


def _set(engine: Engine, how: Tree | AdaptiveTrees) -> None:
    if isinstance(how, Tree):
        engine.set_tree(how)
    else:
        engine.set_policy(how)
