"""INT8 weights against the formula written out, and decoding with them against itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from medusa import quantize
from medusa.attention import grouped
from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.packing import PackedLinear, pack_linears
from medusa.quantize import FEW_ROWS, Int8Linear, count_parameters, quantize_linears, quantize_weight
from medusa.step import Step
from medusa.tree import Tree
from tests.medusa.models import FAMILIES, small_heads, small_model
from tests.medusa.test_decoding import BUSHY, answers, greedy, prompts
from tests.medusa.test_step import inputs, same

DTYPES = [torch.float32, torch.bfloat16]


def frozen(inputs_: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(inputs_, outputs, bias=bias).to(dtype).requires_grad_(False)


def int8_model(family: str = "llama", dtype: torch.dtype = torch.float32):
    model = small_model(family).to(dtype).requires_grad_(False)
    quantize_linears(model)
    return model


def slow(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The formula in float64, one output channel at a time; only the scale is rounded to the weight's dtype."""
    columns = []
    for channel in weight:
        largest = max(abs(float(value)) for value in channel) or 127.0  # zeros: of any scale
        scale = torch.tensor(largest / 127).to(weight.dtype)
        levels = [max(-127, min(127, round(float(value / scale.float())))) for value in channel.float()]
        columns.append(x.double() @ torch.tensor(levels, dtype=torch.float64) * scale.double())
    out = torch.stack(columns, dim=-1)
    return out if bias is None else out + bias.double()


@given(
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    inputs_=st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 48])),
    outputs=st.integers(1, 20),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([1, 64, 1 << 20]),
    seed=st.integers(0, 100),
)
def test_equals_the_formula(shape, inputs_, outputs, bias, dtype, block, seed):
    torch.manual_seed(seed)
    layer = frozen(inputs_, outputs, bias, dtype)
    x = torch.randn(*shape, inputs_).to(dtype)
    expected = slow(x, layer.weight, layer.bias)
    assert quantize_linears(nn.Sequential(layer)) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "BLOCK", block)
        got = layer(x)
    assert got.shape == (*shape, outputs)
    assert got.dtype == dtype
    # bfloat16: the sum is rounded to 8 bits, and once more with the bias added.
    limits = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(got.double(), expected, **limits)


@given(st.integers(1, 8), st.integers(1, 40), st.sampled_from(DTYPES), st.floats(1e-30, 1e30))
def test_a_weight_is_within_half_a_step_of_its_level(outputs, inputs_, dtype, size):
    torch.manual_seed(outputs * inputs_)
    weight = (torch.randn(outputs, inputs_).double() * size).to(dtype)
    levels, scale = quantize_weight(weight)
    assert levels.dtype == torch.int8
    assert scale.dtype == dtype
    assert int(levels.min()) >= -127
    away = (weight.double() - levels.double() * scale.double()[:, None]).abs() / scale.double()[:, None]
    assert float(away.max()) <= (0.5001 if dtype == torch.float32 else 1.0)


def test_a_channel_of_zeros_stays_zero():
    layer = frozen(16, 3)
    layer.weight.data[1] = 0
    quantize_linears(nn.Sequential(layer))
    assert torch.equal(layer(torch.ones(16))[1], layer.bias[1])


@pytest.mark.parametrize("rows", [0, 1, FEW_ROWS, FEW_ROWS + 1, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_rows(rows, dtype):
    torch.manual_seed(0)
    layer = frozen(48, 40, dtype=dtype)
    quantize_linears(nn.Sequential(layer))
    x = torch.randn(rows, 48).to(dtype)
    each = torch.stack([layer(row) for row in x]) if rows else torch.empty(0, 40, dtype=dtype)
    limits = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(layer(x), each, **limits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_op_gives_a_row_the_same_bits_in_any_number_of_rows(dtype):
    torch.manual_seed(0)
    levels, scale = quantize_weight(torch.randn(40, 48).to(dtype))
    x = torch.randn(9, 48).to(dtype)
    whole = torch.ops.aten._weight_int8pack_mm(x, levels, scale)
    for rows in range(1, 9):
        assert torch.equal(torch.ops.aten._weight_int8pack_mm(x[:rows], levels, scale), whole[:rows])


def test_rows_from_an_unaligned_address():
    """The op loads 16 or 32 bytes at once and crashes the process on these."""
    torch.manual_seed(0)
    layer = frozen(48, 40, dtype=torch.bfloat16)
    quantize_linears(nn.Sequential(layer))
    x = torch.randn(1 + 4 * 48).bfloat16()[1:].view(4, 48)
    torch.testing.assert_close(layer(x), layer(x.clone()), atol=1e-2, rtol=1e-2)


def test_which_layers_and_what_is_let_go():
    plain, packed, trained = frozen(8, 8), frozen(8, 8), nn.Linear(8, 8)
    pack_linears(nn.Sequential(packed))
    assert isinstance(packed, PackedLinear)
    model = nn.Sequential(plain, packed, trained, nn.Embedding(8, 8))
    before = count_parameters(model)
    assert (quantize_linears(model), quantize_linears(model)) == (2, 0)
    for layer in (plain, packed):
        assert type(layer) is Int8Linear
        assert layer.weight is None
        assert "packed" not in vars(layer)
    assert type(trained) is nn.Linear
    assert count_parameters(model) == before
    assert pack_linears(model) == 0


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_the_lm_head_is_quantized_and_the_embedding_is_not(family):
    model = small_model(family).requires_grad_(False)
    embedding, head = (
        model.get_input_embeddings().weight.clone(),
        model.get_output_embeddings().weight.clone(),
    )
    before, size = count_parameters(model), model.get_memory_footprint()
    assert quantize_linears(model) == 3 * 7 + 1
    assert type(model.get_output_embeddings()) is Int8Linear
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert torch.equal(model.get_output_embeddings().weight, head)
    assert count_parameters(model) == before
    assert model.get_memory_footprint() < size / 2
    x = torch.randn(2, 48)
    got = model.get_output_embeddings()(x)
    assert not torch.equal(got, F.linear(x, head))
    torch.testing.assert_close(got.double(), slow(x, head, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(frozen(8, 8), frozen(8, 8, dtype=torch.float16)), "not float16"),
        (nn.Sequential(frozen(8, 8), frozen(8, 8).to("meta")), "on a CPU only.*on meta"),
    ],
)
def test_what_cannot_be_quantized_is_refused_whole(model, message):
    with pytest.raises(MedusaError, match=message):
        quantize_linears(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_decoding_equals_plain_greedy_with_int8_weights(family, kind):
    model = int8_model(family)
    heads = small_heads(kind, draft_vocab_size=40)
    expected = [greedy(model, ids) for ids in prompts()]
    for batch, tree in [(1, None), (1, BUSHY), (4, BUSHY), (4, Tree.chain(3))]:
        engine = Engine(model, heads, tree, batch=batch, max_length=128)
        assert answers(engine, prompts()) == expected
    assert all(type(module) is not PackedLinear for module in model.modules())


def test_int8_weights_are_another_base():
    """Otherwise the test above compares the full weights with themselves."""
    ids = prompts()[3]
    with torch.inference_mode():
        full, int8 = (model(torch.tensor([ids])).logits for model in (small_model(), int8_model()))
    assert 0 < float((full - int8).norm() / full.norm()) < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_step_with_int8_weights_compiles_whole_and_exports(kind, dtype):
    model, heads = int8_model(dtype=dtype), small_heads(kind).to(dtype)
    step = Step(model, heads, BUSHY).eval()

    def arguments():
        values = inputs(model, BUSHY)[:7]
        return tuple(
            value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for value in values
        )

    with torch.no_grad(), grouped(model.config):
        expected = step(*arguments())
        compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
        program = torch.export.export(step, arguments()).module()
        for got in (compiled(*arguments()), program(*arguments())):
            if dtype == torch.float32:
                same(got, expected)
            else:
                assert torch.equal(got.tokens, expected.tokens)


def test_a_copy_is_quantized_as_well():
    layer = frozen(16, 8)
    quantize_linears(nn.Sequential(layer))
    x = torch.randn(3, 16)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
