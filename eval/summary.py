"""A run in few words: the lines that the console, the Markdown summary and the report's head share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from eval.results import Interval, Part, Results


def interval(value: Interval) -> str:
    """`2.10× (2.01 to 2.18)`."""
    if value.low == value.high:
        return f"{value.mean:.2f}×"
    return f"{value.mean:.2f}× ({value.low:.2f} to {value.high:.2f})"


def plural(count: int, thing: str) -> str:
    """`1 answer`, `2 answers`."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def lossless(results: Results) -> str:
    """One sentence on the check."""
    check = results.lossless
    checked = plural(check.checked, "answer")
    if not check.different:
        return f"yes: {checked} compared with plain, token for token, none differs"
    differ = f"{check.different} of {checked} differ from plain"
    if check.not_allowed:
        return f"NO: {differ}, {check.not_allowed} of them without a tie of the base's two best logits"
    dtype = results.settings.dtype
    return f"yes, up to ties: {differ}, each at a tie of the base's two best logits in {dtype}"


def headline(results: Results) -> list[tuple[str, str]]:
    """(what, figure) rows, the most important first."""
    rate = results.tokens_per_second
    first = results.time_to_first_token
    rows = [
        ("speedup over plain", interval(results.speedup)),
        ("speedup, decode only", interval(results.speedup_decode_only)),
        ("acceptance length", f"{results.acceptance_length:.2f} tokens per step"),
        ("tokens/s, tree", f"{rate['tree']:.1f}"),
        ("tokens/s, plain", f"{rate['plain']:.1f}"),
    ]
    chain = results.chain
    figure = f"{interval(chain.speedup)}, acceptance length {chain.acceptance_length:.2f}"
    rows.append(("chain of top-1 tokens", f"{figure}, {rate['chain']:.1f} tokens/s"))
    for peer in results.peers:
        count = plural(peer.conversations, "conversation")
        figure = (
            f"{peer.tokens_per_second:.1f} (plain here: {peer.plain_on_the_same:.1f}, on the same {count})"
        )
        rows.append((f"tokens/s, {peer.name} {peer.version}", figure))
    rows.append(
        (
            "time to first token",
            f"{1000 * first['tree']:.0f} ms tree, {1000 * first['plain']:.0f} ms plain (median)",
        )
    )
    rows.append(("lossless", lossless(results)))
    return rows


def what_ran(results: Results) -> str:
    """One line: heads, tree, data, settings."""
    heads, settings, data = results.checkpoint.heads, results.settings, results.data
    count = plural(data.conversations, "conversation")
    if data.conversations < data.out_of:
        count += f" of {data.out_of:,}"
    weights = "" if settings.weights == "full" else f", {settings.weights} weights"
    return (
        f"{heads['kind']}, {plural(heads['num_heads'], 'head')}, tree of {results.tree.width} nodes; "
        f"{count} ({plural(data.turns, 'turn')}) from {data.name}; {settings.dtype}{weights}, "
        f"batch {settings.batch}, greedy, up to {settings.max_new_tokens} tokens, {plural(settings.repeats, 'repeat')}"
    )


def print_summary(results: Results, console: Console, report: str) -> None:
    """The result table and the report's path."""
    table = Table(
        title=f"{results.checkpoint.name} on {results.data.name}", title_justify="left", show_header=False
    )
    table.add_column(style="dim")
    table.add_column()
    for what, figure in headline(results):
        table.add_row(what, figure)
    console.print(table)
    console.print(what_ran(results), style="dim")
    # Never wrapped: a path that is cut in two cannot be opened.
    console.print(f"report: {report}", soft_wrap=True)


def markdown(results: Results) -> str:
    """The summary for a pull request: headline, parts of the data, machine."""
    lines = [f"### {results.checkpoint.name} on {results.data.name}", "", what_ran(results) + ".", ""]
    lines += _table(["", ""], headline(results))
    kinds = {"source": results.by_source, "intent": results.by_intent, "category": results.by_category}
    for kind, parts in kinds.items():
        if len(parts) > 1:
            lines += ["", *_table([f"by {kind}", "n", "speedup", "acceptance length"], part_rows(parts))]
    machine = results.machine
    lines += ["", f"{machine.cpu}, {plural(machine.cores, 'core')}, {machine.memory_gib:.0f} GiB;"]
    lines[-1] += (
        f" load average {machine.load_before} before, {machine.load_after} after; `{results.command}`"
    )
    return "\n".join(lines) + "\n"


def part_rows(parts: Mapping[str, Part]) -> list[tuple[str, str, str, str]]:
    """(name, n, speedup, acceptance length) of every part, the fastest first."""
    ordered = sorted(parts.items(), key=lambda item: -item[1].speedup.mean)
    return [(name, str(p.n), interval(p.speedup), f"{p.acceptance_length:.2f}") for name, p in ordered]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(header), line(["---"] * len(header)), *map(line, rows)]


def side_by_side(runs: Mapping[str, Results]) -> list[tuple[str, ...]]:
    """Rows of what, then one figure for each run.

    Args:
        runs: what to call a run -> its results.
    """

    def same(results: Results) -> str:
        check = results.lossless
        return (
            "NO"
            if check.not_allowed
            else f"yes, {plural(check.different, 'tie')}"
            if check.different
            else "yes"
        )

    figures = {
        "heads": lambda r: f"{r.checkpoint.heads['kind']}, {r.checkpoint.heads['num_heads']}",
        "tree": lambda r: f"{r.tree.width} nodes",
        "speedup": lambda r: interval(r.speedup),
        "acceptance length": lambda r: f"{r.acceptance_length:.2f}",
        "tokens/s": lambda r: f"{r.tokens_per_second['tree']:.1f}",
        "tokens/s, plain": lambda r: f"{r.tokens_per_second['plain']:.1f}",
        "speedup, chain": lambda r: interval(r.chain.speedup),
        "lossless": same,
    }
    if any(results.settings.weights != "full" for results in runs.values()):
        figures["weights"] = lambda r: r.settings.weights
    for peer in sorted({peer.name for results in runs.values() for peer in results.peers}):
        figures[f"tokens/s, {peer}"] = lambda r, peer=peer: (
            f"{r.tokens_per_second[peer]:.1f}" if peer in r.tokens_per_second else ""
        )
    return [(what, *(figure(results) for results in runs.values())) for what, figure in figures.items()]


def print_side_by_side(runs: Mapping[str, Results], console: Console) -> None:
    """The table of `side_by_side`."""
    table = Table("", *runs)
    table.columns[0].style = "dim"
    for row in side_by_side(runs):
        table.add_row(*row)
    console.print(table)


def markdown_side_by_side(runs: Mapping[str, Results]) -> str:
    """The same as a Markdown table."""
    return "\n".join(_table(["", *runs], side_by_side(runs))) + "\n"
