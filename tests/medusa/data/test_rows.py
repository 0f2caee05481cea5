from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa.data.rows import RowFile, parse_rows
from medusa.errors import MedusaError

MADE = {"fingerprint": {"base": "b"}, "sampling": {"seed": 0, "temperature": [0.7, 1.0]}}


def test_rows_are_there_when_it_is_opened_again(tmp_path: Path) -> None:
    with RowFile(tmp_path / "deep" / "a.jsonl", MADE) as file:
        file.append({"id": "1", "text": "ünï 🛒\n"})
        assert json.loads(file.path.read_text()) == file.rows[0]  # before it is closed
    with RowFile(file.path, MADE) as again:
        assert again.rows == [{"id": "1", "text": "ünï 🛒\n"}]
        again.append({"id": "2"})
    assert [json.loads(line)["id"] for line in file.path.read_text().splitlines()] == ["1", "2"]


@given(st.integers(min_value=0))
def test_whatever_byte_it_was_cut_at_whole_rows_stay(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        rows = [{"id": str(i), "text": "é" * i} for i in range(4)]
        with RowFile(path, MADE) as file:
            for row in rows:
                file.append(row)
        whole = path.read_bytes()
        cut %= len(whole) + 1
        path.write_bytes(whole[:cut])
        with RowFile(path, MADE) as file:
            assert file.rows == rows[: whole[:cut].count(b"\n")]
            file.append({"id": "new"})
        with RowFile(path, MADE) as file:
            assert file.rows == [*rows[: whole[:cut].count(b"\n")], {"id": "new"}]


def test_other_settings_are_an_error_that_names_them(tmp_path: Path) -> None:
    with RowFile(tmp_path / "a.jsonl", MADE):
        pass
    other = {**MADE, "sampling": {**MADE["sampling"], "seed": 1}}
    with pytest.raises(MedusaError, match="seed: 0 there, 1 now"):
        RowFile(tmp_path / "a.jsonl", other)


def test_a_file_of_unknown_origin_is_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(MedusaError, match=r"no a\.jsonl\.manifest\.json"):
        RowFile(tmp_path / "a.jsonl", MADE)
    assert (tmp_path / "a.jsonl").read_text() == '{"id": "1"}\n'


@pytest.mark.parametrize(
    "line", ["{", "[]", "5", '{"text": "no id"}', '{"id": 5}', "[" * 100_000], ids=range(6)
)
def test_a_whole_line_that_is_no_row_is_an_error(tmp_path: Path, line: str) -> None:
    with RowFile(tmp_path / "a.jsonl", MADE) as file:
        file.append({"id": "1"})
    with open(file.path, "a") as raw:
        raw.write(line + "\n")
    with pytest.raises(MedusaError, match=r"a\.jsonl:2"):
        RowFile(file.path, MADE)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import sys, json; from medusa.data.rows import RowFile; from medusa.errors import MedusaError\n"
        "try: RowFile(sys.argv[1], json.loads(sys.argv[2]))\n"
        "except MedusaError as error: print(error)\n"
    )
    words = [sys.executable, "-c", code, str(path), json.dumps(MADE)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with RowFile(path, MADE):
        said = subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout
        assert "another process is writing" in said
    assert not subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout


@pytest.mark.skipif(
    not Path("/dev/full").is_char_device(), reason="only Linux has a device that is always full"
)
def test_a_full_disk_is_one_clear_error_and_the_rows_before_stay(tmp_path: Path) -> None:
    with RowFile(tmp_path / "a.jsonl", MADE) as file:
        file.append({"id": "1"})
        whole, file._file = file._file, open("/dev/full", "ab", buffering=0)
        try:
            with pytest.raises(MedusaError, match=r"a\.jsonl: No space left on device; free space"):
                file.append({"id": "2"})
        finally:
            file._file.close()
            file._file = whole
    with RowFile(tmp_path / "a.jsonl", MADE) as file:
        assert file.rows == [{"id": "1"}]


def test_a_place_that_cannot_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MedusaError, match=r"cannot write .*a\.jsonl: .*file: .*; choose another place"):
        RowFile(tmp_path / "file" / "a.jsonl", MADE)


@pytest.mark.parametrize("messages", [5, [5], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_messages_that_are_none_are_named_by_their_line(messages: object) -> None:
    content = json.dumps({"id": "1", "messages": messages}).encode() + b"\n"
    with pytest.raises(MedusaError, match=r"a\.jsonl:1 .*list of roles and contents.*mend that line"):
        parse_rows(content, Path("a.jsonl"), ("id", "messages"))


def test_a_manifest_of_something_else_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.manifest.json").write_text("[]")
    with pytest.raises(MedusaError, match=r"a\.jsonl\.manifest\.json is not a manifest"):
        RowFile(tmp_path / "a.jsonl", MADE)
