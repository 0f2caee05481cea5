import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.prompts import balanced, load_prompts
from medusa.errors import MedusaError


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions():
    return [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        {"question_id": 201, "category": "rag", "turns": ["Find it."], "reference": ["x"]},
    ]


def test_spec_bench_first_turns_by_default(tmp_path):
    found = load_prompts(write_lines(tmp_path / "question.jsonl", questions()))
    assert found.data.kind == "spec-bench"
    assert [row["messages"] for row in found.rows] == [
        [{"role": "user", "content": "Write."}],
        [{"role": "user", "content": "Find it."}],
    ]
    assert [row["category"] for row in found.rows] == ["writing", "rag"]
    assert [row["intent"] for row in found.rows] == ["mt_bench", "rag"]
    assert [row["id"] for row in found.rows] == ["81", "201"]


def test_spec_bench_all_turns_when_asked(tmp_path):
    found = load_prompts(write_lines(tmp_path / "question.jsonl", questions()), turns="all")
    assert [len(row["messages"]) for row in found.rows] == [2, 1]
    assert found.data.turns == 3


def test_a_broken_spec_bench_line_is_named(tmp_path):
    file = write_lines(tmp_path / "question.jsonl", [*questions(), {"question_id": 3, "category": "rag"}])
    with pytest.raises(MedusaError, match="line 3"):
        load_prompts(file)


def test_answers_in_a_file_are_dropped(tmp_path):
    talk = {
        "id": "a",
        "source": "mine",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Stale."},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "Stale too."},
        ],
    }
    found = load_prompts(write_lines(tmp_path / "talks.jsonl", [talk]))
    assert [message["content"] for message in found.rows[0]["messages"]] == ["Be kind.", "One?", "Two?"]
    assert found.data.turns == 2
    first = load_prompts(write_lines(tmp_path / "talks.jsonl", [talk]), turns="first")
    assert [message["content"] for message in first.rows[0]["messages"]] == ["Be kind.", "One?"]


def test_nothing_to_decode_and_no_file_are_errors(tmp_path):
    with pytest.raises(MedusaError, match="no such file"):
        load_prompts(str(tmp_path / "absent.jsonl"))
    with pytest.raises(MedusaError, match="limit"):
        load_prompts(write_lines(tmp_path / "question.jsonl", questions()), limit=0)


def test_fingerprint_is_of_the_whole_file_not_of_the_subset(tmp_path):
    file = write_lines(tmp_path / "question.jsonl", questions())
    assert load_prompts(file, limit=1).data.fingerprint == load_prompts(file).data.fingerprint
    other = write_lines(tmp_path / "other.jsonl", questions()[:1])
    assert load_prompts(other).data.fingerprint != load_prompts(file).data.fingerprint


def make_rows(spec):
    return [
        {"id": str(number), "source": source, "intent": intent, "category": category}
        for number, (source, intent, category) in enumerate(spec)
    ]


def test_subset_is_balanced_not_the_first_ones():
    grammar = [("grammar", f"intent {n // 8}", f"category {n % 4}") for n in range(80)]
    rows = make_rows(grammar + [("magpie", None, None)] * 40)
    chosen = balanced(rows, 30, seed=0)
    assert Counter(row["source"] for row in chosen) == {"grammar": 20, "magpie": 10}
    grammar = [row for row in chosen if row["source"] == "grammar"]
    assert set(Counter(row["intent"] for row in grammar).values()) == {2}
    # Two of one intent are of two categories.
    assert all(n == 1 for n in Counter((row["intent"], row["category"]) for row in grammar).values())


def test_a_small_source_is_not_forgotten():
    rows = make_rows([("big", "a", None)] * 99 + [("small", "b", None)])
    assert {row["source"] for row in balanced(rows, 3, seed=0)} == {"big", "small"}


label = st.sampled_from(["a", "b", "c", None])


@given(
    st.lists(st.tuples(label, label, label), min_size=1, max_size=60), st.integers(1, 70), st.integers(0, 3)
)
def test_subset_has_the_size_asked_for_in_order_and_repeats(spec, limit, seed):
    rows = make_rows(spec)
    chosen = balanced(rows, limit, seed)
    assert len(chosen) == min(limit, len(rows))
    numbers = [int(row["id"]) for row in chosen]
    assert numbers == sorted(set(numbers))
    assert balanced(rows, limit, seed) == chosen
    # No intent of a source is there twice more often than another that still had rows left.
    for source in {row["source"] for row in rows}:
        total = Counter(row["intent"] for row in rows if row["source"] == source)
        taken = Counter(row["intent"] for row in chosen if row["source"] == source)
        for intent, count in taken.items():
            assert all(taken[other] >= min(count - 1, total[other]) for other in total), intent
