"""Peers answer as the base does. vLLM's tests run in the environment that has it: `make test-vllm`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from eval.peers import TransformersPeer, VllmPeer, VllmServerPeer, open_peers
from medusa.errors import MedusaError
from tests.eval.small import make_base

PROMPT = [0, 40, 41, 52, 60, 33, 71, 90]
TOKENS = 20
LONGEST = 128


@torch.inference_mode()
def greedy(base, ids, count):
    """The obvious loop."""
    text = list(ids)
    for _ in range(count):
        text.append(int(base.model(torch.tensor([text])).logits[0, -1].argmax()))
        if text[-1] in base.eos_ids:
            break
    return text[len(ids) :]


def test_transformers_answers_as_the_obvious_loop_does(small):
    peer = TransformersPeer(small.base)
    tokens, seconds = peer.answer(PROMPT, TOKENS)
    assert tokens == greedy(small.base, PROMPT, TOKENS)
    assert seconds > 0


def test_transformers_stops_after_the_end_token_and_counts_it(small, monkeypatch):
    end = greedy(small.base, PROMPT, TOKENS)[4]
    monkeypatch.setattr(type(small.base), "eos_ids", frozenset({end}))
    tokens, _ = TransformersPeer(small.base).answer(PROMPT, TOKENS)
    assert tokens == greedy(small.base, PROMPT, TOKENS)
    assert tokens[-1] == end
    assert len(tokens) <= 5


def test_which_peers_are_opened(small, monkeypatch):
    monkeypatch.setattr("eval.peers.importlib.util.find_spec", lambda name: None)
    how = {"dtype": "float32", "batch": 1, "max_length": LONGEST, "vllm_url": None}
    peers, left_out = open_peers("auto", small.base, **how)
    assert [peer.name for peer in peers] == ["transformers"]
    assert "not installed" in left_out["vllm"]
    assert open_peers("none", small.base, **how) == ([], {})
    with pytest.raises(MedusaError, match="not installed"):
        open_peers("vllm", small.base, **how)
    with pytest.raises(MedusaError, match="is the server up"):
        open_peers("vllm", small.base, **{**how, "vllm_url": "http://127.0.0.1:9/v1"})
    with pytest.raises(MedusaError, match="choose auto"):
        open_peers("gpt", small.base, **how)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """vLLM's attention on CPUs takes heads of 32 and more."""
    return make_base(tmp_path_factory.mktemp("wide") / "base", hidden=128)


@pytest.mark.vllm
def test_vllm_in_its_own_process_answers_as_the_obvious_loop_does(wide):
    peer = VllmPeer(wide, "float32", LONGEST)
    try:
        for ids in (PROMPT, PROMPT[:5]):
            tokens, seconds = peer.answer(ids, TOKENS)
            assert tokens == greedy(wide, ids, TOKENS)
            assert seconds > 0
        assert peer.version
    finally:
        peer.close()
    assert peer._process.poll() is not None


@pytest.mark.vllm
def test_vllm_that_cannot_start_is_an_error_not_a_hang(wide):
    with pytest.raises(MedusaError, match="vLLM ended"):
        VllmPeer(wide, "float33", LONGEST)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_vllm_server_answers_as_the_obvious_loop_does(wide):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        "--model",
        str(wide.path),
        "--dtype",
        "float32",
        "--max-model-len",
        str(LONGEST),
        "--enforce-eager",
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        for _ in range(540):
            assert server.poll() is None
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(1)
        peer = VllmServerPeer(wide, f"http://127.0.0.1:{port}/v1")
        assert peer.answer(PROMPT, TOKENS)[0] == greedy(wide, PROMPT, TOKENS)
        assert peer.version != "unknown"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # with the engine that it started
        server.wait()
