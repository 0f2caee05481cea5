import pytest
import torch
from torch import nn

from medusa.packing import MOST, PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, MOST, MOST + 1])
def test_packed_equals_plain(rows, bias):
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    x = torch.randn(rows, 3, 24)[:, 0]
    expected = layer(x)
    assert pack_linears(nn.Sequential(layer)) == 1
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)


def test_only_frozen_float32_layers_are_packed():
    frozen, trained = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
    half = nn.Linear(8, 8).bfloat16().requires_grad_(False)
    assert pack_linears(nn.Sequential(frozen, trained, half)) == 1
    assert isinstance(frozen, PackedLinear)
    assert type(trained) is type(half) is nn.Linear


def test_packing_twice_does_nothing_and_state_dict_is_unchanged():
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False))
    keys = list(model.state_dict())
    assert (pack_linears(model), pack_linears(model)) == (1, 0)
    assert list(model.state_dict()) == keys


def test_gradients_still_flow_to_the_input():
    layer = nn.Linear(8, 8).requires_grad_(False)
    pack_linears(nn.Sequential(layer))
    x = torch.randn(4, 8, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(4, 8))
