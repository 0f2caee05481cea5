"""Where a run happened: what a figure is worth nothing without."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

from eval.results import Machine
from medusa import provenance
from medusa.hardware import cores, cpu_model


def memory_bytes() -> int:
    """The memory that this process may use: the machine's, or its control group's limit if that is lower."""
    total = psutil.virtual_memory().total
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return total


def load_average() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def describe(load_before: float, device: torch.device | str = "cpu") -> Machine:
    """The machine, at the end of a run whose load average at the start was `load_before`."""
    device = torch.device(device)
    return Machine(
        cpu=cpu_model(),
        cores=cores(),
        memory_gib=round(memory_bytes() / 2**30, 1),
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        accelerator=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        load_before=load_before,
        load_after=load_average(),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on, and the commit of the kit."""
    found = {name: version for name, version in provenance.versions().items() if version is not None}
    commit = provenance.git_commit()
    if commit is not None:
        found["git commit"] = commit["commit"] + (" with uncommitted changes" if commit["dirty"] else "")
    return found
