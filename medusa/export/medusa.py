"""Medusa's own formats (FasterDecoding/Medusa, read at commit e2a5d20).

Heads alone, `medusa_lm_head.pt`:
- medusa/model/medusa_model.py lines 111-119: `medusa_head` is a list of heads, each a Sequential of L residual blocks
  and an LM head without bias; saved and loaded by itself (lines 151-157), so that names start with the head's number:
  `{h}.{l}.linear.weight` [H, H], `.bias` [H], `{h}.{L}.weight` [V, H].
- line 157 loads with strict=False: a tensor that is missing leaves a head untrained without a word.
- lines 31-41: config.json has `medusa_num_heads`, `medusa_num_layers`, `base_model_name_or_path`.
- line 143: "fix the uploaded config (only include 2 heads)": published configs say 2 where the file has 5. So the file
  counts, and a config with fewer heads is not an error.
- line 114, and train_legacy's class in medusa_model_legacy.py line 105: `[ResBlock(...)] * L` repeats one module. With
  L > 1 all blocks of a published head hold the same numbers, and a library that writes shared tensors once leaves
  blocks out. They are read as L blocks either way.

Heads alone, version "2": medusa_model_legacy.py lines 24-36 and 102-109: config `version: "2"`, no LM heads in the
file: the base's is used (line 205). train/train_legacy.py lines 416-419 writes `medusa_lm_head.safetensors`.

Merged (Medusa 1.0): medusa_model_new.py lines 73-81 and 96-110: the heads are a part of the model,
`medusa_head.{h}....` in its shards, with `medusa_num_heads` and `medusa_num_layers` in the model's config. Made by
ctlllll/axolotl at commit 76bc572, src/axolotl/monkeypatch/medusa_utils.py lines 82-114 (L may be 0: line 85), whose
joint training changes the base as well: it is written out beside the heads.

Written is the first of the three, which Medusa, TensorRT-LLM's converter and vLLM read. Medusa has no place for a tree
in its files; ours lies beside them as `medusa_choices.json`, in the form of its medusa_choices.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from medusa.base import Base
from medusa.checkpoint import PROVENANCE
from medusa.errors import MedusaError
from medusa.export.foreign import Foreign, from_checkpoint
from medusa.export.layout import Layout
from medusa.export.merged import heads_in, is_merged, without_heads
from medusa.export.sources import CONFIG, PICKLES, Source, names_in, read_tensors
from medusa.files import atomic_folder, write_json
from medusa.tree import Tree

PICKLE, SAFETENSORS, CHOICES = "medusa_lm_head.pt", "medusa_lm_head.safetensors", "medusa_choices.json"
LAYOUT = Layout("{h}.{l}.linear.{part}", "{h}.{l}.weight")
MERGED = Layout("medusa_head.{h}.{l}.linear.{part}", "medusa_head.{h}.{l}.weight")


def recognises(source: Source) -> bool:
    """Whether these are heads by Medusa, alone or merged."""
    files = source.files(PICKLE, SAFETENSORS)
    alone = bool(files) and any(LAYOUT.match(name) for name in names_in(files[0]))
    return alone or is_merged(source, MERGED)


def read(source: Source) -> Foreign:
    """Reads heads of any of the three kinds.

    Raises:
        MedusaError: there are none; see `Layout.read`.
    """
    heads, layers = source.number("medusa_num_heads"), source.number("medusa_num_layers")
    if is_merged(source, MERGED):
        tensors, pickled = heads_in(source, MERGED), source.shards[0].suffix in PICKLES
        tensors = tensors if pickled else repeat_blocks(tensors, MERGED, layers)
        return Foreign(
            format="medusa",
            source=source.path,
            heads=MERGED.read(tensors, source.path, num_heads=heads, num_layers=layers),
            write_base=without_heads(source, MERGED, "medusa_num_heads", "medusa_num_layers"),
        )
    files = source.files(PICKLE, SAFETENSORS)
    if not files:
        raise MedusaError(
            f"{source.path} has no {PICKLE}, no {SAFETENSORS} and no shards with medusa_head tensors"
        )
    tensors = read_tensors(files[0])
    own = any((m := LAYOUT.match(name)) and "part" not in m.re.groupindex for name in tensors)
    if not own and source.config and source.config.get("version") != "2":
        raise MedusaError(
            f"{files[0]} has no LM heads; only files of version 2 share the base's, and {source.folder / CONFIG} has "
            'no "version": "2"; get the whole file, or add that'
        )
    if files[0].suffix not in PICKLES:
        tensors = repeat_blocks(tensors, LAYOUT, layers)
    counted = len({int(m["h"]) for name in tensors if (m := LAYOUT.match(name))})
    more = heads is not None and counted > heads
    return Foreign(
        format="medusa",
        source=source.path,
        files=tuple(files),
        heads=LAYOUT.read(
            tensors, files[0], num_heads=None if more else heads, num_layers=layers, lm_head=own
        ),
        base_name=source.text("base_model_name_or_path"),
        tree=Tree.from_json(source.folder / CHOICES) if (source.folder / CHOICES).is_file() else None,
        note=f"config.json says {heads} heads and the file has {counted}: all are read" if more else None,
    )


def repeat_blocks(
    tensors: dict[str, torch.Tensor], layout: Layout, layers: int | None
) -> dict[str, torch.Tensor]:
    """Puts back the blocks that were left out because one module stands for all of a head's.

    Only where every head has exactly one of several blocks; anything else is a file that lacks something.
    """
    found: dict[int, set[int]] = {}
    ends = set()
    for name in tensors:
        m = layout.match(name)
        if m and "part" in m.re.groupindex:
            found.setdefault(int(m["h"]), set()).add(int(m["l"]))
        elif m:
            ends.add(int(m["l"]))
    if layers is None and len(ends) == 1:
        layers = ends.pop()
    if not layers or layers < 2 or layers > len(tensors) or any(len(one) != 1 for one in found.values()):
        return tensors
    whole = dict(tensors)
    for h, (kept,) in found.items():
        for number in range(layers):
            for part in ("weight", "bias"):
                same = tensors.get(layout.block.format(h=h, l=kept, part=part))
                if same is not None:
                    whole[layout.block.format(h=h, l=number, part=part)] = same
    return whole


def export(checkpoint_dir: str | os.PathLike, out_dir: str | os.PathLike, base: Base) -> Path:
    """Writes medusa heads as `medusa_lm_head.pt` and config.json, with an LM head for each.

    Args:
        checkpoint_dir: the heads.
        out_dir: a folder, which is replaced whole or not at all.
        base: the heads' base, loaded; weights are written in its dtype.

    Returns:
        `out_dir`.

    Raises:
        MedusaError: see `from_checkpoint`; or the disk is full.
    """
    checkpoint, heads = from_checkpoint(Path(checkpoint_dir), base, "Medusa")
    config = checkpoint.heads.config
    with atomic_folder(out_dir) as folder:
        # torch.save writes a matrix that several names share once.
        torch.save(LAYOUT.write(heads), folder / PICKLE)
        values = {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": checkpoint.config["base"]["name"],
        }
        write_json(folder / CONFIG, values)
        write_json(folder / CHOICES, [list(path) for path in checkpoint.tree.paths])
        write_json(folder / PROVENANCE, checkpoint.provenance)
    return Path(out_dir)
