"""Models that carry their heads in their own shards: the heads come out, and the base without them.

The base is written out because it may be another one than the base that training began with: Medusa-2 trains both.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from medusa.errors import MedusaError
from medusa.export.layout import Layout
from medusa.export.sources import CONFIG, INDEX, Source, read_tensors
from medusa.files import write_json

_COPIED = ("*.json", "*.model", "*.txt", "*.jinja")  # tokenizer and generation settings


def is_merged(source: Source, layout: Layout) -> bool:
    """Whether a folder's shards hold heads under the layout's names, and a base beside them."""
    if source.file is not None or "model_type" not in source.config or not source.shards:
        return False
    return any(layout.match(name) for name in source.names())


def heads_in(source: Source, layout: Layout) -> dict[str, torch.Tensor]:
    """The heads' tensors of a merged model, under the layout's names."""
    return source.tensors(lambda name: name.startswith(_prefix(layout)))


def without_heads(source: Source, layout: Layout, *keys: str) -> Callable[[Path], None]:
    """What writes the model's base into an empty folder.

    Args:
        source: the merged model.
        layout: the heads' names.
        keys: of config.json, which belong to the heads.
    """
    return functools.partial(_write_base, source, _prefix(layout), keys)


def _prefix(layout: Layout) -> str:
    return layout.block.partition(".")[0] + "."


def _write_base(source: Source, prefix: str, keys: tuple[str, ...], folder: Path) -> None:
    """Raises MedusaError: a shard is damaged, or nothing is left without the heads."""
    for pattern in _COPIED:
        for file in source.folder.glob(pattern):
            if file.name != CONFIG and not file.name.endswith(INDEX):
                shutil.copyfile(file, folder / file.name)
    config = {name: value for name, value in source.config.items() if name not in keys}
    if any("Medusa" in str(name) for name in config.get("architectures") or ()):
        del config["architectures"]  # of the merged class; transformers finds the base's by its model_type
    write_json(folder / CONFIG, config)
    count, places = len(source.shards), {}
    for number, shard in enumerate(source.shards, 1):
        name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        tensors = read_tensors(shard, lambda one: not one.startswith(prefix))
        # clone: tensors that share memory, as tied ones do in a .bin file, cannot be written as safetensors.
        tensors = {one: tensor.clone().contiguous() for one, tensor in tensors.items()}
        safetensors.torch.save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    if not places:
        raise MedusaError(f"{source.path} holds heads and no base; give the base with --base")
    if count > 1:
        write_json(folder / f"model.safetensors{INDEX}", {"metadata": {}, "weight_map": places})
