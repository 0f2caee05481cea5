from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from medusa.base import Base
from medusa.data import states
from medusa.data.backends import EngineBackend
from medusa.data.conversations import load_conversations
from medusa.data.distill import Sampling, distill
from medusa.data.states import StatesCache
from medusa.data.template import encode_prompt
from medusa.errors import MedusaError
from medusa.generation import Completion, Request

SAMPLING = Sampling(max_new_tokens=12, greedy_share=0.5, temperature=(0.7, 0.9), seed=3)


def prompts(count: int) -> list[dict]:
    """Of one to three turns, some with a system message, one in four with old answers that must not stay."""
    rows = []
    for i in range(count):
        messages = [{"role": "system", "content": "Be kind."}] if i % 2 else []
        for turn in range(1 + i % 3):
            messages.append({"role": "user", "content": f"hello {'which kettle? ' * (i % 5)}{i}.{turn}"})
            if i % 4 == 0:
                messages.append({"role": "assistant", "content": "OLD"})
        rows.append({"id": f"p{i}", "messages": messages, "category": "kettle", "style": "plain"})
    return rows


class Watched:
    """A backend that notes the requests that pass, and how many of them were there at once."""

    def __init__(self, backend: EngineBackend):
        self.backend, self.seen, self.most, self.now = backend, [], 0, 0
        self.name, self.gives_hidden, self.max_length = "engine", backend.gives_hidden, backend.max_length

    def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        def watched() -> Iterator[Request | None]:
            for request in requests:
                if request is not None:
                    self.seen.append(request)
                    self.now += 1
                    self.most = max(self.most, self.now)
                yield request

        for completion in self.backend.complete(watched()):
            self.now -= 1
            yield completion


def read(path: Path) -> dict[str, dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def reference(base: Base, row: dict) -> None:
    """Greedy rows: every turn is what `transformers` generates after the turns before it."""
    for i, message in enumerate(row["messages"]):
        if message["role"] == "assistant":
            ids = torch.tensor([encode_prompt(base.tokenizer, row["messages"][:i])])
            out = base.model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=ids >= 0)
            said = base.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            assert message["content"].rstrip("\ufffd") == said.rstrip("\ufffd")


def test_every_turn_is_answered_in_its_own_context(base: Base, tmp_path: Path) -> None:
    asked = prompts(13)
    backend = Watched(EngineBackend(base, in_flight=4, max_length=256))
    report = distill(asked, tmp_path / "out.jsonl", base, backend, sampling=SAMPLING, progress=False)
    rows = read(tmp_path / "out.jsonl")
    assert set(rows) == {row["id"] for row in asked}
    assert (report.rows, report.new, report.skipped) == (13, 13, 0)
    assert backend.most == 4
    turns = 0
    for prompt in asked:
        row = rows[prompt["id"]]
        assert row["category"] == "kettle"
        assert row["style"] == "plain"
        spoken = [message for message in row["messages"] if message["role"] != "assistant"]
        assert spoken == [message for message in prompt["messages"] if message["role"] != "assistant"]
        roles = [message["role"] for message in row["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert "OLD" not in [message["content"] for message in row["messages"]]
        assert len(row["finish"]) == len(roles) // 2
        turns += len(row["finish"])
    assert len(backend.seen) == turns
    greedy = [row for row in rows.values() if row["sampling"]["temperature"] == 0]
    assert 3 <= len(greedy) <= 10
    for row in greedy:
        reference(base, row)
    assert all(0.7 <= row["sampling"]["temperature"] <= 0.9 for row in rows.values() if row not in greedy)
    ends = [end for row in rows.values() for end in row["finish"]]
    assert {"stop", "length"} == set(ends)
    assert report.tokens <= 12 * turns
    assert load_conversations(tmp_path / "out.jsonl")[0]["finish"] == next(iter(rows.values()))["finish"]


def test_only_what_is_missing_is_answered(base: Base, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    backend = Watched(EngineBackend(base, in_flight=4, max_length=256))
    distill(prompts(5), out, base, backend, sampling=SAMPLING, progress=False)
    before = out.read_bytes()
    first = len(backend.seen)
    report = distill(prompts(9), out, base, backend, sampling=SAMPLING, progress=False)
    assert out.read_bytes().startswith(before)
    assert (report.rows, report.new) == (9, 4)
    asked = {request.key.row["id"] for request in backend.seen[first:]}
    assert asked == {"p5", "p6", "p7", "p8"}
    again = distill(prompts(9), out, base, backend, sampling=SAMPLING, progress=False)
    assert (again.new, again.tokens) == (0, 0)
    with pytest.raises(MedusaError, match="seed: 3 there, 4 now"):
        distill(
            prompts(9), out, base, backend, sampling=Sampling(12, 0.5, (0.7, 0.9), seed=4), progress=False
        )


def test_a_token_budget_ends_it_between_conversations(base: Base, tmp_path: Path) -> None:
    backend = EngineBackend(base, in_flight=2, max_length=256)
    report = distill(
        prompts(40), tmp_path / "o.jsonl", base, backend, sampling=SAMPLING, token_budget=60, progress=False
    )
    assert 60 <= report.tokens < 60 + 2 * 3 * 12
    assert 0 < report.new < 40
    done = read(tmp_path / "o.jsonl")
    wanted = {row["id"]: sum(m["role"] == "user" for m in row["messages"]) for row in prompts(40)}
    assert all(len(row["finish"]) == wanted[name] for name, row in done.items())


def test_a_token_budget_counts_earlier_runs_and_a_time_budget_ends_it_too(base: Base, tmp_path: Path) -> None:
    backend = EngineBackend(base, in_flight=2, max_length=256)
    asked = {"sampling": SAMPLING, "progress": False}
    first = distill(prompts(40), tmp_path / "o.jsonl", base, backend, token_budget=60, **asked)
    again = distill(prompts(40), tmp_path / "o.jsonl", base, backend, token_budget=60, **asked)
    assert (again.new, again.tokens, again.rows) == (0, 0, first.rows)
    assert sum(sum(row["tokens"]) for row in read(tmp_path / "o.jsonl").values()) == first.tokens
    assert distill(prompts(40), tmp_path / "o.jsonl", base, backend, seconds=0, **asked).new == 0
    assert distill(prompts(40), tmp_path / "o.jsonl", base, backend, seconds=600, **asked).rows == 40


def test_when_time_is_up_open_conversations_end_with_the_turn_they_are_in(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10_000))  # a second for each look at it
    monkeypatch.setattr("medusa.data.distill.time.perf_counter", lambda: float(next(clock)))
    user = {"role": "user", "content": "which kettle?"}
    rows = [{"id": str(number), "messages": [user] * 6} for number in range(4)]
    backend = EngineBackend(base, in_flight=1, max_length=500)
    distill(rows, tmp_path / "o.jsonl", base, backend, sampling=SAMPLING, seconds=4, progress=False)
    (row,) = read(tmp_path / "o.jsonl").values()
    answered = len(row["finish"])
    assert 1 <= answered < 6
    assert len(row["messages"]) == 2 * answered


def test_prompts_that_leave_no_room_are_counted_and_long_conversations_end_early(
    base: Base, tmp_path: Path
) -> None:
    user = {"role": "user", "content": "which kettle? " * 3}
    rows = [
        {"id": "long", "messages": [{"role": "user", "content": "kettle " * 200}]},
        {"id": "many", "messages": [user] * 20},
    ]
    said: list[str] = []
    backend = EngineBackend(base, in_flight=2, max_length=120)
    report = distill(
        rows, tmp_path / "o.jsonl", base, backend, sampling=SAMPLING, progress=False, log=said.append
    )
    assert (report.new, report.skipped) == (1, 1)
    assert "1 prompts left no room" in said[0]
    row = read(tmp_path / "o.jsonl")["many"]
    assert row["messages"][-1]["role"] == "assistant"
    assert 1 <= len(row["finish"]) < 20


def test_repeated_ids_are_an_error(base: Base, tmp_path: Path) -> None:
    backend = EngineBackend(base, in_flight=1, max_length=64)
    with pytest.raises(MedusaError, match="id 'p0'"):
        distill(prompts(1) * 2, tmp_path / "o.jsonl", base, backend, progress=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"greedy_share": 1.1},
        {"temperature": (1.0, 0.5)},
        {"temperature": (0, 1)},
        {"temperature": (1.0, float("inf"))},
        {"top_p": 0},
    ],
)
def test_senseless_sampling_is_an_error(wrong: dict) -> None:
    with pytest.raises(MedusaError, match=next(iter(wrong))):
        Sampling(**wrong)


def check_states(base: Base, out: Path, folder: Path) -> int:
    """Every answer has its states once, those of a forward over its context. Returns their number."""
    rows = list(read(out).values())
    cache = StatesCache(folder, base.fingerprints)
    got = cache.get(range(cache.num_segments))
    parts = got.offsets[1:-1].tolist()
    segments = {row: [] for row in range(len(rows))}
    for row, tokens, hidden in zip(got.rows, got.tokens.tensor_split(parts), got.hidden.tensor_split(parts)):
        segments[row].append((tokens, hidden))
    for number, row in enumerate(rows):
        turns = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        answers = [
            (i, end) for i, end in zip(turns, row["finish"]) if end == "stop" or row["messages"][i]["content"]
        ]
        assert len(segments[number]) == len(answers)
        for (i, _), (tokens, hidden) in zip(answers, segments[number]):
            said = base.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
            assert said == row["messages"][i]["content"].rstrip("\ufffd")
            ids = encode_prompt(base.tokenizer, row["messages"][:i])
            with torch.no_grad():
                states = base.model.get_decoder()(torch.tensor([[*ids, *tokens.tolist()]])).last_hidden_state[
                    0
                ]
            expected = states[len(ids) - 1 : -1].bfloat16()
            torch.testing.assert_close(hidden, expected, rtol=2**-6, atol=2e-3)
    return cache.num_segments


def test_states_come_with_the_answers(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SHARD_TOKENS", 100)
    computed: list[int] = []
    run = states.run
    monkeypatch.setattr(states, "run", lambda *words: computed.append(1) or run(*words))
    backend = EngineBackend(base, in_flight=4, max_length=256)
    out, folder = tmp_path / "out.jsonl", tmp_path / "states"
    distill(prompts(12), out, base, backend, sampling=SAMPLING, states_dir=folder, progress=False)
    assert check_states(base, out, folder) == 24
    assert not computed
    assert len(list(folder.glob("shard-*"))) > 1


def check_that_it_goes_on(
    base: Base, engine: EngineBackend, where: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs again what was interrupted: all 24 answers are there, and no state had to be computed a second time."""
    computed: list[int] = []
    run = states.run
    monkeypatch.setattr(states, "run", lambda *words: computed.append(1) or run(*words))
    distill(prompts(12), base=base, backend=engine, **where)
    assert check_states(base, where["out"], where["states_dir"]) == 24
    assert not computed


def test_ctrl_c_loses_no_states(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Watched):
        def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
            for number, completion in enumerate(super().complete(requests)):
                if number == 12:
                    raise KeyboardInterrupt
                yield completion

    engine = EngineBackend(base, in_flight=4, max_length=256)
    out, folder = tmp_path / "out.jsonl", tmp_path / "states"
    where = {"out": out, "states_dir": folder, "sampling": SAMPLING, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        distill(prompts(12), base=base, backend=Interrupted(engine), **where)
    assert 1 < len(read(out)) < 12
    check_that_it_goes_on(base, engine, where, monkeypatch)


def test_a_backend_without_states_has_them_computed(base: Base, tmp_path: Path) -> None:
    backend = Watched(EngineBackend(base, in_flight=4, max_length=256))
    backend.gives_hidden = False
    out, folder = tmp_path / "out.jsonl", tmp_path / "states"
    distill(prompts(6), out, base, backend, sampling=SAMPLING, states_dir=folder, progress=False)
    assert not any(request.want_hidden for request in backend.seen)
    assert StatesCache(folder, base.fingerprints).num_segments > 6


_RUN = """
import sys, torch
from pathlib import Path
from medusa.base import load_base
from medusa.data import states
from medusa.data.backends import EngineBackend
from medusa.data.distill import distill
from tests.medusa.data.test_distill import SAMPLING, prompts
states.SHARD_TOKENS = 60
base, out = load_base(sys.argv[1], dtype=torch.float32), Path(sys.argv[2])
where = {"out": out / "out.jsonl", "states_dir": out / "states"}
backend = EngineBackend(base, in_flight=4, max_length=256)
distill(prompts(60), base=base, backend=backend, sampling=SAMPLING, progress=False, **where)
"""


def test_killed_at_any_moment_it_goes_on(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SHARD_TOKENS", 60)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    out, rng, lines = tmp_path / "out.jsonl", random.Random(0), 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, str(base.path), str(tmp_path)], env=environment
        )
        try:
            while (out.read_bytes().count(b"\n") if out.exists() else 0) < lines + 6:
                assert process.poll() is None
                time.sleep(0.002)
            time.sleep(rng.random() * 0.05)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        before, lines = lines, out.read_bytes().count(b"\n")
        assert before + 6 <= lines < 60
    with open(out, "ab") as file:
        file.write(b'{"id": "p59", "messages": [{"ro')  # as a power cut would leave it
    backend = EngineBackend(base, in_flight=4, max_length=256)
    distill(
        prompts(60), out, base, backend, sampling=SAMPLING, states_dir=tmp_path / "states", progress=False
    )
    assert set(read(out)) == {f"p{i}" for i in range(60)}
    cache = StatesCache(tmp_path / "states", base.fingerprints)
    got = cache.get(range(cache.num_segments))
    rows = list(read(out).values())
    for number, row in enumerate(rows):
        assert got.rows.count(number) == len(row["finish"])
    unbroken = tmp_path / "unbroken.jsonl"
    distill(prompts(60), unbroken, base, backend, sampling=SAMPLING, progress=False)
    assert read(unbroken) == read(out)


def test_sigterm_loses_no_states(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Watched):
        def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
            for number, completion in enumerate(super().complete(requests)):
                if number == 12:
                    signal.raise_signal(signal.SIGTERM)
                yield completion

    engine = EngineBackend(base, in_flight=4, max_length=256)
    out, folder = tmp_path / "out.jsonl", tmp_path / "states"
    where = {"out": out, "states_dir": folder, "sampling": SAMPLING, "progress": False}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        distill(prompts(12), base=base, backend=Ended(engine), **where)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert 1 < len(read(out)) < 12
    check_that_it_goes_on(base, engine, where, monkeypatch)


def test_no_answers_are_a_good_end_without_a_cache(base: Base, tmp_path: Path) -> None:
    backend = EngineBackend(base, in_flight=2, max_length=256)
    out, folder, said = tmp_path / "o.jsonl", tmp_path / "states", []
    asked = {"states_dir": folder, "sampling": SAMPLING, "progress": False, "log": said.append}
    assert distill([], out, base, backend, **asked).rows == 0
    assert distill(prompts(3), out, base, backend, seconds=0, **asked).rows == 0
    assert said == ["no answers, so no hidden states either"] * 2
    assert not folder.exists()
    assert distill(prompts(3), out, base, backend, **asked).rows == 3
    assert StatesCache(folder, base.fingerprints).num_segments
