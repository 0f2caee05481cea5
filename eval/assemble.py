"""From decoded conversations to results: aggregates, the check, the heads' accuracy, the cost of a step."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eval import machine, results, stats
from eval.accuracy import head_accuracy
from eval.aggregate import aggregate, own
from eval.decode import prompt_ids
from eval.journal import Entry
from eval.peers import Peer
from eval.prompts import Prompts
from eval.results import Conversation, Divergence, Group, Lossless, Results, StepCost, TreeShape
from eval.samples import choose_samples
from eval.subject import Options, Subject
from medusa.calibration import Calibration
from medusa.cost import WIDTHS, measure_step_cost
from medusa.errors import MedusaError
from medusa.quantize import count_parameters


@dataclass(frozen=True)
class Beginning:
    """When a run began, and how busy the machine was."""

    clock: float
    date: str
    load: float

    @classmethod
    def now(cls) -> Beginning:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        return cls(time.perf_counter(), date, machine.load_average())


def check(conversations: Sequence[Conversation], divergences: Sequence[Divergence]) -> Lossless:
    """What the comparison found: for each answer of tree and chain, and of plain where a repeat differed."""
    places = {(d.conversation, d.turn, d.mode) for d in divergences}
    bad = {(d.conversation, d.turn, d.mode) for d in divergences if not d.allowed}
    again = sum(mode == "plain" for _, _, mode in places)
    answers = sum(len(conversation.turns) for conversation in conversations)
    return Lossless(
        checked=2 * answers + again,
        different=len(places),
        not_allowed=len(bad),
        divergences=list(divergences),
    )


def assemble(
    options: Options,
    prompts: Prompts,
    subject: Subject,
    peers: Sequence[Peer],
    left_out: dict[str, str],
    entries: Sequence[Entry],
    began: Beginning,
) -> Results:
    """Results from what was decoded; measures the heads' accuracy and the cost of a step.

    Args:
        options: of the run.
        prompts: what was to be decoded.
        subject: what was measured.
        peers: those that answered.
        left_out: peer -> why it did not.
        entries: the decoded groups.
        began: when the run did.

    Raises:
        MedusaError: nothing was decoded.
    """
    base, checkpoint, tree, chain = (
        subject.base,
        subject.checkpoint,
        subject.trees["tree"],
        subject.trees["chain"],
    )
    conversations, groups = [], []
    for entry in sorted(entries, key=lambda entry: entry.rows):
        members = list(range(len(conversations), len(conversations) + len(entry.conversations)))
        if members:
            conversations += entry.conversations
            groups.append(Group(members=members, seconds=entry.seconds))
    if not conversations:
        raise MedusaError("no prompt leaves room for an answer in the base's context; nothing was decoded")
    rows = {row["id"]: row for row in prompts.rows}
    answers = []
    for conversation in conversations:
        plain = [turn.answers["plain"].token_ids for turn in conversation.turns]
        row = rows[conversation.id]
        answers += [(prompt_ids(base, row, plain[:turn]), answer) for turn, answer in enumerate(plain)]
    aggregated = aggregate(
        conversations, groups, depth=tree.depth, chain_depth=chain.depth, seed=options.seed
    )
    found = [peer_result(peer, conversations) for peer in peers]
    aggregated["tokens_per_second"] |= {peer.name: peer.tokens_per_second for peer in found}
    decoded = {conversation.id for conversation in conversations}
    data = prompts.data.model_copy(
        update={
            "conversations": len(conversations),
            "turns": sum(len(conversation.turns) for conversation in conversations),
            "left_out": [row["id"] for row in prompts.rows if row["id"] not in decoded],
        }
    )
    return Results(
        **aggregated,
        lossless=check(conversations, [d for entry in entries for d in entry.divergences]),
        head_accuracy=head_accuracy(checkpoint.heads, base, answers),
        step_cost=step_cost(subject, options.cost_repeats),
        tree=TreeShape(
            paths=[list(path) for path in tree.paths],
            width=tree.width,
            depth=tree.depth,
            expected=expected_lengths(checkpoint.calibration),
        ),
        peers=found,
        peers_left_out=left_out,
        samples=choose_samples(base.tokenizer, conversations),
        checkpoint=results.Checkpoint(
            name=options.checkpoint.resolve().name,
            heads=checkpoint.heads.config.to_dict(),
            base=checkpoint.config["base"]["name"],
            base_fingerprint=base.fingerprint,
            parameters=sum(parameter.numel() for parameter in checkpoint.heads.parameters()),
            base_parameters=count_parameters(base.model),
            provenance=checkpoint.provenance,
        ),
        data=data,
        settings=results.Settings(
            dtype=options.dtype,
            weights=options.weights,
            batch=options.batch,
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            warmup=options.warmup,
            turns=prompts.turns,
            limit=options.limit,
            seed=options.seed,
        ),
        machine=machine.describe(began.load, base.model.device),
        versions=machine.versions(),
        command=options.command,
        started=began.date,
        elapsed=time.perf_counter() - began.clock,
        conversations=conversations,
        groups=groups,
    )


def step_cost(subject: Subject, repeats: int) -> StepCost:
    """The time of a step by tree width, at the run's batch."""
    tree, engine = subject.trees["tree"], subject.engine
    measured = measure_step_cost(engine.model, engine.heads, batch=engine.batch, repeats=repeats)
    return StepCost(
        seconds={step.width: step.median for step in measured},
        low={step.width: step.low for step in measured},
        high={step.width: step.high for step in measured},
        chosen=tree.width,
    )


def expected_lengths(calibration: Calibration | None) -> dict[int, float]:
    """Width -> acceptance length that calibration expects of the best tree, as far as it knows paths."""
    if calibration is None:
        return {}
    trees = [calibration.best_tree(width) for width in range(1, max(WIDTHS) + 1)]
    return {tree.width: calibration.expected(tree) for tree in trees}


def peer_result(peer: Peer, conversations: Sequence[Conversation]) -> results.Peer:
    """A peer's figures over the conversations that it answered."""
    answered = [conversation for conversation in conversations if peer.name in conversation.turns[0].peers]
    tokens, seconds, same = 0.0, 0.0, []
    for conversation in answered:
        theirs = [turn.peers[peer.name] for turn in conversation.turns]
        tokens += stats.typical([sum(column) for column in zip(*(answer.tokens for answer in theirs))])
        seconds += stats.typical([sum(column) for column in zip(*(answer.seconds for answer in theirs))])
        same += [answer.same for answer in theirs]
    plain = [own(conversation, "plain") for conversation in answered]
    return results.Peer(
        name=peer.name,
        version=peer.version,
        conversations=len(answered),
        answers=len(same),
        same=None if None in same else sum(same),
        tokens_per_second=tokens / seconds,
        plain_on_the_same=stats.rate([row[0] for row in plain], [row[1] for row in plain]),
        how=peer.how,
    )
