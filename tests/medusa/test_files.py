import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from medusa.errors import MedusaError
from medusa.files import (
    atomic_file,
    atomic_folder,
    medusa_home,
    read_json,
    sha256_file,
    sha256_json,
    write_json,
)


def test_json_round_trip_leaves_no_temporary_file(tmp_path):
    write_json(tmp_path / "a" / "x.json", {"b": [1, "é"]})
    assert read_json(tmp_path / "a" / "x.json") == {"b": [1, "é"]}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x.json"]


def test_an_error_in_the_block_leaves_the_old_file(tmp_path):
    file = tmp_path / "x"
    file.write_text("old")
    with pytest.raises(RuntimeError), atomic_file(file) as temporary:
        temporary.write_text("new")
        raise RuntimeError
    assert file.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_error_in_the_block_leaves_the_old_folder(tmp_path):
    folder = tmp_path / "checkpoint"
    with atomic_folder(folder) as temporary:
        (temporary / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(folder) as temporary:
        (temporary / "b").write_text("new")
        raise RuntimeError
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_replaced_whole(tmp_path):
    folder = tmp_path / "checkpoint"
    for name in ("a", "b"):
        with atomic_folder(folder) as temporary:
            (temporary / name).write_text(name)
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert len(list(tmp_path.iterdir())) == 1


def test_nan_is_not_json(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", float("nan"))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "cut.json").write_text('{"a": ')
    with pytest.raises(MedusaError, match="cut.json is not valid JSON"):
        read_json(tmp_path / "cut.json")
    with pytest.raises(MedusaError, match="cannot read .*absent.json"):
        read_json(tmp_path / "absent.json")


def test_a_full_disk_is_one_clear_error_and_nothing_is_lost(tmp_path):
    """A real file-size limit stands for the full disk: the write fails half way."""
    program = textwrap.dedent(
        """
        import resource, signal, sys
        from medusa.files import atomic_file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with atomic_file(sys.argv[1]) as temporary:
                temporary.write_bytes(bytes(5000))
        except OSError as error:
            print("failed", error.errno)
        """
    )
    file = tmp_path / "x"
    file.write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True
    )
    assert "failed" in done.stdout
    assert file.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_no_space_says_so(tmp_path):
    with pytest.raises(MedusaError, match="free space"), atomic_file(tmp_path / "x"):
        raise OSError(28, "No space left on device")


def test_kill_in_the_middle_leaves_one_whole_file(tmp_path):
    program = textwrap.dedent(
        """
        import sys
        from medusa.files import write_json
        n = 0
        while True:
            write_json(sys.argv[1], [n] * 20000)
            n += 1
            print(n, flush=True)
        """
    )
    file = tmp_path / "x.json"
    child = subprocess.Popen([sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE)
    child.stdout.readline()
    time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    value = read_json(file)
    assert len(value) == 20000 and len(set(value)) == 1


def test_hashes():
    assert sha256_json({"b": 1, "a": 2}) == sha256_json({"a": 2, "b": 1}) != sha256_json({"a": 1, "b": 2})


def test_file_hash(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x").startswith("ba7816bf8f01cfea")


def test_home_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path))
    assert medusa_home() == tmp_path
