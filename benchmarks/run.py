"""A benchmark from beginning to end: load, measure section by section, write."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from benchmarks.contest import OURS, Contestant, Ours, Transformers, measure_contest
from benchmarks.plots import draw
from benchmarks.records import Peers, Results, Steps, Throughput, save
from benchmarks.report import markdown
from benchmarks.steps import WARM_UP, cost_model, measure_steps
from benchmarks.subject import Prompts, read_prompts, room
from benchmarks.throughput import measure_throughput, rounds
from benchmarks.vllm_peers import KINDS, open_vllm, vllm_python
from eval import machine
from medusa.adaptive import WIDTHS as ADAPTIVE_WIDTHS
from medusa.base import Base
from medusa.checkpoint import Checkpoint, load_checkpoint
from medusa.cost import CostModel, cost_about, cost_file, measure_cost_model
from medusa.errors import MedusaError
from medusa.files import atomic_file
from medusa.provenance import without_machine_paths
from medusa.tree import Tree

SECTIONS = ("steps", "throughput", "peers")
PEERS = ("transformers", "transformers prompt lookup", *KINDS)
NO_VLLM = "vLLM is not installed here and no --vllm-python was given"
SUMMARY, PICTURES = "summary.md", ("bench.png", "bench.svg")


@dataclass(frozen=True)
class Options:
    """What to run; the command line's options, by the same names.

    Attributes:
        checkpoint: folder of the heads.
        out: folder for the results.
        command: as it was typed, for the record.
        sections: from `SECTIONS`, in that order.
        batches: numbers of rows of the sections steps and throughput.
        widths: tree widths of the section steps.
        data: `test` or a file of conversations.
        limit: prompts decoded at each number of rows, at least one for each row.
        max_new_tokens: of every answer, at least 2.
        repeats: rounds of everything.
        peers: from `PEERS`.
        must: whether a peer that is not there is an error rather than left out.
        peer_batches: prompts in flight of the section peers.
        medusa: a checkpoint of medusa heads beside `checkpoint`, for the section peers; None: without.
        vllm_python: the Python that has vLLM; None: this one, if it has.
        cost: a file of step costs; None: see `step_costs`.
    """

    checkpoint: Path
    out: Path
    command: str
    sections: tuple[str, ...] = SECTIONS
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    data: str = "test"
    limit: int = 2
    max_new_tokens: int = 32
    repeats: int = 3
    peers: tuple[str, ...] = PEERS
    must: bool = False
    peer_batches: tuple[int, ...] = (1,)
    medusa: Path | None = None
    vllm_python: Path | None = None
    cost: Path | None = None


class Bar:
    """Counts what has been done on one line of a progress bar."""

    def __init__(self, bar: Progress | None):
        self._bar = bar
        self._task = bar.add_task("loading", total=None) if bar else None

    def begin(self, total: int | None, text: str) -> None:
        """A section of so many parts begins."""
        if self._bar:
            self._bar.update(self._task, completed=0, total=total, description=text)

    def __call__(self, text: str) -> None:
        """Another part begins."""
        if self._bar:
            self._bar.update(self._task, advance=1, description=text)


def run(options: Options, base: Base, *, bar: Progress | None = None) -> Results:
    """Measures the sections asked for and writes results.json, summary.md and a picture.

    results.json is written after every section, so that what was measured is there if the run is stopped.

    Args:
        options: what to run.
        base: the heads' base, loaded.
        bar: shows how far it is.

    Raises:
        MedusaError: bad input.
    """
    began, load = time.perf_counter(), machine.load_average()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    line = Bar(bar)
    checkpoint = load_checkpoint(options.checkpoint, base)
    medusa = None if options.medusa is None else load_checkpoint(options.medusa, base)
    if medusa is not None and _kind(medusa) != "medusa":
        raise MedusaError(
            f"--medusa {options.medusa} holds {_kind(medusa)} heads; give those with --checkpoint"
        )
    if medusa is not None and _kind(checkpoint) == "medusa":
        raise MedusaError(
            f"--medusa {options.medusa}: --checkpoint holds medusa heads already; leave one out"
        )
    if "throughput" in options.sections and checkpoint.calibration is None:
        raise MedusaError(f"{options.checkpoint} has no calibration; run `medusa calibrate` on it first")
    python = vllm_python(options.vllm_python)  # what is missing is told now and not after ten minutes
    missing = [name for name in options.peers if name in KINDS and python is None]
    if "peers" in options.sections and options.must and missing:
        raise MedusaError(f"--peers {missing[0]}: {NO_VLLM}")
    wanted = max(options.limit, *options.batches, *options.peer_batches)
    prompts = read_prompts(base, options.data, wanted, options.max_new_tokens)
    weight = base.model.get_output_embeddings().weight
    results = Results(
        date=date,
        command=options.command,
        machine=machine.describe(load, weight.device),
        versions=machine.versions(),
        base=without_machine_paths(base.name),
        checkpoint=without_machine_paths(str(options.checkpoint)),
        dtype=str(weight.dtype).removeprefix("torch."),
        seconds=0.0,
    )
    for section in SECTIONS:
        if section not in options.sections:
            continue
        if section == "steps":
            results.steps = _steps(options, base, checkpoint, line)
        elif section == "throughput":
            results.throughput = _throughput(options, base, checkpoint, prompts, results.steps, line)
        else:
            results.peers = _peers(options, base, checkpoint, medusa, prompts, python, line)
        results.machine = machine.describe(load, weight.device)
        results.seconds = round(time.perf_counter() - began, 1)
        save(results, options.out)
    write_report(results, options.out)
    return results


def write_report(results: Results, folder: Path) -> None:
    """Draws summary.md and the pictures into a folder."""
    with atomic_file(folder / SUMMARY) as temporary:
        temporary.write_text(markdown(results), encoding="utf-8")
    for name in PICTURES:
        draw(results, folder / name)


def _steps(options: Options, base: Base, checkpoint: Checkpoint, line: Bar) -> Steps:
    repeats = max(5, options.repeats)  # quartiles of fewer say nothing
    line.begin(len(options.batches) * (WARM_UP + repeats), "steps")
    return measure_steps(
        base.model,
        checkpoint.heads,
        batches=options.batches,
        widths=options.widths,
        repeats=repeats,
        context=min(128, base.max_length // 2),
        progress=line,
    )


def _throughput(
    options: Options, base: Base, checkpoint: Checkpoint, prompts: Prompts, steps: Steps | None, line: Bar
) -> Throughput:
    cost, source = step_costs(options, base, checkpoint, steps, line)
    line.begin(rounds(options.batches, options.limit, options.repeats), "throughput")
    return measure_throughput(
        base,
        checkpoint,
        prompts,
        cost,
        cost_from=source,
        batches=options.batches,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        progress=line,
    )


def step_costs(
    options: Options, base: Base, checkpoint: Checkpoint, steps: Steps | None, progress: Callable[[str], None]
) -> tuple[CostModel, str]:
    """What the adaptive trees are chosen by, and a few words on where it comes from.

    The file that was named; or what this run has measured, if that is wide enough; or what `medusa cost --save` kept;
    or else it is measured now.

    Raises:
        MedusaError: the file cannot be read, or was measured under other circumstances.
    """
    about = cost_about(base, checkpoint.heads)
    if options.cost is not None:
        found = CostModel.from_json(options.cost)
        if dict(found.about) != about:
            raise MedusaError(
                f"--cost {options.cost} is of another machine, base, heads or number format; "
                "`medusa cost --save` measures this one"
            )
        return found, options.cost.name
    if steps is not None and max(options.widths) >= max(ADAPTIVE_WIDTHS):
        return cost_model(steps, about), "the section steps of this run"
    if cost_file(about).is_file():
        return CostModel.from_json(cost_file(about)), "what `medusa cost --save` kept"
    widths = [width for width in (1, 2, 4, 8, 16, 32) if width <= max(ADAPTIVE_WIDTHS)]
    measured = measure_cost_model(
        base,
        checkpoint.heads,
        batches=options.batches,
        widths=widths,
        repeats=5,
        progress=lambda batch: progress(f"cost of a step of {batch} rows"),
    )
    return measured, "measured at the start of this section"


def _peers(
    options: Options,
    base: Base,
    checkpoint: Checkpoint,
    medusa: Checkpoint | None,
    prompts: Prompts,
    python: str | None,
    line: Bar,
) -> Peers:
    """Opens the contestants for each number of prompts in flight and lets them answer."""
    kinds = [name for name in options.peers if name in KINDS]
    rows = max(options.peer_batches)
    length = room(prompts, options.max_new_tokens)
    contests, left_out = [], {}
    vllms: list[Contestant] = []
    if kinds and python is None:
        left_out = dict.fromkeys(kinds, NO_VLLM)
    elif kinds:
        line.begin(None, "starting vLLM")
        heads = options.medusa or (options.checkpoint if _kind(checkpoint) == "medusa" else None)
        vllms, left_out = open_vllm(
            kinds,
            python,
            base,
            rows=rows,
            max_length=min(length + 16, base.max_length),
            medusa=heads,
            progress=line,
        )
    try:
        if options.must and left_out:
            name, why = next(iter(left_out.items()))
            raise MedusaError(f"--peers {name}: {why}")
        for batch in options.peer_batches:
            entrants = _entrants(options, base, checkpoint, medusa, batch, length)
            if batch > 1 and "transformers prompt lookup" in options.peers:
                left_out["transformers prompt lookup"] = "with more than one prompt in flight: it takes one"
            groups = max(1, -(-options.limit // batch))
            line.begin(groups * options.repeats * (len(entrants) + len(vllms)), "peers")
            contests += measure_contest(
                [*entrants, *vllms],
                prompts,
                batch=batch,
                limit=options.limit,
                max_new_tokens=options.max_new_tokens,
                repeats=options.repeats,
                progress=line,
            )
    finally:
        for contestant in vllms:
            contestant.close()
    return Peers(max_new_tokens=options.max_new_tokens, contests=contests, left_out=left_out)


def _kind(checkpoint: Checkpoint) -> str:
    return checkpoint.heads.config.kind


def _entrants(
    options: Options, base: Base, checkpoint: Checkpoint, medusa: Checkpoint | None, batch: int, length: int
) -> list[Contestant]:
    """Ours, and what runs in this process."""
    size = {"rows": batch, "max_length": length}
    entrants: list[Contestant] = [Ours(OURS, "our engine, one node a step", base, None, Tree(), **size)]
    for found in (checkpoint, medusa):
        if found is not None:
            name = f"ours, {_kind(found)} tree"
            how = f"our engine, the {_kind(found)} heads' tree of {found.tree.width} nodes"
            entrants.append(Ours(name, how, base, found.heads, found.tree, **size))
    if "transformers" in options.peers:
        entrants.append(Transformers(base))
    if "transformers prompt lookup" in options.peers and batch == 1:
        entrants.append(Transformers(base, lookup=True))
    return entrants
