"""The formats by name, and the ways in and out. Another format is one module here and one line in `FORMATS`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa.base import Base, load_base, open_base
from medusa.checkpoint import FORMAT, PROVENANCE, WEIGHTS, load_checkpoint, save_checkpoint
from medusa.errors import MedusaError
from medusa.export import medusa, nxdi, speculators, trtllm, vllm_heads
from medusa.export.foreign import Foreign, check_kind, to_heads
from medusa.export.sources import Source, fresh_folder
from medusa.export.vllm import export_vllm
from medusa.files import atomic_folder, read_json, sha256_file
from medusa.provenance import collect
from medusa.tree import Tree

BASE = "base"  # where the base of a merged model goes, inside the checkpoint


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        what: in words.
        recognises: whether a source is of this format; it may be anything.
        read: takes a source apart; MedusaError says what is wrong with it.
        write: checkpoint, new folder, loaded base -> the folder.
        whole_vocabulary: whether LM heads are written for all tokens; see `foreign.from_checkpoint`.
    """

    what: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Foreign]
    write: Callable[[str | os.PathLike, str | os.PathLike, Base], Path]
    whole_vocabulary: bool = True


# In the order in which they are recognised: Medusa's names are the least specific.
FORMATS = {
    "speculators": Format(
        "vLLM's speculators", speculators.recognises, speculators.read, speculators.export, False
    ),
    "vllm": Format("vLLM", vllm_heads.recognises, vllm_heads.read, export_vllm, False),
    "trtllm": Format("TensorRT-LLM, Model Optimizer", trtllm.recognises, trtllm.read, trtllm.export),
    "nxdi": Format("NeuronX Distributed Inference", nxdi.recognises, nxdi.read, nxdi.export),
    "medusa": Format("Medusa's own files", medusa.recognises, medusa.read, medusa.export),
}


def format_named(name: str) -> Format:
    """Raises MedusaError: there is no such format."""
    if name not in FORMATS:
        raise MedusaError(f"no format is called {name!r}; there is: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def is_checkpoint(source: Source) -> bool:
    """Whether this is a checkpoint of the kit."""
    if source.file is not None and source.file.name != WEIGHTS:
        return False
    ours = source.config.get("format") == FORMAT and isinstance(source.config.get("heads"), dict)
    return ours and (source.folder / WEIGHTS).is_file()


def recognise(source: Source) -> str | None:
    """The name of a source's format; None if it is of none.

    Raises:
        MedusaError: a file that must be looked into is damaged.
    """
    return next((name for name, known in FORMATS.items() if known.recognises(source)), None)


def read_foreign(path: str | os.PathLike, name: str | None = None) -> Foreign:
    """Reads heads of another program.

    Args:
        path: a folder or a file.
        name: its format; None: the one it is recognised as.

    Raises:
        MedusaError: it is none, is one of the kit's own checkpoints, or is not whole.
    """
    source = Source.open(path)
    if is_checkpoint(source):
        raise MedusaError(f"{path} is a checkpoint of this kit already; use it as it is")
    found = name or recognise(source)
    if found is None:
        raise MedusaError(
            f"{path} holds no heads in a format that is known; there is: {', '.join(sorted(FORMATS))}"
        )
    known = format_named(found)
    if name is not None and not known.recognises(source):
        other = recognise(source)
        raise MedusaError(
            f"{path} holds no heads of the format {name}; "
            + (f"it looks like {other}: use --from {other}" if other else "give the folder that holds them")
        )
    return known.read(source)


def import_heads(
    path: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    name: str | None = None,
    base: str | None = None,
    tree: Tree | None = None,
) -> Foreign:
    """Makes a checkpoint of foreign heads.

    The base of a merged model is written to `folder/base`, unless `base` names the same one.

    Args:
        path: a folder or a file.
        folder: the checkpoint, new.
        name: the source's format; None: the one it is recognised as.
        base: the heads' base; None: the one that the source brings or names.
        tree: None: the source's, or else the chain of each head's best token.

    Returns:
        What was read.

    Raises:
        MedusaError: the source is not whole, fits another base, or cannot be written; then nothing is.
    """
    folder = fresh_folder(folder)
    foreign = read_foreign(path, name)
    with atomic_folder(folder) as new:
        found = _base_for(foreign, base, new, folder)
        heads = to_heads(foreign, found)
        chosen = tree or foreign.tree or Tree.chain(heads.config.num_heads)
        provenance = collect(base=found, data={}, recipe={}, imported=_origin(foreign))
        save_checkpoint(new, heads, chosen, base=found, provenance=provenance)
        load_checkpoint(new, found)
    return foreign


def _base_for(foreign: Foreign, given: str | None, new: Path, folder: Path) -> Base:
    """The base to tie heads to, loaded in the dtype of its files."""
    if foreign.write_base is None:
        name = given or foreign.base_name or _named_beside(foreign.source)
        if given is None and foreign.base_folder is not None:
            name = str(foreign.base_folder)
        if name is None:
            raise MedusaError(
                f"{foreign.source} does not say which base its heads are for; give it with --base"
            )
        return load_as_stored(name)
    part = new / BASE
    part.mkdir()
    foreign.write_base(part)
    found = load_as_stored(str(part))
    found.name = str(folder / BASE)
    if given is None:
        return found
    named = open_base(given)
    if named.fingerprint != found.fingerprint:
        raise MedusaError(
            f"{foreign.source} carries a base of its own, and it is not {given}: its weights differ; import without "
            "--base, and the one it carries is written out"
        )
    for file in part.iterdir():
        file.unlink()
    part.rmdir()
    return load_as_stored(given)


def load_as_stored(name: str, dtype: torch.dtype | None = None) -> Base:
    """Loads a base in a dtype; None: the one its configuration names, which its files are in.

    Raises:
        MedusaError: see `load_base`.
    """
    if dtype is None:
        stored = getattr(open_base(name).config.get_text_config(), "dtype", None)
        dtype = stored if isinstance(stored, torch.dtype) else torch.float32
    return load_base(name, dtype=dtype)


def _named_beside(source: Path) -> str | None:
    """The base in the `provenance.json` that an export of this kit left beside the heads."""
    file = (source if source.is_dir() else source.parent) / PROVENANCE
    value: Any = read_json(file) if file.is_file() else None
    base = value.get("base") if isinstance(value, dict) else None
    name = base.get("name") if isinstance(base, dict) else None
    return name if isinstance(name, str) and name else None


def _origin(foreign: Foreign) -> dict[str, Any]:
    """What was imported: its name, the hashes of its files, where it came from if it says so."""
    source = foreign.source
    before = (source if source.is_dir() else source.parent) / PROVENANCE
    return {
        "format": foreign.format,
        "source": source.name,
        "sha256": {file.name: sha256_file(file) for file in foreign.files},
        "provenance": read_json(before) if before.is_file() else None,
    }


def export_heads(
    checkpoint: str | os.PathLike,
    folder: str | os.PathLike,
    name: str,
    *,
    base: str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Writes a checkpoint's heads in another program's format.

    Args:
        checkpoint: the heads.
        folder: where, new.
        name: of the format.
        base: their base; None: the one the checkpoint names.
        dtype: of the weights; None: the base's files'.

    Returns:
        `folder`.

    Raises:
        MedusaError: the format cannot hold these heads: the message says why, and which would fit.
    """
    known, folder = format_named(name), fresh_folder(folder)
    if name == "speculators":
        known.write(checkpoint, folder, None)  # refuses; loading a base first would be for nothing
    found = load_checkpoint(checkpoint)
    check_kind(found.heads.config, Path(checkpoint), known.what)  # before the base is loaded for nothing
    return known.write(checkpoint, folder, load_as_stored(base or found.config[BASE]["name"], dtype))
