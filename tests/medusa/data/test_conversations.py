from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from medusa.data.conversations import data_fingerprint, load_conversations
from medusa.errors import MedusaError

GOOD = {"id": "a", "messages": [{"role": "user", "content": "hi"}], "source": "grammar", "turns": 1}


def jsonl(path: Path, *values: object) -> Path:
    lines = [value if isinstance(value, str) else json.dumps(value) for value in values]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_three_shapes_become_one(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "mine.jsonl",
        GOOD,
        {
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
            "system": "Be kind.",
        },
        {"prompt": "which kettle?", "category": "kettle"},
        {"question_id": 81, "turns": ["one", "two"]},
        "",
    )
    rows = load_conversations(path)
    labels = {"source": None, "category": None, "intent": None}
    assert rows[0] == {**labels, **GOOD}
    assert rows[1] == {
        **labels,
        "id": "mine:2",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
        ],
    }
    assert rows[2] == {
        **labels,
        "id": "mine:3",
        "category": "kettle",
        "messages": [{"role": "user", "content": "which kettle?"}],
    }
    assert [m["content"] for m in rows[3]["messages"]] == ["one", "two"]
    assert rows[3]["id"] == "81"


def test_json_and_parquet_say_the_same_as_jsonl(tmp_path: Path) -> None:
    values = [GOOD | {"id": str(i)} for i in range(5)]
    expected = load_conversations(jsonl(tmp_path / "a.jsonl", *values))
    (tmp_path / "a.json").write_text(json.dumps(values))
    Dataset.from_list(values).to_parquet(tmp_path / "a.parquet")
    assert load_conversations(tmp_path / "a.json") == load_conversations(tmp_path / "a.parquet") == expected
    assert load_conversations([tmp_path / "a.json", tmp_path / "a.jsonl"], limit=7) == expected + expected[:2]


BAD = [
    '{"messages": [',
    [1, 2],
    {"text": "no turns"},
    {"messages": "hi"},
    {"messages": []},
    {"messages": ["hi"]},
    {"messages": [{"role": "robot", "content": "hi"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": " "}]},
    {"messages": [{"role": "assistant", "content": "hi"}]},
    {"messages": [{"role": "system", "content": "hi"}]},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": "late"}]},
    {"messages": [{"role": r, "content": "hi"} for r in ("user", "assistant", "assistant")]},
    {"messages": [{"role": "user", "content": "hi"}], "finish": ["stop"]},
    {"messages": [{"role": r, "content": "hi"} for r in ("user", "assistant")], "finish": ["ended"]},
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_malformed_row_is_named_by_its_line_and_counted(tmp_path: Path, bad: object) -> None:
    path = jsonl(tmp_path / "mine.jsonl", *[GOOD] * 6, bad, *[GOOD] * 193)
    said: list[str] = []
    assert len(load_conversations(path, log=said.append)) == 199
    assert said[0].startswith(f"{path}:line 7: ")
    assert said[1].startswith("1 of 200 rows are malformed")
    with pytest.raises(MedusaError, match="1 of 200 rows are malformed"):
        load_conversations(path, max_bad=0.004, log=said.append)


def test_over_one_percent_is_an_error_and_one_percent_is_not(tmp_path: Path) -> None:
    quiet = [].append
    exactly = jsonl(tmp_path / "a.jsonl", "{", *[GOOD] * 99)
    assert len(load_conversations(exactly, log=quiet)) == 99
    over = jsonl(tmp_path / "b.jsonl", "{", *[GOOD] * 98)
    with pytest.raises(MedusaError, match="repair the file"):
        load_conversations(over, log=quiet)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", "no rows"),
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"{}", "list of conversations"),
        ("a.parquet", b"not parquet at all", "not a readable parquet file"),
        ("a.csv", b"a,b", r"\.jsonl, \.ndjson"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MedusaError, match=words):
        load_conversations(tmp_path / name)
    with pytest.raises(MedusaError, match="no file at"):
        load_conversations(tmp_path / "absent.jsonl")


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_no_row_however_odd_crashes_it(value: object) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for row in (
            value,
            {"messages": value},
            {"conversations": [value]},
            {"turns": value},
            {"messages": [], "x": value},
        ):
            path = jsonl(Path(folder) / "a.jsonl", *[GOOD] * 2, json.dumps(row))
            assert len(load_conversations(path, max_bad=1, log=[].append)) in (2, 3)


def test_the_data_fingerprint_is_that_of_what_was_said() -> None:
    rows = [{**GOOD, "finish": None}, {**GOOD, "messages": [{"role": "user", "content": "bye"}]}]
    before = data_fingerprint(rows)
    assert data_fingerprint([{**row, "category": "kettle", "id": "z"} for row in rows]) == before
    assert data_fingerprint(rows[::-1]) != before
    assert data_fingerprint([rows[0], {**rows[1], "finish": ["stop"]}]) != before
