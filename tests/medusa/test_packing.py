import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from medusa.packing import MOST, PackedLinear, _has_fbgemm, fits_float16, pack_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, MOST, MOST + 1])
@pytest.mark.parametrize("half", [True, False])
def test_packed_equals_plain(rows, bias, half):
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    if half:  # as published weights are
        layer.weight.copy_(layer.weight.bfloat16().float())
    x = torch.randn(rows, 3, 24)[:, 0]
    expected = layer(x)
    assert pack_linears(nn.Sequential(layer)) == 1
    assert isinstance(layer.packed, torch.Tensor) != (half and _has_fbgemm())
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.skipif(not _has_fbgemm(), reason="FBGEMM's float16 kernels need an x86 processor with AVX2")
@given(
    rows=st.integers(1, 40), inputs=st.integers(1, 70), outputs=st.integers(1, 70), seed=st.integers(0, 99)
)
def test_float16_weights_give_the_float32_product_for_any_shape(rows, inputs, outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bool(seed % 2)).requires_grad_(False)
    layer.weight.copy_(torch.randn(outputs, inputs, generator=generator).bfloat16().float())
    x = torch.randn(rows, inputs, generator=generator)
    expected = nn.functional.linear(
        x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
    )
    pack_linears(layer)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x).double(), expected, atol=2e-5, rtol=1e-5)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_which_bfloat16_numbers_are_float16_numbers(value):
    number = torch.tensor([[value]]).bfloat16().float()
    size = abs(float(number))
    if size == 0 or 2**-17 <= size <= 65280:
        assert fits_float16(number)
    elif 65504 < size < float("inf"):
        assert not fits_float16(number)


def test_weights_that_float16_would_change_keep_their_bits_unless_told_otherwise():
    for exact in (True, False):
        layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
        layer.weight.fill_(1 / 3)
        pack_linears(layer, exact=exact)
        with torch.inference_mode():
            changed = layer(torch.ones(1, 8)) - 8 * torch.tensor(1 / 3)
        assert float(changed.abs().max()) < (1e-6 if exact else 2e-3)
        assert isinstance(layer.packed, torch.Tensor) == (exact or not _has_fbgemm())


def test_weights_beyond_float16_are_never_packed_in_it():
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    layer.weight.fill_(1e6)
    pack_linears(layer, exact=False)
    with torch.inference_mode():
        torch.testing.assert_close(layer(torch.ones(2, 8)), torch.full((2, 8), 8e6))


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
