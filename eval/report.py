"""The HTML report: one file with its style and its figures inside, made from `results.json` alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval import plots
from eval.aggregate import own_speedups
from eval.results import Results
from eval.summary import interval, lossless, markdown, plural, what_ran
from medusa.files import atomic_file

_TEMPLATES = Path(__file__).parent / "templates"


def render(results: Results) -> str:
    """The report as HTML. The same results give the same bytes."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    drawn = {
        "throughput": plots.throughput(results),
        "distribution": plots.distribution(own_speedups(results.conversations)),
        "by_source": plots.speedup_by(results.by_source, "source"),
        "by_intent": plots.speedup_by(results.by_intent, "intent"),
        "by_category": plots.speedup_by(results.by_category, "category"),
        "acceptance": plots.acceptance_by_depth(results),
        "heads": plots.head_accuracy(results),
        "cost": plots.step_cost(results),
        "expected": plots.expected_acceptance(results),
        "gain": plots.expected_speedup(results),
        "tree": plots.tree_shape(results),
    }
    return environment.get_template("report.html.j2").render(
        r=results,
        css=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        plots={name: Markup(svg) for name, svg in drawn.items()},
        modes=_modes(results),
        facts=_facts(results),
        what_ran=what_ran(results),
        lossless=lossless(results).capitalize() if not results.lossless.not_allowed else lossless(results),
        decode_only=interval(results.speedup_decode_only),
        by_repeat=", ".join(f"{value:.2f}×" for value in results.speedup_by_repeat),
        plural=plural,
    )


def write_report(results: Results, path: str | os.PathLike) -> None:
    """Writes the report to `path`, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(render(results), encoding="utf-8")


def write_markdown(results: Results, path: str | os.PathLike) -> None:
    """Writes the Markdown summary to `path`, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(markdown(results), encoding="utf-8")


def _modes(results: Results) -> list[dict[str, str]]:
    speedups = {"plain": "", "chain": interval(results.chain.speedup), "tree": interval(results.speedup)}
    acceptance = {"plain": 1.0, "chain": results.chain.acceptance_length, "tree": results.acceptance_length}
    return [
        {
            "name": plots.NAMES[mode],
            "rate": f"{results.tokens_per_second[mode]:.1f}",
            "decode": f"{results.tokens_per_second_decode_only[mode]:.1f}",
            "first": f"{1000 * results.time_to_first_token[mode]:.0f} ms",
            "speedup": speedups[mode],
            "acceptance": f"{acceptance[mode]:.2f}",
        }
        for mode in ("plain", "chain", "tree")
    ]


def _facts(results: Results) -> list[tuple[str, str]]:
    machine, settings, checkpoint, data = results.machine, results.settings, results.checkpoint, results.data
    heads = ", ".join(f"{key} {value}" for key, value in checkpoint.heads.items() if value is not None)
    facts: list[tuple[str, Any]] = [
        (
            "machine",
            f"{machine.cpu}; {plural(machine.cores, 'core')}, {machine.memory_gib:.1f} GiB; {machine.system}",
        ),
        ("accelerator", machine.accelerator),
        ("threads", machine.threads),
        ("load average", f"{machine.load_before} before, {machine.load_after} after"),
        ("versions", ", ".join(f"{name} {version}" for name, version in results.versions.items())),
        (
            "base",
            f"{checkpoint.base}, {checkpoint.base_parameters:,} parameters; {checkpoint.base_fingerprint}",
        ),
        ("heads", f"{heads}; {checkpoint.parameters:,} parameters"),
        ("trained by", checkpoint.provenance.get("command")),
        (
            "data",
            f"{data.name}, {data.conversations} of {plural(data.out_of, 'conversation')}; {data.fingerprint}",
        ),
        ("warm-up", plural(settings.warmup, "conversation")),
        ("seed", settings.seed),
        ("took", f"{results.elapsed / 60:.1f} minutes"),
    ]
    return [(what, str(value)) for what, value in facts if value is not None]
