"""What the machine does natively; nothing here is imported that takes long to load."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def cpu_model() -> str:
    """The processor's name as the operating system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware", "cpu model")):
                return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor(device: torch.device | str = "cpu") -> dict[str, str | int]:
    """What decides how long a step takes here: the processor, how much of it is used, and torch."""
    device = torch.device(device)
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    return {
        "device": cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


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
