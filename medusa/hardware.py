"""What the machine does natively; nothing here is imported that takes long to load."""

from __future__ import annotations

import torch


def native_bf16(device: torch.device | str) -> bool:
    """Whether bf16 products run in hardware. If not, a CPU is far slower in bf16 than in float32."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    if hasattr(torch.cpu, "get_capabilities"):
        return any(bool(has) for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)
    return torch.cpu._is_avx512_bf16_supported()  # before torch 2.10 there is no public name for it
