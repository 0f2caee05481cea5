"""The format of a benchmark's `results.json`. Times are seconds, rates tokens per second; raw figures throughout."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import FiniteFloat, ValidationError

from eval.results import Interval, Machine, Record
from medusa.errors import MedusaError
from medusa.files import read_json, write_json

FORMAT = 1
RESULTS = "results.json"


class StepTimes(Record):
    """Steps of one number of rows and one tree width.

    Attributes:
        seconds: of each step, the whole of it.
        parts: part -> seconds in each step; at each place they sum to the whole.
    """

    batch: int
    width: int
    seconds: list[FiniteFloat]
    parts: dict[str, list[FiniteFloat]]


class Steps(Record):
    """The section `steps`.

    Attributes:
        context: tokens in each row's cache before the step.
        skipped: what was not measured, and why.
    """

    context: int
    times: list[StepTimes]
    skipped: list[str]


class Pass(Record):
    """A group of prompts decoded once.

    Attributes:
        group: which prompts.
        repeat: which round; passes of one group and round were decoded next to each other.
        tokens: committed by steps, so without each row's first, which the prefill gives.
        seconds: of the steps.
        prefill: seconds before them, the prompts' common part with the pass before left out.
        widths: nodes of a step's tree -> steps that took it.
        same: whether every row has the tokens of this group's first plain pass.
    """

    group: int
    repeat: int
    tokens: int
    seconds: FiniteFloat
    prefill: FiniteFloat
    widths: dict[int, int]
    same: bool


class Mode(Record):
    """One way to decode, at one number of rows; `ratio` is its rate over plain decoding's, with a 95% interval."""

    batch: int
    name: str
    passes: list[Pass]
    ratio: Interval


class Throughput(Record):
    """The section `throughput`.

    Attributes:
        max_new_tokens: of each row.
        cost: where the step costs come from, by which the adaptive trees are chosen.
        skipped: what was not measured, and why.
    """

    max_new_tokens: int
    cost: str
    modes: list[Mode]
    skipped: list[str]


class Answers(Record):
    """One group of prompts answered once by a contestant; `seconds` is the whole of it, prefill included."""

    group: int
    repeat: int
    tokens: int
    seconds: FiniteFloat
    same: bool


class Contest(Record):
    """One contestant at one number of prompts in flight.

    Attributes:
        how: a few words on how it was run.
        ratio: its rate over our plain decoding's, with a 95% interval.
    """

    batch: int
    name: str
    how: str
    answers: list[Answers]
    ratio: Interval


class Peers(Record):
    """The section `peers`.

    Attributes:
        left_out: who was not measured, and why.
    """

    max_new_tokens: int
    contests: list[Contest]
    left_out: dict[str, str]


class Results(Record):
    """The whole file. A section that was not measured is None."""

    format: int = FORMAT
    date: str
    command: str
    machine: Machine
    versions: dict[str, str]
    base: str
    checkpoint: str
    dtype: str
    seconds: FiniteFloat
    steps: Steps | None = None
    throughput: Throughput | None = None
    peers: Peers | None = None


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of one value, that value three times."""
    if len(values) == 1:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def save(results: Results, folder: str | os.PathLike) -> None:
    """Writes `results.json` into a folder, atomically."""
    write_json(Path(folder) / RESULTS, results.model_dump(mode="json"))


def load(path: str | os.PathLike) -> Results:
    """Reads a `results.json`, or the one in a run's folder.

    Raises:
        MedusaError: it is missing or does not have this format.
    """
    path = Path(path)
    if path.is_dir():
        path = path / RESULTS
    value = read_json(path)
    try:
        return Results.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise MedusaError(
            f"{path} holds no benchmark of format {FORMAT}: {where}: {first['msg']}; run `python -m benchmarks run`"
        ) from error
