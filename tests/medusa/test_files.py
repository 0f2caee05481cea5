import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

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


def test_what_is_not_a_regular_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(MedusaError, match=f"{name} is not a regular file; name another"):
            write_json(tmp_path / name, {})
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_json(tmp_path / "link", {})
    with pytest.raises(MedusaError, match="file is a file, not a folder; name another"):
        with atomic_folder(tmp_path / "file"):
            raise AssertionError("it was begun")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link", "pipe"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_file_where_a_folder_should_be_is_named(tmp_path):
    (tmp_path / "file").write_text("old")
    for path in (tmp_path / "file" / "x", tmp_path / "file" / "deep" / "x"):
        with pytest.raises(MedusaError, match=r"cannot write .*/x: .*/file\S*: .*; choose another place"):
            write_json(path, {})
    with pytest.raises(MedusaError, match="name too long; choose another place"):
        write_json(tmp_path / ("x" * 300), {})


def test_files_have_the_permissions_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "a") as temporary:
            save_file({"x": torch.zeros(1)}, temporary)
        with atomic_folder(tmp_path / "b") as temporary:
            save_file({"x": torch.zeros(1)}, temporary / "c")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "b/c")] == [0o640] * 2


def test_a_full_disk_below_safetensors_and_torch_says_so(tmp_path):
    """A real file-size limit makes both fail half way; only the kind of the failure is set by hand."""
    program = textwrap.dedent(
        """
        import resource, signal, sys, torch
        from safetensors.torch import save_file
        from medusa import files
        from medusa.errors import MedusaError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        values = {"x": torch.zeros(100_000)}
        def attempt(writer, save):
            try:
                with writer(sys.argv[1]) as temporary:
                    save(values, temporary if writer is files.atomic_file else temporary / "x")
            except (MedusaError, OSError, RuntimeError) as error:
                print(type(error).__name__, getattr(error, "errno", ""), error)
        attempt(files.atomic_file, save_file)
        attempt(files.atomic_file, torch.save)  # the disk has room: it is something else
        files._FULL = 1 << 62
        attempt(files.atomic_file, torch.save)
        attempt(files.atomic_folder, torch.save)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("Med", "OSE", "Run"))]
    assert lines[0].startswith(f"OSError {errno.EFBIG} ")  # safetensors' own error carries the system's
    assert lines[1].startswith("RuntimeError")
    full = f"MedusaError  cannot write {tmp_path / 'x'}: No space left on device; free space"
    assert [line[: len(full)] for line in lines[2:]] == [full, full]
    assert not list(tmp_path.iterdir())
    words = "Error while serializing: I/O error: No space left on device (os error 28)"
    with pytest.raises(MedusaError, match="No space left on device; free space"), atomic_file(tmp_path / "x"):
        raise SafetensorError(words)


def test_json_that_is_nested_too_deeply_is_an_error(tmp_path):
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(MedusaError, match="not valid JSON"):
        read_json(tmp_path / "x.json")
