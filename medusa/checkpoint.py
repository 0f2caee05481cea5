"""Heads on disk: one folder with everything decoding needs, and what it was made from.

    config.json               heads' configuration, the base they belong to
    medusa_heads.safetensors  their weights (and the draft vocabulary)
    tree.json                 the candidate tree
    calibration.json          hits of each head by rank, joint counts of paths
    provenance.json           base and data, command, versions, git commit
    README.md                 model card with the Hub's metadata

A folder may hold other things beside them (a training run keeps its state in `training/`), so a checkpoint is
not replaced by swapping folders: its files are written to `.ready/` first, that folder appears by one rename,
and its files are then moved up. A process that dies in between leaves `.ready/`, and the next reader or
writer moves the rest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from medusa.calibration import Calibration
from medusa.errors import MedusaError
from medusa.files import atomic_folder, read_json, write_json
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.model_card import model_card
from medusa.tree import Tree

FORMAT = 1
CONFIG, WEIGHTS, TREE = "config.json", "medusa_heads.safetensors", "tree.json"
CALIBRATION, PROVENANCE, CARD = "calibration.json", "provenance.json", "README.md"
_READY = ".ready"


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` gives.

    Attributes:
        heads: in eval mode, gradients off.
        tree: the candidate tree to decode with.
        calibration: its counts; None in a checkpoint converted from elsewhere.
        config: the whole of `config.json`.
        provenance: the whole of `provenance.json`.
        path: the folder.
    """

    heads: DraftHeads
    tree: Tree
    calibration: Calibration | None
    config: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


def save_checkpoint(
    folder: str | os.PathLike,
    heads: DraftHeads,
    tree: Tree,
    *,
    base: Any,
    provenance: dict[str, Any],
    calibration: Calibration | None = None,
    card: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a checkpoint; one that was there is replaced whole or not at all.

    Args:
        folder: where; made if absent.
        heads: the weights to keep.
        tree: at most K deep.
        base: the `medusa.base.Base` that the heads belong to.
        provenance: of `medusa.provenance.collect`.
        calibration: counts, if known.
        card: what `medusa.model_card.model_card` takes beside these: license, base_model, figures.
        dtype: of the floating-point weights on disk; None: as they are.

    Raises:
        MedusaError: a weight is not finite or shared between modules, the tree does not fit, the disk is
            full.
    """
    folder = Path(folder)
    tree.check(heads.config.num_heads, heads.config.draft_size)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    _check_finite(tensors, "the heads to save")
    config = {
        "format": FORMAT,
        "heads": heads.config.to_dict(),
        "base": {
            "name": base.name if not os.path.isabs(base.name) else Path(base.name).name,
            "fingerprint": base.fingerprint,
            "tokenizer_fingerprint": base.tokenizer_fingerprint,
            "hidden_size": base.hidden_size,
            "vocab_size": base.vocab_size,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    _settle(folder)
    with atomic_folder(folder / _READY) as new:
        try:
            safetensors.torch.save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        except RuntimeError as error:
            raise MedusaError(
                f"checkpoint: two modules share one weight; build each by itself ({error})"
            ) from error
        write_json(new / CONFIG, config)
        tree.to_json(new / TREE)
        write_json(new / PROVENANCE, provenance)
        if calibration is not None:
            calibration.to_json(new / CALIBRATION)
        text = model_card(heads.config, tree, calibration, base_name=config["base"]["name"], **(card or {}))
        (new / CARD).write_text(text, encoding="utf-8")
    _settle(folder)


def save_tree(folder: str | os.PathLike, tree: Tree) -> None:
    """Replaces a checkpoint's tree.

    Raises:
        MedusaError: there is no checkpoint, or its heads cannot fill the tree.
    """
    folder = _existing(folder)
    config = HeadsConfig.from_dict(_config(folder)["heads"])
    tree.check(config.num_heads, config.draft_size)
    tree.to_json(folder / TREE)


def load_checkpoint(
    folder: str | os.PathLike,
    base: Any = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Checkpoint:
    """Reads a checkpoint and checks all of it.

    Args:
        folder: the checkpoint.
        base: the `medusa.base.Base` to decode with; None checks the folder by itself.
        dtype: of the heads; by default the base's, or as on disk without a base.
        device: by default the base's.

    Raises:
        MedusaError: a file is missing or cut short; a tensor is missing, left over, of another shape or not
            finite; the tree is deeper than there are heads; the heads were trained for another base,
            tokenizer, hidden size or vocabulary. The message says what differs.
    """
    folder = _existing(folder)
    config = _config(folder)
    heads_config = HeadsConfig.from_dict(config["heads"])
    with torch.device("meta"):  # no memory and no random numbers for weights that the file brings
        heads = build_heads(heads_config)
    tensors = _read_tensors(folder / WEIGHTS)
    _check_tensors(tensors, heads, folder / WEIGHTS)
    if base is not None:
        known = int(tensors["draft_vocab"].max()) + 1 if "draft_vocab" in tensors else heads_config.vocab_size
        _check_base(folder, config, known, base)
    # assign: the file's dtype is kept, and no weight stays at its random start.
    heads.load_state_dict(tensors, strict=True, assign=True)
    if base is not None:
        weight = base.model.get_output_embeddings().weight
        dtype, device = dtype or weight.dtype, device or weight.device
    heads = heads.to(device=device, dtype=dtype).eval().requires_grad_(False)
    tree = Tree.from_json(folder / TREE)
    try:
        tree.check(heads_config.num_heads, heads_config.draft_size)
    except MedusaError as error:
        raise MedusaError(f"{folder / TREE}: {error}") from error
    calibration = Calibration.from_json(folder / CALIBRATION) if (folder / CALIBRATION).exists() else None
    if calibration is not None and calibration.num_heads != heads_config.num_heads:
        raise MedusaError(
            f"{folder / CALIBRATION} is of {calibration.num_heads} heads, not {heads_config.num_heads}"
        )
    provenance = read_json(folder / PROVENANCE) if (folder / PROVENANCE).exists() else {}
    return Checkpoint(heads, tree, calibration, config, provenance, folder)


def _settle(folder: Path) -> None:
    """Moves what a finished but interrupted save left in `.ready/` to its place."""
    ready = folder / _READY
    if not ready.is_dir():
        return
    for file in sorted(ready.iterdir()):
        os.replace(file, folder / file.name)
    ready.rmdir()


def _existing(folder: str | os.PathLike) -> Path:
    folder = Path(folder)
    if folder.is_dir():
        _settle(folder)
    missing = [name for name in (CONFIG, WEIGHTS, TREE) if not (folder / name).is_file()]
    if missing:
        what = "is not a folder" if not folder.is_dir() else f"has no {', '.join(missing)}"
        raise MedusaError(f"{folder} is not a heads checkpoint: it {what}")
    return folder


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG)
    parts = isinstance(config, dict) and all(isinstance(config.get(name), dict) for name in ("heads", "base"))
    if not parts or config.get("format") != FORMAT:
        raise MedusaError(f"{folder / CONFIG}: not a heads configuration of format {FORMAT}")
    return config


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise MedusaError(
            f"{path} cannot be read ({error}); was it cut short? Copy or train it again"
        ) from error


def _check_finite(tensors: dict[str, torch.Tensor], where: str) -> None:
    bad = [name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if bad:
        raise MedusaError(f"{where}: NaN or infinity in {', '.join(bad)}")


def _check_tensors(tensors: dict[str, torch.Tensor], heads: DraftHeads, path: Path) -> None:
    expected = heads.state_dict()
    wrong = [f"{name} is missing" for name in expected if name not in tensors]
    wrong += [f"{name} is left over" for name in tensors if name not in expected]
    for name, tensor in expected.items():
        found = tensors.get(name)
        if found is None:
            continue
        if found.shape != tensor.shape:
            wrong.append(f"{name} has shape {list(found.shape)}, not {list(tensor.shape)}")
        elif found.is_floating_point() != tensor.is_floating_point():
            wrong.append(f"{name} has type {found.dtype}, not {tensor.dtype}")
    if wrong:
        raise MedusaError(f"{path} does not fit its config.json: {'; '.join(wrong)}")
    _check_finite(tensors, str(path))
    vocab = tensors.get("draft_vocab")
    if vocab is not None:
        inside = bool(((vocab >= 0) & (vocab < heads.config.vocab_size)).all())
        if not inside or len(vocab.unique()) != len(vocab):
            raise MedusaError(
                f"{path}: draft_vocab must hold distinct token ids below {heads.config.vocab_size}"
            )


def _check_base(folder: Path, config: dict[str, Any], known_tokens: int, base: Any) -> None:
    """The LM head may have other rows than it had (padded, resized) if the heads' tokens all exist."""
    then = config["base"]
    differs = []
    for name, now in (
        ("fingerprint", base.fingerprint),
        ("tokenizer_fingerprint", base.tokenizer_fingerprint),
        ("hidden_size", base.hidden_size),
    ):
        if then.get(name) != now:
            differs.append(
                f"{name.replace('_', ' ')} {_short(then.get(name))} at training, {_short(now)} now"
            )
    if base.vocab_size < known_tokens:
        rows = then.get("vocab_size")
        differs.append(
            f"LM head of {rows} rows at training, {base.vocab_size} now, and id {known_tokens - 1} is guessed"
        )
    if differs:
        raise MedusaError(
            f"{folder} was trained for {then.get('name')!r}, which is not the base {base.name!r}: "
            f"{'; '.join(differs)}. Use the base it was trained for, or train heads for this one"
        )


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)
