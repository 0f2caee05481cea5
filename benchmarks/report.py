"""A benchmark as Markdown: tables of medians and their spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.parts import PARTS
from benchmarks.records import Answers, Contest, Mode, Pass, Peers, Results, Steps, Throughput, quartiles
from eval.results import Interval


def markdown(results: Results) -> str:
    """The whole summary."""
    machine = results.machine
    where = machine.accelerator or machine.cpu
    lines = [
        "# Benchmark",
        "",
        f"{results.date}, {where}, {machine.cores} cores, {machine.threads} threads, {machine.memory_gib:.0f} GiB, "
        f"load average {machine.load_before:.1f} before and {machine.load_after:.1f} after; "
        f"{results.seconds / 60:.0f} minutes.",
        "",
        f"Base {results.base}, heads {results.checkpoint}, {results.dtype}. `{results.command}`",
        "",
        ", ".join(f"{name} {version}" for name, version in results.versions.items()) + ".",
    ]
    if results.steps is not None:
        lines += ["", *_steps(results.steps)]
    if results.throughput is not None:
        lines += ["", *_throughput(results.throughput)]
    if results.peers is not None:
        lines += ["", *_peers(results.peers)]
    return "\n".join(lines) + "\n"


def rate_quartiles(entries: Sequence[Pass | Answers]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the passes' rates."""
    return quartiles([entry.tokens / entry.seconds for entry in entries])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(words)} |" for words in (head, ["---"] * len(head), *rows)]


def _interval(found: Interval) -> str:
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def _range(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f}"


def _skipped(lines: Sequence[str]) -> list[str]:
    return ["", "Not measured:", "", *(f"- {line}" for line in lines)] if lines else []


def _steps(steps: Steps) -> list[str]:
    def ms(values: Sequence[float]) -> float:
        return 1000 * quartiles(values)[1]

    rows = []
    for entry in steps.times:
        low, median, high = (1000 * value for value in quartiles(entry.seconds))
        parts = [f"{ms(entry.parts[name]):.1f}" for name in PARTS]
        rows.append([str(entry.batch), str(entry.width), f"{median:.1f}", _range(low, high), *parts])
    return [
        "## Steps",
        "",
        f"Milliseconds of a step with {steps.context} tokens in each row's cache: the whole (median, quartiles), and "
        "the median of each part. `mask` holds positions and visibility, `accept` the choice of tokens and of the "
        "path, `host` everything else, Python's part.",
        "",
        *_table(["rows", "nodes", "whole", "quartiles", *PARTS], rows),
        *_skipped(steps.skipped),
    ]


def widths(mode: Mode) -> dict[int, int]:
    """How often each tree width was taken, over all passes."""
    counts: dict[int, int] = {}
    for entry in mode.passes:
        for width, count in entry.widths.items():
            counts[width] = counts.get(width, 0) + count
    return dict(sorted(counts.items()))


def _throughput(found: Throughput) -> list[str]:
    rows = []
    for mode in found.modes:
        low, median, high = rate_quartiles(mode.passes)
        taken = ", ".join(f"{width}: {count}" for width, count in widths(mode).items())
        steps = sum(widths(mode).values())
        different = sum(not entry.same for entry in mode.passes)
        rows.append(
            [
                str(mode.batch),
                mode.name,
                f"{median:.1f}",
                _range(low, high),
                _interval(mode.ratio),
                taken,
                str(steps),
                f"{different} of {len(mode.passes)}",
            ]
        )
    return [
        "## Throughput",
        "",
        f"Tokens per second of decoding, without the prompts' reading, {found.max_new_tokens} tokens a row; the ratio "
        f"to plain decoding over neighbouring passes, with its 95% interval. Step costs: {found.cost}.",
        "",
        *_table(
            ["rows", "mode", "tok/s", "quartiles", "× plain", "nodes: steps", "steps", "passes unlike plain"],
            rows,
        ),
        *_skipped(found.skipped),
    ]


def _peers(peers: Peers) -> list[str]:
    rows = []
    for contest in peers.contests:
        low, median, high = rate_quartiles(contest.answers)
        rows.append(
            [
                str(contest.batch),
                contest.name,
                f"{median:.1f}",
                _range(low, high),
                _interval(contest.ratio),
                _same(contest),
                contest.how,
            ]
        )
    left_out = [f"{name}: {why}" for name, why in peers.left_out.items()]
    return [
        "## Peers",
        "",
        f"Tokens per second, the prompts' reading included, {peers.max_new_tokens} tokens each; the ratio to our plain "
        "decoding with its 95% interval.",
        "",
        *_table(
            ["in flight", "who", "tok/s", "quartiles", "× ours, plain", "same tokens as plain", "how"], rows
        ),
        *_skipped(left_out),
    ]


def _same(contest: Contest) -> str:
    return f"{sum(entry.same for entry in contest.answers)} of {len(contest.answers)}"
