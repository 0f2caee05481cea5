import json
from pathlib import Path

import pytest

import eval.results
from eval.results import load
from medusa.errors import MedusaError


def test_the_kept_schema_is_the_formats_own():
    kept = Path(eval.results.__file__).with_name("schema.json").read_text()
    assert kept == eval.results.schema(), "write it again: python -m eval schema > eval/schema.json"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda value: value.update(tokens_per_second={}), "tokens_per_second lacks chain, plain, tree"),
        (lambda value: value["time_to_first_token"].pop("tree"), "time_to_first_token lacks tree"),
        (lambda value: value["checkpoint"].update(heads={}), "checkpoint.heads lacks kind, num_heads"),
        (lambda value: value["conversations"][0]["turns"][0].update(answers={}), "answers of .* lacks chain"),
    ],
)
def test_a_figure_that_every_report_needs_is_missed(tmp_path, change, says):
    shipped = Path(__file__).parents[2] / "checkpoints/smollm2-135m-shopping-hydra/report/results.json"
    value = json.loads(shipped.read_text())
    change(value)
    (tmp_path / "results.json").write_text(json.dumps(value))
    with pytest.raises(MedusaError, match=says):
        load(tmp_path)
