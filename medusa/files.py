"""Files that are either the old one or the new one, never a mix.

Everything the kit saves goes to a temporary name in the same folder, is flushed to the disk, and is renamed.
A full disk, a SIGTERM or a power cut in the middle leaves what was there before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa.errors import MedusaError

_HASH_CHUNK = 1 << 20  # bytes read at a time
_FULL = 1 << 20  # with fewer bytes left than this, a failed write failed for want of space
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_WRONG_PLACE = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
)


def medusa_home() -> Path:
    """The cache folder: `$MEDUSA_HOME`, by default `~/.cache/medusa`."""
    return Path(os.environ.get("MEDUSA_HOME") or Path.home() / ".cache" / "medusa").expanduser()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


@contextlib.contextmanager
def clear_os_errors(path: str | os.PathLike) -> Iterator[None]:
    """Around whatever writes `path`: what the system refuses becomes an error that says what to do.

    Raises:
        MedusaError: the disk is full, the place cannot be written, or a file is where a folder should be.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            remedy = "free space or choose another folder"
        elif error.errno in _WRONG_PLACE:
            remedy = "choose another place"
        else:
            raise
        at = error.filename
        # The obstacle is often a folder above; a temporary name says nothing to anyone.
        culprit = f"{at}: " if isinstance(at, str | os.PathLike) and Path(at) in Path(path).parents else ""
        raise MedusaError(f"cannot write {path}: {culprit}{error.strerror}; {remedy}") from error


@contextlib.contextmanager
def _library_errors(folder: Path) -> Iterator[None]:
    """Makes OSErrors of what safetensors and torch.save raise when the system refuses a write.

    safetensors says "os error 28"; torch's zip writer says only that it failed, so the disk is asked.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        found = re.search(r"os error (\d+)", text) if type(error).__name__ == "SafetensorError" else None
        number = int(found[1]) if found else None
        if isinstance(error, RuntimeError) and re.search("inline_container|PytorchStreamWriter", text):
            number = errno.ENOSPC if shutil.disk_usage(folder).free < _FULL else None
        if number is None:
            raise
        raise OSError(number, os.strerror(number)) from error


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary file's path; when the block ends well, it becomes `path`. On any error it is removed.

    Raises:
        MedusaError: the disk is full, the folder cannot be written, or `path` is a folder, a device or a pipe.
    """
    path = Path(path)
    with clear_os_errors(path):
        if path.exists() and not path.is_file():
            raise MedusaError(f"{path} is not a regular file; name another one")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        try:
            temporary.touch()
            allowed = temporary.stat().st_mode
            with _library_errors(path.parent):
                yield temporary
            _open_up(temporary, allowed)
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _open_up(file: Path, allowed: int) -> None:
    """Gives a file the permissions that the umask allows: safetensors makes its files the owner's alone."""
    mode = file.stat().st_mode
    if mode | (allowed & 0o666) != mode:
        file.chmod(mode | (allowed & 0o666))


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two folders in one system call where the kernel can (Linux renameat2 with RENAME_EXCHANGE)."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, rename_exchange = -100, 2
    try:
        return libc.renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0
    except AttributeError:  # a C library older than glibc 2.28
        return False


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a new temporary folder; when the block ends well, it becomes `path`, replacing what was there.

    Raises:
        MedusaError: the disk is full, the parent folder cannot be written, or `path` is not a folder.
    """
    path = Path(path)
    with clear_os_errors(path):
        if path.exists() and not path.is_dir():
            raise MedusaError(f"{path} is a file, not a folder; name another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        temporary.mkdir()
        try:
            allowed = temporary.stat().st_mode
            with _library_errors(path.parent):
                yield temporary
            for file in temporary.rglob("*"):
                if file.is_file() and not file.is_symlink():
                    _open_up(file, allowed)
                _sync(file)
            _sync(temporary)
            if not path.exists():
                os.rename(temporary, path)
            elif not _exchange(temporary, path):
                old = _temporary(path)
                os.rename(path, old)
                os.rename(temporary, path)
                shutil.rmtree(old, ignore_errors=True)
            _sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, atomically. NaN and infinities are refused: they are not JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file.

    Raises:
        MedusaError: there is no such file, or it is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MedusaError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise MedusaError(f"{path} is not valid JSON ({error}); was it cut short? Write it again") from error


def sha256_file(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes, as hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON (sorted keys, no spaces), as hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
