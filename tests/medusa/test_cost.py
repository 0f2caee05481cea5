import json
import math

import pytest

from medusa.cost import WIDTHS, CostModel, StepCost, bushy_tree, measure_step_cost
from medusa.errors import MedusaError
from tests.medusa.models import small_heads, small_model


@pytest.mark.parametrize("depth", [1, 3, 4])
@pytest.mark.parametrize("width", WIDTHS)
def test_timing_trees_have_the_width_and_use_every_head(width, depth):
    tree = bushy_tree(width, depth)
    assert tree.width == width
    assert tree.depth == min(depth, width - 1)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_every_width_is_measured(kind):
    costs = measure_step_cost(
        small_model(), small_heads(kind), widths=(1, 4, 8), batch=2, context=10, repeats=4
    )
    assert [cost.width for cost in costs] == [1, 4, 8]
    assert all(0 < cost.low <= cost.median <= cost.high for cost in costs)


def test_widths_that_no_tree_has() -> None:
    with pytest.raises(MedusaError, match="smaller widths"):
        measure_step_cost(small_model(), small_heads("medusa"), widths=(100_000,))


def model() -> CostModel:
    def curve(*times: float) -> list[StepCost]:
        return [StepCost(width, t, t, t) for width, t in zip((1, 2, 4), times, strict=True)]

    return CostModel({1: curve(1.0, 1.2, 1.6), 4: curve(2.0, 2.6, 4.0)}, {"dtype": "float32"})


@pytest.mark.parametrize(
    ("batch", "width", "seconds"),
    [
        (1, 1, 1.0),
        (1, 3, 1.4),
        (4, 4, 4.0),
        (2, 1, 1.0 + 1 / 3),
        (8, 2, 5.2),
        (1, 5, math.inf),
        (2, 9, math.inf),
    ],
)
def test_costs_lie_on_the_lines_between_what_was_measured(batch: int, width: int, seconds: float) -> None:
    assert model().seconds(batch, width) == pytest.approx(seconds)
    assert model().seconds(batch, width) == pytest.approx(seconds)  # the same again, from memory


def test_a_wider_step_never_seems_cheaper() -> None:
    steps = [StepCost(width, t, t, t) for width, t in ((1, 1.0), (2, 0.9), (4, 1.5))]
    assert [CostModel({1: steps}).seconds(1, width) for width in (1, 2, 3, 4)] == [1.0, 1.0, 1.25, 1.5]


def test_costs_on_disk(tmp_path) -> None:
    model().to_json(tmp_path / "cost.json")
    assert CostModel.from_json(tmp_path / "cost.json") == model()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value.pop("curves"),
        lambda value: value["curves"][0]["steps"][0].update(median=-1),
        lambda value: value["curves"][0]["steps"][0].update(width="1"),
        lambda value: value["curves"][0]["steps"].pop(0),
        lambda value: value["curves"].clear(),
        lambda value: value["curves"][0].update(batch=0),
    ],
)
def test_files_that_hold_no_costs(tmp_path, spoil) -> None:
    file = tmp_path / "cost.json"
    model().to_json(file)
    value = json.loads(file.read_text())
    spoil(value)
    file.write_text(json.dumps(value))
    with pytest.raises(MedusaError, match=r"step costs"):
        CostModel.from_json(file)
