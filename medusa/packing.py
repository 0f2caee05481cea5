"""Weights laid out for a step's shape: few rows against a large matrix, in float32 on a CPU without bf16 instructions.

Decoding reads every weight once a step, so what a step costs is mostly how many bytes that is. Published weights are
bfloat16: in float32 half of each number is zeros. Where every weight of a layer is also a float16 number, exactly, a
second copy in float16 holds the same matrix in half the bytes; FBGEMM's kernels widen it in registers and multiply in
float32. Otherwise the copy is float32, reordered once for oneDNN's kernels, which from 2 rows on are up to twice as
fast as the default product. Both are measured in `benchmarks/NOTES.md`. In bfloat16 and on accelerators nothing
changes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

FEWEST, MOST = 2, 4096


class PackedLinear(nn.Linear):
    """A linear layer with a second copy of its frozen weight, laid out for few rows.

    Attributes:
        packed: a float32 tensor in oneDNN's order, or FBGEMM's float16 matrix with the bias.
    """

    packed: torch.Tensor | torch.ScriptObject

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if torch.compiler.is_compiling():  # a compiler lays weights out by itself
            return F.linear(input, self.weight, self.bias)
        rows = input.numel() // self.in_features
        if rows > MOST or torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        if not isinstance(self.packed, torch.Tensor):
            return torch.ops.quantized.linear_dynamic_fp16.default(input, self.packed)
        # One row: with one thread the default product reads memory as fast, with several it does not.
        if rows < FEWEST and torch.get_num_threads() == 1:
            return F.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


def pays(weight: torch.Tensor) -> bool:
    """Whether packing can help this weight: float32, on a CPU, with oneDNN built in."""
    return (
        weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )


def fits_float16(weight: torch.Tensor) -> bool:
    """Whether every number of a float32 matrix is a float16 number, exactly.

    A bfloat16 number is one from 2^-17 to 65,280 in size: it has 8 bits where float16 has 11 and, below 2^-14, as many
    as are left above 2^-24.
    """
    return all(torch.equal(rows.half().float(), rows) for rows in weight.split(4096))


def _has_fbgemm() -> bool:
    return (
        torch.backends.quantized.engine in ("fbgemm", "x86")
        and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    )


@torch.no_grad()
def pack_linears(model: nn.Module, exact: bool = True) -> int:
    """Turns the frozen plain linear layers of a model into packed ones, in place; a second call does nothing.

    The weights must not change afterwards. Layers that are trained, or are a subclass of `nn.Linear`, stay as they are.

    Args:
        model: any module.
        exact: use float16 only where it changes no weight. Draft heads need not be exact: what they guess decides how
            many tokens a step commits and not which.

    Returns:
        How many layers were packed.
    """
    count = 0
    for module in model.modules():
        if type(module) is nn.Linear and pays(module.weight) and not module.weight.requires_grad:
            weight = module.weight.detach()
            if _has_fbgemm() and (fits_float16(weight) or (not exact and float(weight.abs().max()) < 60_000)):
                module.packed = torch.ops.quantized.linear_prepack_fp16(weight, module.bias)
            else:
                module.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
            module.__class__ = PackedLinear
            count += 1
    return count
