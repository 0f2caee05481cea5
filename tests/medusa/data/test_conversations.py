from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
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
    {"messages": [{"role": ["user"], "content": "hi"}]},
    {"conversations": [{"from": {}, "value": "hi"}]},
    {"prompt": "half a character: \ud83d"},
    {"prompt": "hi", "id": "\udc00"},
    {"prompt": "hi", "note": {"deep": ["\ud800"]}},
    "[" * 100_000,
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
        pytest.param("a.json", b"[" * 100_000, "not valid JSON", id="deep"),
        ("a.json", b'["\xff"]', "not valid JSON"),
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


def test_a_line_that_is_not_utf_8_is_a_malformed_row(tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(good * 2 + b'{"prompt": "caf\xe9"}\n' + good)
    said: list[str] = []
    assert len(load_conversations(tmp_path / "a.jsonl", max_bad=1, log=said.append)) == 3
    assert said[0].startswith(f"{tmp_path / 'a.jsonl'}:line 3: not UTF-8: ")


def test_characters_that_only_look_like_line_ends_stay_in_their_row(tmp_path: Path) -> None:
    text = "a\u2028b\x85c"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert load_conversations(path)[0]["messages"][0]["content"] == text


def test_parquet_fields_that_json_has_not_become_text_or_go(tmp_path: Path) -> None:
    when = datetime.datetime(2024, 5, 6, 7, 8, 9)
    values = [
        {
            "prompt": "hi",
            "at": when,
            "day": when.date(),
            "took": datetime.timedelta(seconds=90),
            "price": Decimal("1.50"),
            "raw": b"\xff",
            "nested": {"at": [when], "raw": b"\xff", "n": 1},
        }
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "a.parquet")
    (row,) = load_conversations(tmp_path / "a.parquet")
    assert (row["at"], row["day"]) == ("2024-05-06T07:08:09", "2024-05-06")
    assert (row["took"], row["price"]) == ("0:01:30", "1.50")
    assert row["nested"] == {"at": ["2024-05-06T07:08:09"], "n": 1}
    assert "raw" not in row
    assert json.loads(json.dumps(row)) == row


def test_a_parquet_file_without_rows_says_so(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": "hi"}])
    pyarrow.parquet.write_table(table.slice(1), tmp_path / "a.parquet")
    with pytest.raises(MedusaError, match="holds no rows"):
        load_conversations(tmp_path / "a.parquet")


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
