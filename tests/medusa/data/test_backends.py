from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa.base import Base, load_base, open_base
from medusa.data.backends import EngineBackend, VllmBackend, open_backend
from medusa.data.distill import Sampling, distill
from medusa.data.states import StatesCache
from medusa.data.template import encode_prompt
from medusa.errors import MedusaError
from medusa.generation import Request
from medusa.sampling import SamplingParams
from tests.medusa.data.bases import make_tokenizer


def asked(base: Base, count: int) -> list[list[int]]:
    return [
        encode_prompt(base.tokenizer, [{"role": "user", "content": f"which kettle {'hello ' * (i % 5)}{i}?"}])
        for i in range(count)
    ]


def greedy(base: Base, ids: list[int], tokens: int) -> list[int]:
    prompt = torch.tensor([ids])
    out = base.model.generate(prompt, max_new_tokens=tokens, do_sample=False, attention_mask=prompt >= 0)
    return out[0, len(ids) :].tolist()


def check_greedy(backend: EngineBackend | VllmBackend, base: Base) -> None:
    prompts = asked(base, 10)
    requests = [Request(ids, max_new_tokens=5 + i, key=i) for i, ids in enumerate(prompts)]
    done = {completion.key: completion for completion in backend.complete(requests)}
    assert sorted(done) == list(range(10))
    for i, ids in enumerate(prompts):
        expected = greedy(base, ids, 5 + i)
        assert done[i].token_ids == expected
        assert done[i].finish == ("stop" if expected[-1] in base.eos_ids else "length")
        text = base.tokenizer.decode(expected, skip_special_tokens=True)
        # vLLM leaves out half a character at the end, which the engine gives as U+FFFD.
        assert done[i].text.rstrip("\N{REPLACEMENT CHARACTER}") == text.rstrip("\N{REPLACEMENT CHARACTER}")
    assert {completion.finish for completion in done.values()} == {"stop", "length"}


def check_requests_from_completions(backend: EngineBackend | VllmBackend, base: Base) -> None:
    """Later requests made of earlier completions, and None while there are none."""
    ready = [Request(ids, max_new_tokens=3, key=(i, 0)) for i, ids in enumerate(asked(base, 3))]
    flying = 0

    def requests() -> Iterator[Request | None]:
        nonlocal flying
        while ready or flying:
            flying += bool(ready)
            yield ready.pop(0) if ready else None

    keys = []
    for completion in backend.complete(requests()):
        flying -= 1
        number, turn = completion.key
        keys.append(completion.key)
        if turn < 2:
            ready.append(
                Request([*asked(base, 1)[0], *completion.token_ids], max_new_tokens=3, key=(number, turn + 1))
            )
    assert sorted(keys) == [(i, turn) for i in range(3) for turn in range(3)]
    with pytest.raises(MedusaError, match="stuck"):
        list(backend.complete(iter([None])))


def check_limits(backend: EngineBackend | VllmBackend, base: Base) -> None:
    room = backend.max_length - 10
    long = Request([5] * room, max_new_tokens=100, key="long")
    (completion,) = backend.complete([long])
    assert len(completion.token_ids) <= 10
    for ids in ([], [5] * (backend.max_length + 1)):
        with pytest.raises(MedusaError):
            list(backend.complete([Request(ids)]))
    # What was interrupted leaves the backend usable.
    stream = backend.complete(
        [Request(ids, max_new_tokens=4 + 9 * i) for i, ids in enumerate(asked(base, 4))]
    )
    next(stream)
    stream.close()
    check_greedy(backend, base)


def check_sampling(backend: EngineBackend | VllmBackend, base: Base) -> None:
    ids = asked(base, 1)[0]
    hot = [
        Request(ids, max_new_tokens=8, sampling=SamplingParams(1.0, top_p=0.95, seed=i), key=i)
        for i in range(6)
    ]
    said = {completion.key: tuple(completion.token_ids) for completion in backend.complete(hot)}
    assert len(set(said.values())) > 3
    whole = backend.complete([Request(ids, max_new_tokens=12, key=ids) for ids in asked(base, 8)])
    longest = max(whole, key=lambda completion: len(completion.text))
    letter = next(c for c in longest.text[1:] if c.isascii() and c.isalnum() and c != longest.text[0])
    (shorter,) = backend.complete([Request(longest.key, max_new_tokens=12, stop=(letter,))])
    assert shorter.text == longest.text[: longest.text.index(letter)]
    assert shorter.finish == "stop"


def test_the_engine(base: Base) -> None:
    backend = open_backend(base, "engine", in_flight=4, max_length=128)
    assert backend.name == "engine"
    check_greedy(backend, base)
    check_requests_from_completions(backend, base)
    check_limits(backend, base)
    check_sampling(backend, base)


def test_the_engine_gives_hidden_states(base: Base) -> None:
    backend = EngineBackend(base, in_flight=3, max_length=128)
    assert backend.gives_hidden
    for completion in backend.complete(
        [Request(ids, 9, want_hidden=True, key=ids) for ids in asked(base, 5)]
    ):
        whole = torch.tensor([[*completion.key, *completion.token_ids]])
        with torch.no_grad():
            states = base.model.get_decoder()(whole).last_hidden_state[0]
        expected = states[len(completion.key) - 1 : -1]
        torch.testing.assert_close(completion.hidden, expected, rtol=1e-4, atol=1e-4)


def test_auto_takes_vllm_where_it_is(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert open_backend(base, in_flight=1, max_length=64).name == "engine"


def test_backends_say_what_is_wrong(base: Base) -> None:
    with pytest.raises(MedusaError, match="choose auto, vllm or engine"):
        open_backend(base, "tensorrt")
    with pytest.raises(MedusaError, match="load_base"):
        open_backend(open_base(str(base.path)), "engine")
    assert open_backend(base, "engine", in_flight=1, max_length=10**6).max_length == base.max_length


def test_without_vllm_the_error_names_the_extra(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what an absent package looks like to `import`
    with pytest.raises(MedusaError, match=r"medusa-kit\[vllm\]"):
        open_backend(base, "vllm")


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A random base of a shape that vLLM's attention on CPUs takes (head size 32)."""
    folder = tmp_path_factory.mktemp("bases") / "larger"
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
            initializer_range=0.2,
        )
    )
    with torch.no_grad():
        model.lm_head.weight[2] *= 2.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_base(str(folder), dtype=torch.float32)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm(larger: Base, tmp_path: Path) -> None:
    """One test: the engine is started once for all that is asked of it."""
    backend = open_backend(larger, in_flight=4, max_length=128, dtype="float32")
    assert isinstance(backend, VllmBackend)
    check_greedy(backend, larger)
    check_requests_from_completions(backend, larger)
    check_limits(backend, larger)
    check_sampling(backend, larger)
    prompts = [
        {
            "id": str(i),
            "messages": [
                {"role": "user", "content": f"which kettle? {i}.{turn}"} for turn in range(1 + i % 3)
            ],
        }
        for i in range(9)
    ]
    sampling = Sampling(max_new_tokens=10, greedy_share=0.5)
    where = {"out": tmp_path / "vllm.jsonl", "states_dir": tmp_path / "states"}
    report = distill(prompts, base=larger, backend=backend, sampling=sampling, progress=False, **where)
    assert (report.new, report.skipped) == (9, 0)
    assert StatesCache(tmp_path / "states", larger.fingerprints).num_segments >= 9
