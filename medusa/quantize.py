"""Weight-only INT8 for a frozen base on a CPU: linear layers in a quarter of float32's memory, half of bfloat16's.

Symmetric, one scale per output channel, rounded to nearest: absmax quantization as in LLM.int8() (arXiv 2208.07339,
section 2), of weights alone. With s_o = max_i |W_oi| / 127 and q_oi = round(W_oi / s_o),

    y_o = s_o * sum_i q_oi x_i + b_o

Activations are not quantized. So what a token gets does not depend on the tokens beside it, and a tree step agrees with
a plain step as it does with full weights: up to the rounding of the model's dtype.

How the sum is taken (`benchmarks/int8.py` measures it):
  bfloat16, few rows    `torch.ops.aten._weight_int8pack_mm`, which reads the INT8 weights and nothing else.
  otherwise             blocks of the weights are widened in the processor's cache, and multiplied as any matrix.
In float32 that op is correct and its result for a row is the same for any number of rows, but on x86 it is a scalar
loop: 3 times slower than the full weights for one row and 15 times for 8. So it is not used there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from medusa.errors import MedusaError
from medusa.hardware import native_bf16
from medusa.packing import PackedLinear

LEVELS = 127  # -128 is left out, so that the grid is symmetric
# The op takes rows four at a time and reads the weights again for each four; beyond this widening them once is faster.
FEW_ROWS = 8
# Its vector loops step by 16 inputs (8 with AVX2) from aligned addresses, and nothing takes care of a rest: other sizes
# read past the end of a row, and crash.
INPUTS_STEP, ALIGNMENT = 16, 32
# Weights that are widened at once, 4 MiB in float32: smaller blocks cost calls, larger ones fall out of the cache.
BLOCK = 1 << 20


class Int8Linear(nn.Linear):
    """A linear layer with frozen INT8 weights. Made by `quantize_linears`, not by calling it.

    Inference only: no gradient flows through it in bfloat16.

    Attributes:
        quantized: [out, in] int8, q.
        scale: [out], s, in the model's dtype.
        weight: None; for the base's LM head the float weight [out, in], which draft heads read.
        bias: [out] or None, as it was.
    """

    quantized: torch.Tensor
    scale: torch.Tensor
    widened: torch.dtype  # what blocks of the weights are widened to

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the input's dtype, which must be the model's."""
        rows = input.reshape(-1, self.in_features)
        output = self._packed(rows) if self._op_fits(rows) else self._widened(rows)
        if self.bias is not None:
            output = output + self.bias
        return output.reshape(*input.shape[:-1], self.out_features)

    def _op_fits(self, rows: torch.Tensor) -> bool:
        """Whether torch's INT8 op is fast for these rows, and safe."""
        return (
            rows.dtype == torch.bfloat16
            and rows.shape[0] <= FEW_ROWS
            and self.in_features % INPUTS_STEP == 0
            # Within a compiled graph rows are results of the graph, which are aligned.
            and (torch.compiler.is_compiling() or rows.data_ptr() % ALIGNMENT == 0)
        )

    def _packed(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.quantized, self.scale)

    def _widened(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = self.quantized.split(max(1, BLOCK // self.in_features))
        wide = rows.to(self.widened)
        sums = [F.linear(wide, block.to(self.widened)) for block in blocks]
        total = sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)
        return (total * self.scale).to(rows.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights=int8"


@torch.no_grad()
def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest INT8 weights.

    Args:
        weight: [out, in], float32 or bfloat16, finite.

    Returns:
        q [out, in] int8 in -127..127 and s [out] in the weight's dtype. s_o q_oi is within s_o / 2 of W_oi in float32;
        in bfloat16 within s_o, for a channel's largest weights where rounding s_o to 8 bits made it small.
    """
    wide = weight.float()
    scale = (wide.abs().amax(dim=1) / LEVELS).to(weight.dtype)
    # Rounded to the model's dtype first and divided by then, so that its rounding is part of the grid and not an error
    # on top. A channel of zeros gets any scale but zero.
    scale = scale.clamp_min(torch.finfo(weight.dtype).tiny)
    return (wide / scale.float()[:, None]).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


@torch.no_grad()
def quantize_linears(model: nn.Module) -> int:
    """Turns the frozen linear layers of a model into INT8 ones, in place; a second call does nothing.

    Their float weights are let go, and second copies that `medusa.packing` made of them. The LM head is quantized as
    well and keeps its float weight beside: it is often the embedding's, which stays exact, and draft heads read it.
    Layers that are trained, or are another subclass of `nn.Linear`, stay as they are.

    Args:
        model: on a CPU, in float32 or bfloat16.

    Returns:
        How many layers were quantized.

    Raises:
        MedusaError: a layer is not on a CPU or of another dtype; then nothing is changed.
    """
    layers = [
        module
        for module in model.modules()
        if type(module) in (nn.Linear, PackedLinear) and not module.weight.requires_grad
    ]
    for layer in layers:
        weight = layer.weight
        if weight.device.type != "cpu":
            raise MedusaError(
                f"int8 weights run on a CPU only, and this model is on {weight.device}; use full weights"
            )
        if weight.dtype not in (torch.float32, torch.bfloat16):
            name = str(weight.dtype).removeprefix("torch.")
            raise MedusaError(
                f"int8 weights need a model in float32 or bfloat16, not {name}; load it in one of these"
            )
    lm_head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for layer in layers:
        quantized, scale = quantize_weight(layer.weight)
        layer.register_buffer("quantized", quantized)
        layer.register_buffer("scale", scale)
        # Where bfloat16 products are emulated, float32's are several times faster, and hold more.
        emulated = scale.dtype == torch.bfloat16 and not native_bf16("cpu")
        layer.widened = torch.float32 if emulated else scale.dtype
        layer.__dict__.pop("packed", None)
        layer.__class__ = Int8Linear
        if layer is not lm_head:
            layer.weight = None
    return len(layers)


def count_parameters(model: nn.Module) -> int:
    """A model's parameters, INT8 ones included; a shared one counts once."""
    quantized = [m for m in model.modules() if isinstance(m, Int8Linear) and m.weight is None]
    return sum(p.numel() for p in model.parameters()) + sum(m.quantized.numel() for m in quantized)
