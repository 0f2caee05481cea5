import pytest

from medusa.cost import WIDTHS, bushy_tree, measure_step_cost
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
