"""Names and checks that all formats share, on heads of random sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.errors import MedusaError
from medusa.export import medusa, nxdi, trtllm, vllm_heads
from medusa.export.layout import HeadTensors, Layout

LAYOUTS = [
    medusa.LAYOUT,
    medusa.MERGED,
    nxdi.LAYOUT,
    trtllm.LAYOUT,
    trtllm.UNIFIED,
    vllm_heads.OWN,
    vllm_heads.ONE,
]
HERE = Path("heads.pt")


def random_heads(heads: int, layers: int, hidden: int, rows: int, shared: bool) -> HeadTensors:
    torch.manual_seed(heads + 10 * layers)
    blocks = [
        [(torch.randn(hidden, hidden), torch.randn(hidden)) for _ in range(layers)] for _ in range(heads)
    ]
    return HeadTensors(blocks, [torch.randn(rows, hidden) for _ in range(1 if shared else heads)])


def example(layout: Layout = medusa.LAYOUT) -> dict[str, torch.Tensor]:
    return layout.write(random_heads(2, 2, 4, 6, False))


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    heads=st.integers(1, 12),
    layers=st.integers(0, 3),
    hidden=st.integers(1, 5),
    rows=st.integers(1, 7),
    told=st.booleans(),
)
def test_what_is_written_is_read(layout, heads, layers, hidden, rows, told):
    shared = "{h}" not in layout.lm_head
    if shared and not layers:  # nothing in the file says how many heads there are
        layers = 1
    made = random_heads(heads, layers, hidden, rows, shared)
    tensors = layout.write(made)
    assert all(layout.match(name) for name in tensors)
    found = layout.read(tensors, HERE, num_heads=heads if told else None, num_layers=layers if told else None)
    assert len(found.blocks) == heads
    assert all(len(head) == layers for head in found.blocks)
    assert found.hidden_size == hidden
    for one, other in zip(made.tensors(), found.tensors(), strict=True):
        assert one.equal(other)


def test_blocks_without_biases_have_zero_ones():
    tensors = {name: tensor for name, tensor in example().items() if not name.endswith("bias")}
    found = medusa.LAYOUT.read(tensors, HERE, biases=False)
    assert all(not bias.any() for head in found.blocks for _, bias in head)


@pytest.mark.parametrize(
    ("change", "told", "message"),
    [
        (lambda t: t.pop("1.0.linear.bias"), {}, r"1\.0\.linear\.bias is missing"),
        (lambda t: t.pop("0.2.weight"), {}, r"0\.2\.weight is missing"),
        (lambda t: t.update({"2.norm.weight": torch.ones(4)}), {}, r"2\.norm\.weight is left over"),
        (lambda t: t.update({"1.5.linear.bias": torch.ones(4)}), {}, "left over"),
        (lambda t: t.update({"0.0.linear.weight": torch.ones(4, 5)}), {}, r"shape \["),
        (
            lambda t: t.update({"1.1.linear.bias": torch.tensor(1.0)}),
            {},
            r"1\.1\.linear\.bias has shape \[\], not \[4\]",
        ),
        (
            lambda t: t.update({"1.2.weight": torch.ones(7, 4)}),
            {},
            r"1\.2\.weight has shape \[7, 4\], not \[6, 4\]",
        ),
        (lambda t: t["1.2.weight"].fill_(torch.nan), {}, r"NaN or infinity in 1\.2\.weight"),
        (lambda t: t["0.1.linear.bias"].fill_(torch.inf), {}, r"NaN or infinity in 0\.1\.linear\.bias"),
        (lambda t: t.update({"0.0.linear.bias": torch.ones(4).to(torch.int8)}), {}, "is int8; quantized"),
        (lambda t: t.update({"0.0.linear.bias": torch.ones(4).to(torch.float8_e4m3fn)}), {}, "quantized"),
        (lambda t: None, {"num_heads": 3}, r"2\.0\.linear\.weight is missing"),
        (lambda t: None, {"num_heads": 10**12}, r"is missing.*and more"),
        (lambda t: None, {"num_layers": 10**12}, r"is missing.*and more"),
        (lambda t: t.update({"999999.0.linear.weight": torch.ones(4, 4)}), {}, r"is missing.*and more"),
        (lambda t: t.clear(), {}, "no tensors at all"),
    ],
)
def test_what_does_not_fit_is_named(change, told, message):
    tensors = example()
    change(tensors)
    with pytest.raises(MedusaError, match=message):
        medusa.LAYOUT.read(tensors, HERE, **told)
