"""A run from beginning to end: load, decode, check, measure what stands beside it, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.aggregate import own
from eval.assemble import Beginning, assemble
from eval.decode import Decoder
from eval.journal import Entry, Journal
from eval.peers import Peer, open_peers
from eval.prompts import Prompts, balanced, load_prompts
from eval.report import write_markdown, write_report
from eval.results import Results, load, save
from eval.stats import rate
from eval.subject import Options, Subject, open_subject
from medusa.checkpoint import WEIGHTS
from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.files import sha256_file

Progress = Callable[[int, int, str], None]


def run(
    options: Options,
    *,
    engine_class: type[Engine] = Engine,
    progress: Progress = lambda done, total, text: None,
) -> Results:
    """Measures a checkpoint and writes results.json, report.html and summary.md to `options.out`.

    The results are what is read back from results.json, so that the report is the same as one drawn from it
    later. Whether the check of losslessness held is in `results.lossless`; the files are written either way.

    Args:
        options: what to run.
        engine_class: `Engine`, or a subclass to examine.
        progress: called with (conversations done, of how many, a few words) as the run goes on.

    Raises:
        MedusaError: bad input.
    """
    began = Beginning.now()
    _check(options)
    prompts = load_prompts(options.data, turns=options.turns, limit=options.limit, seed=options.seed)
    progress(0, len(prompts.rows), "loading")
    subject = open_subject(options, prompts, engine_class)
    peers, left_out = open_peers(
        options.peers,
        subject.base,
        dtype=options.dtype,
        batch=options.batch,
        max_length=subject.engine.max_length,
        vllm_url=options.vllm_url,
    )
    try:
        journal = Journal(
            options.out / "unfinished.jsonl", _settings(options, prompts, subject), resume=options.resume
        )
        try:
            _decode_all(options, prompts, subject, peers, journal, progress)
        finally:
            journal.close()
    finally:
        for peer in peers:
            peer.close()
    total = len(prompts.rows)
    progress(total, total, "accuracy of the heads, cost of a step")
    results = assemble(options, prompts, subject, peers, left_out, journal.entries, began)
    save(results, options.out / "results.json")
    results = load(options.out / "results.json")
    write_report(results, options.out / "report.html")
    write_markdown(results, options.out / "summary.md")
    journal.remove()
    return results


def _check(options: Options) -> None:
    for name in ("batch", "max_new_tokens", "repeats"):
        if getattr(options, name) < 1:
            raise MedusaError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.warmup < 0 or options.peer_conversations < 0:
        raise MedusaError("--warmup and --peer-conversations cannot be negative")


def _settings(options: Options, prompts: Prompts, subject: Subject) -> dict[str, Any]:
    """What a resumed run must share with the one it goes on with."""
    names = ("dtype", "weights", "batch", "max_new_tokens", "repeats", "seed", "peers", "peer_conversations")
    return {
        **{name: getattr(options, name) for name in names},
        "checkpoint": sha256_file(options.checkpoint / WEIGHTS),
        "tree": subject.trees["tree"].paths,
        "base": subject.base.fingerprint,
        "data": [prompts.data.fingerprint, [row["id"] for row in prompts.rows], prompts.data.turns],
    }


def _decode_all(
    options: Options,
    prompts: Prompts,
    subject: Subject,
    peers: Sequence[Peer],
    journal: Journal,
    progress: Progress,
) -> None:
    """Decodes every group that the journal does not hold yet."""
    rows = prompts.rows
    decoder = Decoder(
        subject.base,
        subject.engine,
        subject.trees,
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
    )
    for row in rows[: options.warmup]:
        decoder.warm_up(row)
    few = balanced(rows, options.peer_conversations, options.seed) if options.peer_conversations else []
    with_peers = {row["id"] for row in few}
    finished = {tuple(entry.rows) for entry in journal.entries}
    for number, start in enumerate(range(0, len(rows), options.batch)):
        members = list(range(start, min(start + options.batch, len(rows))))
        if tuple(members) not in finished:
            group = [rows[member] for member in members]
            theirs = peers if any(row["id"] in with_peers for row in group) else ()
            decoded = decoder.decode(group, offset=number, peers=theirs)
            journal.add(
                Entry(
                    rows=members,
                    conversations=decoded.conversations,
                    seconds=decoded.seconds,
                    divergences=decoded.divergences,
                )
            )
        progress(members[-1] + 1, len(rows), f"decoding, {_so_far(journal.entries)}")


def _so_far(entries: Sequence[Entry]) -> str:
    """The speedup until now, for the progress bar."""
    conversations = [conversation for entry in entries for conversation in entry.conversations]
    if not conversations:
        return "nothing yet"
    rates = {}
    for mode in ("tree", "plain"):
        figures = [own(conversation, mode) for conversation in conversations]
        rates[mode] = rate([row[0] for row in figures], [row[1] for row in figures])
    return f"{rates['tree'] / rates['plain']:.2f}× so far"
