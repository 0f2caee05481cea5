"""Weights laid out for a step's shape: few rows against a large matrix, in float32 on a CPU.

The default float32 matrix product of a CPU is tuned for one row on one thread, or for many rows. From 2 rows on, which
is what a tree step and a batch are, and at one row on several threads, which is plain decoding, oneDNN's kernels over
weights reordered once are up to twice as fast, and no slower for hundreds of rows (measured in `benchmarks/NOTES.md`).
This costs a second copy of the weights. In bfloat16 and on accelerators nothing changes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

FEWEST, MOST = 2, 4096


class PackedLinear(nn.Linear):
    """A linear layer with a second, reordered copy of its frozen weight."""

    packed: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if torch.compiler.is_compiling():  # a compiler lays weights out by itself
            return F.linear(input, self.weight, self.bias)
        rows = input.numel() // self.in_features
        # One row: with one thread the default product reads memory as fast, with several it does not.
        few = FEWEST if torch.get_num_threads() == 1 else 1
        if few <= rows <= MOST and not torch.is_grad_enabled():
            return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return F.linear(input, self.weight, self.bias)


def pays(weight: torch.Tensor) -> bool:
    """Whether packing can help this weight: float32, on a CPU, with oneDNN built in."""
    return (
        weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )


@torch.no_grad()
def pack_linears(model: nn.Module) -> int:
    """Turns the frozen plain linear layers of a model into packed ones, in place; a second call does nothing.

    The weights must not change afterwards. Layers that are trained, or are a subclass of `nn.Linear`, stay as they are.

    Returns:
        How many layers were packed.
    """
    count = 0
    for module in model.modules():
        if type(module) is nn.Linear and pays(module.weight) and not module.weight.requires_grad:
            module.packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), 16)
            module.__class__ = PackedLinear
            count += 1
    return count
