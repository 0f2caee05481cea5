"""Files that other programs made, opened with care: nothing in them is run, and what cannot be read says why."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch

from medusa.errors import MedusaError
from medusa.files import read_json

CONFIG = "config.json"
PICKLES = (".pt", ".pth", ".bin")
INDEX = ".index.json"


def read_tensors(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """The tensors of one file, on the CPU, in the file's dtypes.

    Args:
        path: safetensors, or what `torch.save` made of a dict of tensors.
        wanted: says of a name whether to read it.

    Raises:
        MedusaError: there is no such file; it is cut short; it holds anything but named tensors.
    """
    if not path.is_file():
        raise MedusaError(f"{path}: no such file; was the folder copied whole?")
    if path.suffix in PICKLES:
        return {name: tensor for name, tensor in _unpickled(path).items() if wanted(name)}
    with _safe_open(path) as file:
        found = {name: file.get_tensor(name) for name in file.keys() if wanted(name)}
        # safetensors.torch.save_model keeps one of the names of a shared tensor; the metadata says which.
        kept = {name: same for name, same in (file.metadata() or {}).items() if wanted(name)}
    return found | {name: found[same] for name, same in kept.items() if same in found}


def names_in(path: Path) -> set[str]:
    """The names of a file's tensors, of safetensors without reading them. Raises what `read_tensors` raises."""
    if path.suffix in PICKLES:
        return set(_unpickled(path))
    with _safe_open(path) as file:
        return set(file.keys())


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle's version, before the error that matters
            # weights_only: a pickle is a program; this runs none of it. mmap: a file can be larger than memory.
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except Exception as error:  # whatever unpickling garbage raises
        # An operand: later versions of pickle ask for a function by ones that torch.save never writes.
        if re.search(r"(?i)unsupported (global|class|operand)|allowed global|call reduce", str(error)):
            raise MedusaError(
                f"{path} is no plain file of tensors: it holds Python objects, which could run a program, or is "
                "damaged; it was not loaded. Save its tensors as safetensors where you trust it"
            ) from error
        raise MedusaError(f"{path} cannot be read; was it cut short? Copy it again") from error
    named = isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    )
    if not named:
        raise MedusaError(f"{path} is not a dict of tensors; give the file that holds a state dict")
    return value


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _safe_open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise MedusaError(f"{path} cannot be read ({error}); was it cut short? Copy it again") from error


@dataclass(frozen=True)
class Source:
    """A folder, or one file in a folder, with heads in it that a format's reader takes apart.

    Attributes:
        path: as given.
        folder: itself, or where the file lies.
        file: the file, if one was given.
        config: what `config.json` holds; empty if there is none.
    """

    path: Path
    folder: Path
    file: Path | None
    config: dict[str, Any]

    @classmethod
    def open(cls, path: str | os.PathLike) -> Source:
        """Raises MedusaError: there is nothing there, or config.json is not a JSON object."""
        path = Path(path)
        if not path.exists():
            raise MedusaError(f"{path}: no such file or folder")
        weights = path.suffix in (*PICKLES, ".safetensors")
        if path.is_file() and not weights and path.suffix != ".json":
            raise MedusaError(f"{path} holds no heads; give a folder, a .pt file or a .safetensors file")
        folder = path if path.is_dir() else path.parent
        config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        if not isinstance(config, dict):
            raise MedusaError(f"{folder / CONFIG} is not a JSON object")
        return cls(path, folder, path if path.is_file() and weights else None, config)

    def files(self, *names: str) -> list[Path]:
        """The file that was given; else the first of these names that is there; an empty list if none is."""
        if self.file is not None:
            return [self.file]
        return [self.folder / name for name in names if (self.folder / name).is_file()][:1]

    @cached_property
    def shards(self) -> list[Path]:
        """The weight files of a model in the Hugging Face layout.

        Raises:
            MedusaError: the index names a file that is not there, or outside the folder.
        """
        if self.file is not None:
            return [self.file]
        for stem, ending in (("model", "safetensors"), ("pytorch_model", "bin")):
            index = self.folder / f"{stem}.{ending}{INDEX}"
            if index.is_file():
                return list(self._indexed(index))
            if (self.folder / f"{stem}.{ending}").is_file():
                return [self.folder / f"{stem}.{ending}"]
        return []

    def _indexed(self, index: Path) -> Iterator[Path]:
        found = read_json(index)
        weights = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            raise MedusaError(f"{index} has no weight_map; copy the model again")
        for name in sorted(set(weights.values())):
            if Path(name).name != name or not (self.folder / name).is_file():
                raise MedusaError(
                    f"{index} names {name}, which is not in {self.folder}; copy the model whole"
                )
            yield self.folder / name

    def names(self) -> set[str]:
        """The names of all tensors in `shards`."""
        return set().union(*(names_in(file) for file in self.shards))

    def tensors(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
        """The wanted tensors of all `shards`."""
        return {name: tensor for file in self.shards for name, tensor in read_tensors(file, wanted).items()}

    def number(self, name: str, values: dict[str, Any] | None = None) -> int | None:
        """A whole number of the configuration; None if it is not there.

        Raises:
            MedusaError: it is something else.
        """
        value = (self.config if values is None else values).get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise MedusaError(f"{self.folder / CONFIG}: {name} must be a whole number, not {value!r}")
        return value

    def text(self, name: str) -> str | None:
        """A text of the configuration; None if it is not there or is something else."""
        value = self.config.get(name)
        return value if isinstance(value, str) and value else None


def fresh_folder(path: str | os.PathLike) -> Path:
    """A folder to write: not there yet, or empty.

    Raises:
        MedusaError: something is in it, or it is a file.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise MedusaError(f"{path} is there already and is not an empty folder; name another one")
    return path
