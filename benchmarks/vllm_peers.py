"""vLLM as a contestant: plain, with n-gram speculation, and with its own chain Medusa, each in a process of its own.

The processes rest while others are measured: they wait for a line on a pipe.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.subject import Prompts
from medusa.base import Base
from medusa.errors import MedusaError
from medusa.export.vllm import LOADER, export_vllm

GUESSES = 4  # tokens that n-gram speculation guesses; chain Medusa guesses one with each head
KINDS = ("vllm", "vllm ngram", "vllm medusa")


def vllm_python(given: Path | None) -> str | None:
    """The Python that has vLLM: the one given, or this one; None where there is none.

    Raises:
        MedusaError: the one given is no Python with vLLM.
    """
    if given is None:
        return sys.executable if importlib.util.find_spec("vllm") is not None else None
    command = [
        str(given),
        "-c",
        "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)",
    ]
    try:
        found = subprocess.run(command, env=_environment(str(given)), capture_output=True, check=False)
    except OSError as error:
        raise MedusaError(f"--vllm-python {given}: {error.strerror}; name a Python that has vLLM") from error
    if found.returncode:
        raise MedusaError(f"--vllm-python {given} has no vLLM; `make test-vllm` makes one that has it")
    return str(given)


def _environment(python: str) -> dict[str, str]:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    environment.pop("OMP_NUM_THREADS", None)  # vLLM's binding says how many
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # of another environment
    if hasattr(os, "sched_getaffinity"):
        # Left to itself vLLM's CPU engine binds to one core of two.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    return environment


class VllmContestant:
    """One vLLM engine on the base's folder; see `contest.Contestant`.

    It starts when it is made; `ready` waits until it has.

    Args:
        kind: one of `KINDS`.
        python: the interpreter that has vLLM.
        base: with its model.
        rows: prompts in flight at most.
        max_length: most tokens of a prompt and its answer.
        medusa: folder of exported heads, for chain Medusa, and how many heads there are.
    """

    def __init__(
        self,
        kind: str,
        python: str,
        base: Base,
        *,
        rows: int,
        max_length: int,
        medusa: tuple[Path, int] | None = None,
    ):
        self.name, self.version = kind, ""
        weight = base.model.get_output_embeddings().weight
        # On an accelerator all engines share the memory with us; a CPU's cache has its own setting.
        more: dict[str, Any] = {"gpu_memory_utilization": 0.2} if weight.device.type == "cuda" else {}
        speculation: dict[str, Any] | None = None
        what = "plain"
        if kind == "vllm ngram":
            speculation = {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": 4}
            speculation["prompt_lookup_min"] = 2
            what = f"n-grams of 2 to 4 tokens, {GUESSES} guesses"
        elif kind == "vllm medusa":
            folder, heads = medusa
            speculation = {"method": "medusa", "model": str(folder), "num_speculative_tokens": heads}
            more |= {"model_loader_extra_config": LOADER}
            what = f"its chain Medusa with our medusa heads exported, {heads} guesses"
        self.how = f"vLLM in a process beside this one, eager, no prefix cache, {what}"
        hello = {
            "model": str(base.path),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "max_length": max_length,
            "rows": rows,
            "speculation": speculation,
            "more": more,
        }
        self._messages = tempfile.TemporaryFile("w+")  # of vLLM: said when it ends, and not before
        self._process = subprocess.Popen(
            [python, "-P", str(Path(__file__).parent / "vllm_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env=_environment(python),
            text=True,
            start_new_session=True,  # Ctrl-C is ours to handle; and `close` can end what it started as well
        )
        self._say(hello)

    def ready(self) -> None:
        """Waits until it answers. Raises MedusaError if it ends instead."""
        self.version = self._reply()["version"]

    def _say(self, question: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended: the missing reply says so
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def _reply(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._messages.seek(0)
            # The first one is the cause; what follows says that something failed.
            said = re.search(r"\b\w*(Error|Exception): .*", self._messages.read())
            why = f": {said[0].strip()[:300]}" if said else ""
            raise MedusaError(f"{self.name} ended with code {code}{why}")
        return json.loads(line)

    def answer(self, prompts: Prompts, max_new_tokens: int) -> tuple[list[list[int]], float]:
        """See `contest.Contestant.answer`; the worker takes the time."""
        self._say({"prompts": prompts, "max_new_tokens": max_new_tokens})
        reply = self._reply()
        return reply["tokens"], reply["seconds"]

    def close(self) -> None:
        """Ends the process and those it started; one that does not answer yet would not notice, and is killed."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60 if self.version else 0.1)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._messages.close()


def open_vllm(
    kinds: Sequence[str],
    python: str,
    base: Base,
    *,
    rows: int,
    max_length: int,
    medusa: Path | None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[VllmContestant], dict[str, str]]:
    """Starts vLLM engines, all at once: each takes half a minute.

    Args:
        kinds: from `KINDS`.
        python: the interpreter that has vLLM.
        base: with its model.
        rows: prompts in flight at most.
        max_length: most tokens of a prompt and its answer.
        medusa: a checkpoint of medusa heads, for chain Medusa.
        progress: called with a few words.

    Returns:
        Those that answer, and for each other one the reason.
    """
    opened: list[VllmContestant] = []
    left_out: dict[str, str] = {}
    folder = Path(tempfile.mkdtemp(prefix="medusa-bench-"))
    try:
        for kind in kinds:
            exported = None
            if kind == "vllm medusa":
                if medusa is None:
                    left_out[kind] = "no medusa heads of this base; name some with --medusa"
                    continue
                try:
                    export_vllm(medusa, folder / "heads", base)
                except MedusaError as error:  # not all of our heads have a place in its format
                    left_out[kind] = str(error)
                    continue
                exported = (
                    folder / "heads",
                    json.loads((folder / "heads/config.json").read_text())["num_heads"],
                )
            opened.append(
                VllmContestant(kind, python, base, rows=rows, max_length=max_length, medusa=exported)
            )
        started = []
        for contestant in opened:
            progress(f"waiting for {contestant.name}")
            try:
                contestant.ready()
                started.append(contestant)
            except MedusaError as error:  # it does not run every base on every machine
                left_out[contestant.name] = str(error)
                contestant.close()
        return started, left_out
    except BaseException:
        for contestant in opened:
            contestant.close()
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # loaded by now
