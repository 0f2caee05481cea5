"""Whole runs on a small random base: the files, the command line, and how bad input ends."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.__main__ import main
from benchmarks.records import load, quartiles
from medusa.cost import CostModel, StepCost, cost_about
from medusa.errors import MedusaError
from medusa_cli.common import Dtype
from tests.eval.small import make_heads


@pytest.fixture(scope="module")
def words(small, tmp_path_factory):
    """A command line that ends in seconds."""
    medusa = tmp_path_factory.mktemp("medusa") / "heads"
    make_heads(medusa, small.base, kind="medusa")
    found = ["run", "--checkpoint", small.heads_folder, "--base", small.base_folder, "--medusa", medusa]
    found += ["--dtype", "float32", "--data", small.data, "--limit", "2", "--max-new-tokens", "6"]
    found += ["--repeats", "2", "--batches", "1,2", "--widths", "1,4,32"]
    return [str(word) for word in found]


@pytest.fixture(scope="module")
def out(words, tmp_path_factory):
    """A whole run's folder, vLLM left out."""
    folder = tmp_path_factory.mktemp("out")
    peers = "transformers,transformers prompt lookup"
    assert main([*words, "--peers", peers, "--peer-batches", "1,2", "--out", str(folder)]) == 0
    return folder


def test_everything_is_written(out):
    assert {path.name for path in out.iterdir()} == {"results.json", "summary.md", "bench.png", "bench.svg"}
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "bench.svg").read_text()
    results = load(out)
    assert results.dtype == "float32"
    assert results.command.startswith("python -m benchmarks")
    assert results.versions["torch"]
    assert results.machine.cores >= 1
    assert results.throughput.cost == "the section steps of this run"
    names = ["ours, plain", "ours, hydra tree", "ours, medusa tree", "transformers"]
    assert [(contest.batch, contest.name) for contest in results.peers.contests] == [
        *((1, name) for name in [*names, "transformers prompt lookup"]),
        *((2, name) for name in names),
    ]
    assert "it takes one" in results.peers.left_out["transformers prompt lookup"]
    assert all(one.same for contest in results.peers.contests for one in contest.answers)


def test_the_summary_has_every_figure_with_its_spread(out):
    text = (out / "summary.md").read_text()
    for heading in ("## Steps", "## Throughput", "## Peers"):
        assert heading in text
    assert re.search(r"\| 1 \| plain \| [\d.]+ \| [\d.]+ to [\d.]+ \| 1\.000 \(1\.000 to 1\.000\)", text)
    assert re.search(
        r"\| 1 \| transformers \| [\d.]+ \| [\d.]+ to [\d.]+ \| [\d.]+ \([\d.]+ to [\d.]+\)", text
    )


def test_a_report_can_be_drawn_again(out, tmp_path, capsys):
    (tmp_path / "results.json").write_bytes((out / "results.json").read_bytes())
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)
    assert (tmp_path / "summary.md").read_text() == (out / "summary.md").read_text()
    (tmp_path / "results.json").write_text('{"format": 1}')
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no benchmark" in capsys.readouterr().err


def test_one_section_alone_measures_its_own_costs(words, tmp_path, capsys):
    assert main([*words, "--only", "throughput", "--batches", "1", "--out", str(tmp_path)]) == 0
    results = load(tmp_path)
    assert results.steps is None
    assert results.peers is None
    assert results.throughput.cost == "measured at the start of this section"
    assert "## Throughput" in capsys.readouterr().out


def test_costs_from_a_file_must_be_of_this_machine(words, small, tmp_path, capsys):
    from medusa.checkpoint import load_checkpoint

    about = cost_about(small.base, load_checkpoint(small.heads_folder, small.base).heads)
    curves = {1: [StepCost(1, 1.0, 1.0, 1.0), StepCost(32, 1.1, 1.1, 1.1)]}
    CostModel(curves, about).to_json(tmp_path / "cost.json")
    run = [*words, "--only", "throughput", "--batches", "1", "--out", str(tmp_path / "out")]
    assert main([*run, "--cost", str(tmp_path / "cost.json")]) == 0
    assert load(tmp_path / "out").throughput.cost == "cost.json"
    CostModel(curves, about | {"dtype": "bfloat16"}).to_json(tmp_path / "cost.json")
    assert main([*run, "--cost", str(tmp_path / "cost.json")]) == 2
    assert "of another machine, base, heads or number format" in capsys.readouterr().err


def test_vllm_is_left_out_and_named_where_it_is_not(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.vllm_peers.importlib.util.find_spec", lambda name: None)
    run = [*words, "--only", "peers", "--repeats", "1", "--limit", "1", "--out", str(tmp_path)]
    assert main(run) == 0
    assert set(load(tmp_path).peers.left_out) == {"vllm", "vllm ngram", "vllm medusa"}
    assert "- vllm: vLLM is not installed here" in (tmp_path / "summary.md").read_text()
    capsys.readouterr()
    assert main([*run, "--peers", "vllm"]) == 2
    assert "error: --peers vllm: vLLM is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--batches", "0"], "--batches 0: numbers from 1"),
        (["--widths", "1,x"], "--widths 1,x: whole numbers"),
        (["--only", "speed"], "choose from steps, throughput, peers"),
        (["--peers", "gpt"], "choose from transformers"),
        (["--checkpoint", "nowhere"], "no such folder"),
        (["--data", "nowhere.jsonl"], "no such file"),
        (["--vllm-python", "/nowhere/python"], "--vllm-python /nowhere/python: No such file"),
        (["--medusa", "nowhere"], "is not a heads checkpoint"),
        (["--max-new-tokens", "1"], "max-new-tokens"),
        (["--max-new-tokens", "5000"], "lower --max-new-tokens"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, tmp_path, capsys, wrong, message):
    assert main([*words, "--out", str(tmp_path), *wrong]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("command", ["run", "report"])
def test_help_ends_with_examples(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples" in text
    assert f"python -m benchmarks {command}" in text


def test_quick_sizes_give_way_to_those_that_are_named(small, tmp_path):
    words = ["run", "--quick", "--checkpoint", str(small.heads_folder), "--base", str(small.base_folder)]
    words += ["--data", str(small.data), "--dtype", Dtype.float32, "--only", "steps", "--batches", "2"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    times = load(tmp_path).steps.times
    assert {entry.batch for entry in times} == {2}
    assert {entry.width for entry in times} <= {1, 8, 32}


def test_an_interrupted_run_keeps_the_sections_that_were_finished(words, tmp_path, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.run.measure_throughput", stop)
    assert main([*words, "--out", str(tmp_path)]) == 130
    assert "results.json holds the sections" in capsys.readouterr().err
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["steps"]
    assert kept["throughput"] is None


def test_quartiles():
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_a_checkpoint_without_calibration_is_refused(words, small, tmp_path, capsys):
    bare = tmp_path / "bare"
    make_heads(bare, small.base)
    (bare / "calibration.json").unlink()
    assert main([*words, "--checkpoint", str(bare), "--out", str(tmp_path / "out")]) == 2
    assert "run `medusa calibrate`" in capsys.readouterr().err


def test_medusa_heads_beside_others_are_of_that_kind_and_there_once(words, small, capsys, tmp_path):
    run = [*words, "--out", str(tmp_path)]
    assert main([*run, "--medusa", str(small.heads_folder)]) == 2
    assert "holds hydra heads" in capsys.readouterr().err
    assert main([*run, "--checkpoint", words[words.index("--medusa") + 1]]) == 2
    assert "leave one out" in capsys.readouterr().err


def test_results_that_are_not_there(tmp_path):
    with pytest.raises(MedusaError, match="cannot read"):
        load(tmp_path)
