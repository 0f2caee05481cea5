from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from medusa.base import Base
from medusa.data import states
from medusa.data.conversations import data_fingerprint
from medusa.data.states import MANIFEST, OnlineStates, StatesCache, StatesWriter, build_states
from medusa.data.template import encode_conversation
from medusa.errors import MedusaError
from tests.medusa.data.bases import make_base

WORDS = "hello which kettle is the best one for a small kitchen? It's $19.90. Thanks, bye! ünï".split()


def conversations(count: int) -> list[dict]:
    """Of one to three turns and unlike lengths; every third is cut off by the length limit."""
    rows = []
    for i in range(count):
        messages = []
        for turn in range(1 + i % 3):
            said = (WORDS * 3)[i % 7 : i % 7 + 2 + (5 * i + 3 * turn) % 17]
            messages.append({"role": "user", "content": " ".join(reversed(said))})
            messages.append({"role": "assistant", "content": " ".join(said)})
        finish = ["length" if i % 3 == 0 else "stop"] * (len(messages) // 2)
        rows.append({"id": str(i), "messages": messages, "finish": finish})
    return rows


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SHARD_TOKENS", 60)


def expected(base: Base, rows: list[dict]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Row, tokens and hidden states of every segment, one conversation at a time."""
    found = []
    for number, row in enumerate(rows):
        ids, segments = encode_conversation(base.tokenizer, row["messages"], row.get("finish"))
        with torch.no_grad():
            out = base.model(torch.tensor([ids]), output_hidden_states=True)
        for start, stop in segments:
            hidden = out.hidden_states[-1][0, start - 1 : stop - 1]
            assert torch.allclose(base.model.lm_head(hidden), out.logits[0, start - 1 : stop - 1], atol=1e-5)
            found.append((number, torch.tensor(ids[start:stop]), hidden.bfloat16()))
    return found


def check(source: StatesCache | OnlineStates, wanted: list) -> None:
    got = source.get(range(source.num_segments))
    assert (got.hidden.dtype, got.tokens.dtype, got.offsets.dtype) == (
        torch.bfloat16,
        torch.int64,
        torch.int64,
    )
    assert got.rows == [row for row, _, _ in wanted]
    assert torch.equal(got.tokens, torch.cat([tokens for _, tokens, _ in wanted]))
    lengths = [len(tokens) for _, tokens, _ in wanted]
    assert got.offsets.diff().tolist() == source.lengths.tolist() == lengths
    assert (len(wanted), len(got.tokens)) == (source.num_segments, source.num_tokens)
    # Batches of other shapes round otherwise: in float32 by less than bfloat16 shows, but for its last bit.
    torch.testing.assert_close(
        got.hidden, torch.cat([hidden for _, _, hidden in wanted]), rtol=2**-7, atol=1e-4
    )


def test_the_cache_holds_the_state_before_each_token(base: Base, tmp_path: Path, small_shards: None) -> None:
    rows = conversations(20)
    cache = build_states(base, rows, tmp_path / "states", batch_tokens=300, progress=False)
    assert len(list((tmp_path / "states").glob("shard-*.safetensors"))) > 2
    check(cache, expected(base, rows))
    assert cache.fingerprint == {**base.fingerprints, "data": data_fingerprint(rows)}
    assert cache.hidden_size == 32


def test_online_states_are_the_cached_ones(base: Base, tmp_path: Path, small_shards: None) -> None:
    rows = conversations(20)
    cache = build_states(base, rows, tmp_path / "states", progress=False)
    online = OnlineStates(base, rows, batch_tokens=300)
    check(online, expected(base, rows))
    assert online.fingerprint == cache.fingerprint
    assert (online.hidden_size, online.num_tokens) == (cache.hidden_size, cache.num_tokens)
    assert torch.equal(online.lengths, cache.lengths)
    some = [7, 3, 30, 3]
    a, b = cache.get(some), online.get(some)
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.offsets, b.offsets)
    assert a.rows == b.rows
    torch.testing.assert_close(a.hidden, b.hidden, rtol=2**-7, atol=1e-4)
    assert cache.get([]).hidden.shape == online.get([]).hidden.shape == (0, 32)


def test_the_lm_head_is_not_run(base: Base, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the LM head ran")

    hook = base.model.lm_head.register_forward_pre_hook(fail)
    try:
        assert build_states(base, conversations(4), tmp_path / "states", progress=False).num_segments
    finally:
        hook.remove()


def test_conversations_of_similar_length_share_a_forward(base: Base, tmp_path: Path) -> None:
    rows = conversations(20)
    shapes: list[torch.Size] = []
    body = base.model.get_decoder()
    hook = body.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        build_states(base, rows, tmp_path / "states", batch_tokens=400, progress=False)
    finally:
        hook.remove()
    assert all(count * length <= 400 for count, length in shapes)
    real = sum(encode_conversation(base.tokenizer, r["messages"], r["finish"])[1][-1][1] for r in rows)
    assert real > 0.8 * sum(count * length for count, length in shapes)


def test_answers_past_the_limit_are_cut_and_others_left_out(base: Base, tmp_path: Path) -> None:
    long = {
        "id": "0",
        "messages": [{"role": "user", "content": "hello " * 40}, {"role": "assistant", "content": "bye!"}],
    }
    rows = [long, *conversations(2), {"id": "p", "messages": [{"role": "user", "content": "only a prompt"}]}]
    for source in (
        build_states(base, rows, tmp_path / "states", max_length=60, progress=False),
        OnlineStates(base, rows, max_length=60),
    ):
        got = source.get(range(source.num_segments))
        assert set(got.rows) == {1, 2}
        assert not got.hidden.isnan().any()
    with pytest.raises(MedusaError, match="nothing to learn from"):
        OnlineStates(base, [long], max_length=60)
    with pytest.raises(MedusaError, match="nothing to learn from"):
        build_states(base, [long], tmp_path / "none", max_length=60, progress=False)


def test_a_cache_of_something_else_is_an_error(base: Base, tmp_path: Path, small_shards: None) -> None:
    rows, folder = conversations(8), tmp_path / "states"
    cache = build_states(base, rows, folder, progress=False)
    StatesCache(folder, {**base.fingerprints, "data": data_fingerprint(rows)})
    for part in ("base", "tokenizer", "template", "data"):
        with pytest.raises(MedusaError, match=f"another {part}"):
            StatesCache(folder, {**cache.fingerprint, part: "0"})
    with pytest.raises(MedusaError, match="other conversations"):
        build_states(base, rows[::-1], folder, progress=False)
    other = make_base(tmp_path / "other", seed=1)
    with pytest.raises(MedusaError, match="another base"):
        build_states(other, rows, folder, progress=False)
    again = build_states(other, rows, folder, resume=False, progress=False)
    assert again.fingerprint["base"] == other.fingerprint


def test_more_conversations_cost_only_themselves(base: Base, tmp_path: Path, small_shards: None) -> None:
    rows, folder = conversations(16), tmp_path / "states"
    build_states(base, rows[:8], folder, progress=False)
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("shard-*")}
    cache = build_states(base, rows, folder, progress=False)
    assert before == {name: (folder / name).stat().st_mtime_ns for name in before}
    check(cache, expected(base, rows))


def test_damage_is_an_error(base: Base, tmp_path: Path, small_shards: None) -> None:
    folder = tmp_path / "states"
    with pytest.raises(MedusaError, match="no finished hidden-state cache"):
        StatesCache(folder)
    build_states(base, conversations(8), folder, progress=False)
    shard = folder / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(MedusaError, match=r"shard-00001.* is missing or damaged .*remove that file"):
        StatesCache(folder)
    shard.write_bytes((folder / "shard-00000.safetensors").read_bytes())
    with pytest.raises(MedusaError, match=r"shard-00001.* does not fit manifest\.json; remove that shard"):
        StatesCache(folder)
    with pytest.raises(MedusaError, match=r"shard-00001.* another shard holds too; remove it"):
        build_states(base, conversations(8), folder, progress=False)
    shard.unlink()
    with pytest.raises(MedusaError, match="missing or damaged"):
        StatesCache(folder)


def test_a_missing_shard_is_made_again_and_the_others_stay(
    base: Base, tmp_path: Path, small_shards: None
) -> None:
    rows, folder = conversations(16), tmp_path / "states"
    build_states(base, rows, folder, progress=False)
    (folder / "shard-00001.safetensors").unlink()
    kept = {file: file.stat().st_mtime_ns for file in folder.glob("shard-*")}
    assert len(kept) >= 2
    cache = build_states(base, rows, folder, progress=False)
    assert kept == {file: file.stat().st_mtime_ns for file in kept}
    got, wanted = cache.get(range(cache.num_segments)), expected(base, rows)
    assert sorted(got.rows) == [row for row, _, _ in wanted]
    assert cache.num_tokens == sum(len(tokens) for _, tokens, _ in wanted)


def test_a_folder_of_something_else_is_left_alone(base: Base, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MedusaError, match="cannot write .*file: .*; choose another place"):
        build_states(base, conversations(2), tmp_path / "file", progress=False)
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"format": 1, "splits": {}}')
    with pytest.raises(
        MedusaError, match=r"manifest\.json is not a hidden-state cache's; give another folder"
    ):
        build_states(base, conversations(2), tmp_path, progress=False)
    with pytest.raises(
        MedusaError, match=r"manifest\.json is not a hidden-state cache's; give another folder"
    ):
        StatesCache(tmp_path)
    assert manifest.read_text() == '{"format": 1, "splits": {}}'


def test_states_from_decoding_are_kept_and_missing_ones_computed(
    base: Base, tmp_path: Path, small_shards: None
) -> None:
    rows = conversations(12)
    wanted = expected(base, rows)
    writer = StatesWriter(base, rows[:2], tmp_path / "states")
    for number, row in enumerate(rows[2:], start=2):
        answers = [(tokens.tolist(), hidden) for n, tokens, hidden in wanted if n == number]
        if number % 4 == 3:
            answers = [(tokens, None) for tokens, _ in answers]
        if writer.add(row, answers):
            writer.flush()
    cache = writer.close(progress=False)
    got = cache.get(range(cache.num_segments))
    assert sorted(got.rows) == [row for row, _, _ in wanted]
    at = {row: [n for n, r in enumerate(got.rows) if r == row] for row in set(got.rows)}
    order = [at[row].pop(0) for row, _, _ in wanted]
    part = cache.get(order)
    assert torch.equal(part.tokens, torch.cat([tokens for _, tokens, _ in wanted]))
    torch.testing.assert_close(part.hidden, torch.cat([h for _, _, h in wanted]), rtol=2**-7, atol=1e-4)


_BUILD = """
import sys, time, torch
from medusa.base import load_base
from medusa.data import states
from tests.medusa.data.test_states import conversations
states.SHARD_TOKENS = 60
base = load_base(sys.argv[1], dtype=torch.float32)
run = states.run
def slow(*words):
    time.sleep(0.3)  # so that the test can kill it between shards
    return run(*words)
states.run = slow
states.build_states(base, conversations(20), sys.argv[2], progress=False)
"""


def test_a_killed_build_goes_on(base: Base, tmp_path: Path, small_shards: None) -> None:
    folder = tmp_path / "states"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, "-c", _BUILD, str(base.path), str(folder)], env=environment)
    try:
        while len(list(folder.glob("shard-*"))) < 2:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(MedusaError, match="no finished"):
        StatesCache(folder)
    kept = {file: file.stat().st_mtime_ns for file in folder.glob("shard-*")}
    cache = build_states(base, conversations(20), folder, progress=False)
    assert len(kept) >= 2
    assert kept == {file: file.stat().st_mtime_ns for file in kept}
    check(cache, expected(base, conversations(20)))


def test_shards_hold_what_the_format_says(base: Base, tmp_path: Path) -> None:
    build_states(base, conversations(5), tmp_path, progress=False)
    with safe_open(tmp_path / "shard-00000.safetensors", framework="pt") as shard:
        found = {name: shard.get_tensor(name) for name in shard.keys()}
    assert {name: value.dtype for name, value in found.items()} == {
        "hidden": torch.bfloat16,
        "tokens": torch.int32,
        "offsets": torch.int64,
        "conversations": torch.int32,
    }
    assert found["hidden"].shape == (len(found["tokens"]), 32)
    assert len(found["offsets"]) == len(found["conversations"]) + 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manifest: manifest.pop("fingerprint"),
        lambda manifest: manifest.update(shards=[]),
        lambda manifest: manifest.update(shards=[{}]),
        lambda manifest: manifest.update(shards=7),
    ],
)
def test_a_manifest_that_is_not_whole(base: Base, tmp_path: Path, spoil) -> None:
    build_states(base, conversations(4), tmp_path / "states", progress=False)
    manifest = json.loads((tmp_path / "states" / MANIFEST).read_text())
    spoil(manifest)
    (tmp_path / "states" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(MedusaError, match="manifest.json"):
        StatesCache(tmp_path / "states")
