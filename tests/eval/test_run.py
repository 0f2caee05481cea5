"""Whole runs on a small random base: what is found, what is written, and that faults do not pass."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from unittest import mock

import jsonschema
import pytest
import torch

import eval.run
from eval.__main__ import main
from eval.decode import Decoder
from eval.report import render
from eval.results import MODES, Results, load, schema
from eval.run import run
from eval.subject import Options
from eval.svg import COLOURS
from medusa.data.template import encode_prompt
from medusa.decoding import Engine
from medusa.errors import MedusaError
from tests.eval.small import TREE, make_heads

TOKENS = 24


@pytest.fixture(scope="module")
def options(small, tmp_path_factory):
    return Options(
        checkpoint=small.heads_folder,
        data=str(small.data),
        out=tmp_path_factory.mktemp("out"),
        command="python -m eval run",
        base=str(small.base_folder),
        dtype="float32",
        max_new_tokens=TOKENS,
        repeats=2,
        peer_conversations=2,
        peers="transformers",
        cost_repeats=2,
    )


@pytest.fixture(scope="module")
def results(options) -> Results:
    return run(options)


class ForgetsToCommit(Engine):
    """Leaves a path's keys and values where the tree put them: right for a chain, wrong for a tree."""

    def step(self):
        with mock.patch("medusa.step.commit", return_value=None):
            return super().step()


def test_float32_gives_the_same_tokens_in_every_mode(results):
    assert results.lossless.checked == 2 * 8
    assert results.lossless.different == 0
    for conversation in results.conversations:
        for turn in conversation.turns:
            ids = [turn.answers[mode].token_ids for mode in MODES]
            assert ids[0] == ids[1] == ids[2]
            assert 1 <= len(ids[0]) <= TOKENS
    # Not vacuous: the heads were right at every depth of the tree.
    assert len(results.acceptance_rate) == TREE.depth
    assert min(results.acceptance_rate) > 0
    assert results.acceptance_length > 1.2


def test_plain_answers_are_those_of_transformers(results, small):
    peer = results.peers[0]
    assert (peer.name, peer.conversations) == ("transformers", 2)
    assert peer.same == peer.answers >= 2
    assert results.tokens_per_second["transformers"] == peer.tokens_per_second > 0


def test_every_turn_is_answered_with_the_models_own_earlier_answers(results, small):
    conversation = next(c for c in results.conversations if c.id == "talk-2")
    assert [turn.user for turn in conversation.turns] == ["what about item 2", "and in blue"]
    answer = conversation.turns[0].answers["plain"].token_ids
    messages = [
        {"role": "user", "content": "what about item 2"},
        {"role": "assistant", "content": small.base.tokenizer.decode(answer, skip_special_tokens=True)},
        {"role": "user", "content": "and in blue"},
    ]
    prompt = encode_prompt(small.base.tokenizer, messages)
    assert conversation.turns[1].prompt_tokens == len(prompt)
    ids = torch.tensor([prompt])
    expected = small.base.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0
    )
    assert conversation.turns[1].answers["tree"].token_ids == expected[0, len(prompt) :].tolist()


def test_figures_follow_from_the_raw_ones(results):
    def total(mode, what):
        sums = []
        for group in results.groups:
            conversation = results.conversations[group.members[0]]
            if what == "seconds":
                sums.append(sorted(group.seconds[mode]))
            else:
                sums.append([sum(turn.answers[mode].repeats[0].tokens for turn in conversation.turns)])
        return sum((row[0] + row[-1]) / 2 for row in sums)  # the median of one or two

    rates = {mode: total(mode, "tokens") / total(mode, "seconds") for mode in MODES}
    for mode in MODES:
        assert results.tokens_per_second[mode] == pytest.approx(rates[mode])
    assert results.speedup.mean == pytest.approx(rates["tree"] / rates["plain"])
    assert results.speedup.low <= results.speedup.mean <= results.speedup.high
    assert results.chain.speedup.mean == pytest.approx(rates["chain"] / rates["plain"])
    steps = [turn.answers["tree"].accepted for c in results.conversations for turn in c.turns]
    assert results.acceptance_length == pytest.approx(sum(map(sum, steps)) / sum(map(len, steps)))
    for conversation in results.conversations:
        for turn in conversation.turns:
            for answer in turn.answers.values():
                assert len(answer.token_ids) == 1 + sum(answer.accepted)
                assert len(answer.repeats) == 2
                assert all(0 < t.prefill <= t.seconds for t in answer.repeats)


def test_parts_hold_every_labelled_conversation_and_no_empty_group(results):
    assert {name: part.n for name, part in results.by_source.items()} == {"grammar": 5, "magpie-shopping": 1}
    assert {name: part.n for name, part in results.by_intent.items()} == {"gift": 2, "care": 3}
    assert {name: part.n for name, part in results.by_category.items()} == {"tents": 5}


def test_head_accuracy_against_a_loop(results, small):
    """Head 1 by hand: features of the state before each token, with the true token as its path."""
    from medusa.checkpoint import load_checkpoint

    heads = load_checkpoint(small.heads_folder, small.base).heads
    model, tokenizer = small.base.model, small.base.tokenizer
    hits = tried = 0
    with torch.inference_mode():
        for conversation in results.conversations:
            messages = []
            for turn in conversation.turns:
                messages.append({"role": "user", "content": turn.user})
                prompt = encode_prompt(tokenizer, messages)
                answer = turn.answers["plain"].token_ids
                states = model.model(torch.tensor([prompt + answer])).last_hidden_state[0]
                for place in range(len(answer) - 1):
                    path = model.get_input_embeddings()(torch.tensor(answer[place]))[None]
                    features = heads.features(1, states[len(prompt) - 1 + place], path)
                    hits += int((model.lm_head.weight @ features).argmax()) == answer[place + 1]
                    tried += 1
                text = tokenizer.decode(answer, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
    assert results.head_accuracy[1][0] == pytest.approx(hits / tried)
    assert 0 < hits < tried


def test_results_file_follows_the_schema_and_names_that_others_script_against(results, options):
    raw = json.loads((options.out / "results.json").read_text())
    jsonschema.validate(raw, json.loads(schema()))
    assert set(raw["speedup"]) == {"mean", "low", "high"}
    assert {"plain", "tree", "chain"} <= set(raw["tokens_per_second"])
    assert {"checked", "different"} <= set(raw["lossless"])
    assert list(raw["head_accuracy"]) == ["1", "2", "3", "5", "10"]
    assert all(len(row) == 3 for row in raw["head_accuracy"].values())
    names = "acceptance_length acceptance_rate machine versions command conversations step_cost by_intent"
    assert all(raw[name] for name in names.split())
    assert raw["step_cost"]["chosen"] == TREE.width
    assert raw["machine"]["cpu"]
    assert raw["checkpoint"]["provenance"]["command"] == ["train_heads.py"]
    assert "NaN" not in (options.out / "results.json").read_text()


def test_samples_spell_the_answers(results, small):
    assert len({sample.why for sample in results.samples}) == len(results.samples) > 0
    for sample in results.samples:
        text = "".join(piece.text for piece in sample.pieces)
        answers = [
            small.base.tokenizer.decode(turn.answers["tree"].token_ids, skip_special_tokens=True)
            for conversation in results.conversations
            if conversation.id == sample.conversation
            for turn in conversation.turns
        ]
        assert text in answers
        assert {piece.head for piece in sample.pieces} == {True, False}


def test_report_is_the_same_from_the_file_and_needs_no_network(results, options, tmp_path):
    written = (options.out / "report.html").read_text()
    assert render(load(options.out)) == written
    assert main(["report", str(options.out), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == written
    for word in ('src="http', "@import", "url(http", "<script", "<link", "nan", "NaN"):
        assert word not in written
    assert written.count("<svg") >= 8
    assert not any(colour in written for colour in COLOURS.values()), "a stand-in colour is left"
    ids = re.findall(r' id="([^"]+)"', written)
    assert len(ids) == len(set(ids)), "figures share element ids"


def test_nothing_but_the_three_files_is_left(results, options):
    assert {path.name for path in options.out.iterdir()} == {"results.json", "report.html", "summary.md"}


def test_a_wrong_commit_of_the_cache_fails_the_check(small, options, tmp_path, monkeypatch, capsys):
    broken = run(
        replace(options, out=tmp_path / "broken", repeats=1, peers="none"), engine_class=ForgetsToCommit
    )
    assert broken.lossless.not_allowed > 0
    assert {divergence.mode for divergence in broken.lossless.divergences} == {"tree"}
    first = broken.lossless.divergences[0]
    conversation = next(c for c in broken.conversations if c.id == first.conversation)
    answers = conversation.turns[first.turn].answers
    assert answers["plain"].token_ids[first.position] == first.plain != first.tree
    assert answers["plain"].token_ids[: first.position] == answers["tree"].token_ids[: first.position]
    assert "failed its losslessness check" in (tmp_path / "broken" / "report.html").read_text()
    monkeypatch.setattr(eval.run, "run", functools.partial(run, engine_class=ForgetsToCommit))
    assert main(arguments(small, tmp_path / "cli", "--limit", "6", "--max-new-tokens", str(TOKENS))) == 1
    assert "not the base's own" in capsys.readouterr().err


def test_a_wrong_commit_fails_in_bfloat16_too(options, tmp_path):
    again = replace(options, out=tmp_path, repeats=1, peers="none", dtype="bfloat16", max_new_tokens=40)
    assert run(again, engine_class=ForgetsToCommit).lossless.not_allowed > 0


def arguments(small, out, *more):
    given = {
        "--checkpoint": small.heads_folder,
        "--base": small.base_folder,
        "--data": small.data,
        "--out": out,
        "--dtype": "float32",
        "--max-new-tokens": 8,
        "--repeats": 1,
        "--limit": 3,
        "--peers": "none",
    }
    return ["run", *(str(word) for pair in given.items() for word in pair), *more]


def test_command_line_from_end_to_end(small, tmp_path, capsys):
    assert main(arguments(small, tmp_path / "run")) == 0
    shown = capsys.readouterr().out
    assert "speedup over plain" in shown
    assert f"report: {tmp_path / 'run' / 'report.html'}" in shown
    results = load(tmp_path / "run")
    assert (results.data.conversations, results.data.out_of) == (3, 6)
    assert str(tmp_path) not in (tmp_path / "run" / "results.json").read_text()
    assert main(["table", str(tmp_path / "run"), str(tmp_path / "run")]) == 0
    assert "acceptance length" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "absent.jsonl"], "no such file"),
        (["--checkpoint", "absent"], "not a heads checkpoint"),
        (["--peers", "gpt"], "choose auto, none"),
        (["--batch", "0"], "--batch"),
        (["--dtype", "int3"], "--dtype"),
        (["--device", "toaster"], "--device toaster cannot be used here"),
        (["--device", "meta"], "--device meta cannot be used here"),
        (["--peers", "vllm", "--vllm-url", "nonsense"], "--vllm-url nonsense is no address"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(small, tmp_path, capsys, more, message):
    assert main([*arguments(small, tmp_path / "run"), *more]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error


def test_a_report_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "results.json").write_text('{"format": 1, "speedup": 2}')
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 2
    assert "not a results file" in capsys.readouterr().err


def test_batches_of_unequal_turns(results, options, tmp_path):
    found = run(replace(options, out=tmp_path, batch=4, repeats=1, peers="auto"))
    assert [len(group.members) for group in found.groups] == [4, 2]
    assert found.lossless.different == 0
    assert not found.peers
    alone = {
        c.id: [turn.answers["plain"].token_ids for turn in c.turns] for c in load(options.out).conversations
    }
    for conversation in found.conversations:
        assert [turn.answers["tree"].token_ids for turn in conversation.turns] == alone[conversation.id]


def test_resume_goes_on_without_decoding_again(options, tmp_path, monkeypatch):
    decode, decoded = Decoder.decode, []

    def stops_after_two(self, rows, **more):
        if len(decoded) == 2:
            raise KeyboardInterrupt
        decoded.append([row["id"] for row in rows])
        return decode(self, rows, **more)

    quick = replace(options, out=tmp_path, repeats=1, peers="none")
    monkeypatch.setattr(Decoder, "decode", stops_after_two)
    with pytest.raises(KeyboardInterrupt):
        run(quick)
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished.jsonl"]
    kept = (tmp_path / "unfinished.jsonl").read_text().splitlines()
    assert len(kept) == 3

    def notes(self, rows, **more):
        decoded.append([row["id"] for row in rows])
        return decode(self, rows, **more)

    monkeypatch.setattr(Decoder, "decode", notes)
    results = run(replace(quick, resume=True))
    assert sorted(name for group in decoded for name in group) == sorted(c.id for c in results.conversations)
    first = json.loads(kept[1])["conversations"][0]
    assert results.conversations[0].model_dump(mode="json") == first


def test_parallel_heads_as_well(small, options, tmp_path):
    make_heads(tmp_path / "medusa", small.base, kind="medusa")
    found = run(
        replace(options, checkpoint=tmp_path / "medusa", out=tmp_path / "out", repeats=1, peers="none")
    )
    assert found.checkpoint.heads["kind"] == "medusa"
    assert found.lossless.different == 0
    assert found.acceptance_length > 1


def test_conversations_without_room_are_left_out_and_named(small, options, tmp_path):
    rows = [
        {"id": "long", "messages": [{"role": "user", "content": "x" * 600}]},
        {"id": "short", "messages": [{"role": "user", "content": "hi"}]},
    ]
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run(replace(options, data=str(data), out=tmp_path / "out", repeats=1, peers="none"))
    assert found.data.left_out == ["long"]
    assert [conversation.id for conversation in found.conversations] == ["short"]
    data.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(MedusaError, match="no prompt leaves room"):
        run(replace(options, data=str(data), out=tmp_path / "out", repeats=1, peers="none"))


def test_a_tree_that_is_plain_decoding_draws_a_report_too(small, options, tmp_path):
    (tmp_path / "tree.json").write_text('{"paths": []}')
    tree = tmp_path / "tree.json"
    found = run(replace(options, tree=tree, out=tmp_path / "out", repeats=1, peers="none", limit=1))
    assert (found.tree.width, found.acceptance_length, found.acceptance_rate) == (1, 1.0, [])
    assert found.chain.depth == 3
    assert found.chain.acceptance_length > 1
    assert found.speedup.low == found.speedup.mean == found.speedup.high
