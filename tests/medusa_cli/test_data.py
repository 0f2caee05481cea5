"""`medusa data ...` and `medusa calibrate`, one after the other, on a base whose answers are known."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from medusa.calibration import Calibration
from medusa.data.states import StatesCache
from medusa.errors import MedusaError
from medusa_cli.commands import app
from tests.medusa_cli.looper import TEXT


def run(*arguments: object) -> str:
    words = list(map(str, arguments))
    result = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(3)))
    return path


def test_prompts_are_three_splits_with_a_manifest(tmp_path):
    run("data", "prompts", "--out", tmp_path / "p", "--train", 30, "--validation", 12, "--seed", 4)
    counts = {
        name: len((tmp_path / "p" / f"{name}.jsonl").read_text().splitlines())
        for name in ("train", "validation")
    }
    assert counts == {"train": 30, "validation": 12}
    assert json.loads((tmp_path / "p" / "manifest.json").read_text())["seed"] == 4


def test_distill_states_and_calibrate(loop, prompts, tmp_path):
    base = ("--base", loop.base, "--dtype", "float32")
    asked = ("data", "distill", prompts, *base, "--out", tmp_path / "answers.jsonl")
    settings = (
        "--backend",
        "engine",
        "--max-new-tokens",
        22,
        "--greedy-share",
        1,
        "--states",
        tmp_path / "while",
    )
    run(*asked, *settings)
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["messages"][-1]["content"] for row in rows] == [2 * TEXT] * 3
    assert [row["finish"] for row in rows] == [["length"]] * 3

    before = (tmp_path / "answers.jsonl").read_bytes()
    assert "0 conversations answered" in run(*asked, *settings)
    assert (tmp_path / "answers.jsonl").read_bytes() == before

    run("data", "states", tmp_path / "answers.jsonl", *base, "--out", tmp_path / "after")
    caches = [StatesCache(tmp_path / name) for name in ("while", "after")]
    assert [cache.num_tokens for cache in caches] == [66, 66]

    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(loop.checkpoints["medusa"], checkpoint)
    shown = run("calibrate", "--checkpoint", checkpoint, *base, "--states", tmp_path / "after")
    found = Calibration.from_json(checkpoint / "calibration.json")
    assert found.positions == 66
    assert min(found.accuracy(1)) > 0.9  # the heads know the text, but for its first token
    assert "top-10" in shown


def test_workers_and_parts_make_what_one_process_makes(loop, prompts, tmp_path):
    base = ("--base", loop.base, "--dtype", "float32")
    settings = ("--backend", "engine", "--max-new-tokens", 22, "--greedy-share", 1)
    asked = ("data", "distill", prompts, *base, *settings)

    def rows(name: str) -> dict:
        lines = (tmp_path / name).read_text().splitlines()
        return {row["id"]: row for row in map(json.loads, lines)}

    def states(name: str) -> set:
        cache = StatesCache(tmp_path / name)
        return {tuple(cache.get([i]).tokens.tolist()) for i in range(cache.num_segments)}

    run(*asked, "--out", tmp_path / "one.jsonl", "--states", tmp_path / "one")
    side_by_side = (*asked, "--out", tmp_path / "two.jsonl", "--states", tmp_path / "two", "--workers", 2)
    run(*side_by_side)
    assert rows("two.jsonl") == rows("one.jsonl")
    assert states("two") == states("one")
    assert not list(tmp_path.glob("*.parts"))
    assert "is there already" in run(*side_by_side)

    for number in (1, 2):
        part = tmp_path / f"part{number}"
        run(*asked, "--out", f"{part}.jsonl", "--states", part, "--part", f"{number}/2")
    parts = [tmp_path / "part1", tmp_path / "part2"]
    files = [f"{part}.jsonl" for part in parts]
    folders = ("--states", parts[0], "--states", parts[1], "--out-states", tmp_path / "all")
    run("data", "merge", *files, *base, *folders, "--out", tmp_path / "all.jsonl")
    assert rows("all.jsonl") == rows("one.jsonl")
    assert states("all") == states("one")


def test_workers_that_fail_keep_their_work_and_say_how_to_go_on(loop, prompts, tmp_path):
    asked = ["data", "distill", str(prompts), "--base", str(loop.base), "--out", str(tmp_path / "o.jsonl")]
    asked += ["--backend", "engine", "--workers", "2"]
    with pytest.raises(MedusaError, match="process 1 of 2 stopped"):
        CliRunner().invoke(app, [*asked, "--top-p", "7"], catch_exceptions=False)
    with pytest.raises(MedusaError, match="holds the work of 2"):
        CliRunner().invoke(app, [*asked, "--workers", "3"], catch_exceptions=False)
    with pytest.raises(MedusaError, match="cannot both"):
        CliRunner().invoke(app, [*asked, "--part", "1/2"], catch_exceptions=False)
    for part in ("3/2", "0/2", "x", "1/2/3"):
        words = [*asked[:-2], "--part", part]
        with pytest.raises(MedusaError, match="I/N"):
            CliRunner().invoke(app, words, catch_exceptions=False)


def test_states_of_another_base_are_refused(loop, tmp_path, prompts):
    from tests.medusa.training.tiny import make_tiny

    tiny = make_tiny(tmp_path / "tiny")
    with pytest.raises(MedusaError, match="another base"):
        run("calibrate", *loop.options(), "--states", tiny.folder / "train")


def test_an_unknown_backend_names_the_known_ones(loop, prompts, tmp_path):
    with pytest.raises(MedusaError, match="auto, vllm or engine"):
        run(
            "data", "distill", prompts, "--base", loop.base, "--out", tmp_path / "x.jsonl", "--backend", "vlm"
        )


def test_too_many_bad_rows_are_an_error_with_line_numbers(loop, prompts, tmp_path):
    prompts.write_text(prompts.read_text() + "{broken\n")
    with pytest.raises(MedusaError, match="line 4"):
        run("data", "distill", prompts, "--base", loop.base, "--out", tmp_path / "x.jsonl")


def test_a_worker_without_prompts_and_a_spent_budget_end_well(loop, prompts, tmp_path):
    asked = ("data", "distill", prompts, "--base", loop.base, "--dtype", "float32", "--backend", "engine")
    none = (*asked, "--out", tmp_path / "none.jsonl", "--states", tmp_path / "none", "--time-budget", 0)
    assert "no answers, so no hidden states" in run(*none)
    assert not (tmp_path / "none").exists()

    out, states = tmp_path / "o.jsonl", tmp_path / "o"
    one = (*asked, "--limit", 1, "--max-new-tokens", 5, "--workers", 2, "--out", out, "--states", states)
    run(*one)
    assert len(out.read_text().splitlines()) == 1
    assert StatesCache(states).num_segments == 1
    assert "is there already" in run(*one)
    shutil.rmtree(states)
    with pytest.raises(
        MedusaError, match=r"does not hold its hidden states; make them with `medusa data states"
    ):
        run(*one)


def test_merge_says_how_many_conversations(loop, prompts, tmp_path):
    base = ("--base", loop.base, "--dtype", "float32")
    words = ("--backend", "engine", "--max-new-tokens", 5, "--out", tmp_path / "a.jsonl")
    run("data", "distill", prompts, *base, *words)
    shown = run("data", "merge", tmp_path / "a.jsonl", *base, "--out", tmp_path / "all.jsonl")
    assert f"3 conversations in {tmp_path / 'all.jsonl'}" in shown
