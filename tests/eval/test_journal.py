import pytest

from eval.journal import Entry, Journal
from medusa.errors import MedusaError

SETTINGS = {"dtype": "float32", "tree": ((0,), (0, 0)), "repeats": 3}


def entry(number):
    return Entry(rows=[number], conversations=[], seconds={"plain": [0.5, 0.25]}, divergences=[])


def write(path, count):
    journal = Journal(path, SETTINGS, resume=False)
    for number in range(count):
        journal.add(entry(number))
    journal.close()


def test_what_was_added_is_there_again(tmp_path):
    write(tmp_path / "unfinished.jsonl", 3)
    journal = Journal(tmp_path / "unfinished.jsonl", SETTINGS, resume=True)
    assert journal.entries == [entry(0), entry(1), entry(2)]
    journal.add(entry(3))
    journal.close()
    again = Journal(tmp_path / "unfinished.jsonl", SETTINGS, resume=True)
    assert again.entries[-1] == entry(3)
    again.remove()
    assert not list(tmp_path.iterdir())


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    path = tmp_path / "unfinished.jsonl"
    write(path, 3)
    path.write_text(path.read_text()[:-20])
    journal = Journal(path, SETTINGS, resume=True)
    assert journal.entries == [entry(0), entry(1)]
    journal.add(entry(2))
    journal.close()
    assert Journal(path, SETTINGS, resume=True).entries == [entry(0), entry(1), entry(2)]


def test_other_settings_are_named_not_mixed(tmp_path):
    path = tmp_path / "unfinished.jsonl"
    write(path, 1)
    with pytest.raises(MedusaError, match="another repeats;"):
        Journal(path, {**SETTINGS, "repeats": 5}, resume=True)
    assert Journal(path, SETTINGS, resume=True).entries == [entry(0)], "a refused resume changes nothing"


def test_without_resume_it_starts_anew(tmp_path):
    path = tmp_path / "unfinished.jsonl"
    write(path, 2)
    assert Journal(path, SETTINGS, resume=False).entries == []


def test_resume_with_nothing_there_just_starts(tmp_path):
    assert Journal(tmp_path / "new" / "unfinished.jsonl", SETTINGS, resume=True).entries == []


def test_characters_that_end_lines_elsewhere_do_not_here(tmp_path):
    path = tmp_path / "unfinished.jsonl"
    odd = {**SETTINGS, "data": "a\u2028b\x85c\x0bd"}
    Journal(path, odd, resume=False).add(entry(0))
    assert Journal(path, odd, resume=True).entries == [entry(0)]


@pytest.mark.parametrize("content", [b"[]\n", b"5\n", b"\xff\xfe\n"])
def test_a_file_of_something_else_starts_anew(tmp_path, content):
    (tmp_path / "unfinished.jsonl").write_bytes(content)
    assert Journal(tmp_path / "unfinished.jsonl", SETTINGS, resume=True).entries == []
