"""A training run as data: one YAML file, overridden by `section.key=value` words, saved resolved with the
output.

Every field says its type, default, unit and, where it comes from one, its paper. A key that is not a field is
an error that names the nearest one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from medusa.errors import MedusaError
from medusa.files import atomic_file


class _Section(BaseModel):
    # No infinities: JSON, which provenance is written in, does not have them.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class DataSection(_Section):
    """What the heads learn from: folders of cached hidden states, or conversations read online."""

    train: str = Field(
        description="folder of a states cache; with `online`, a file of distilled conversations"
    )
    validation: str = Field(
        description="the same, for evaluation and calibration; greedy answers decide best"
    )
    online: bool = Field(
        False, description="run the base now instead of reading cached states; slower, no disk"
    )
    limit: int | None = Field(None, ge=1, description="use only this many training answers; unit: answers")


class HeadsSection(_Section):
    """The heads: see `medusa.heads.HeadsConfig`."""

    kind: str = Field("medusa", description="medusa (parallel, arXiv 2401.10774) or hydra (arXiv 2402.05109)")
    num_heads: int = Field(4, ge=1, description="K; head k guesses k tokens beyond the base's own next one")
    num_layers: int = Field(
        1, ge=1, description="L; residual blocks (medusa) or hidden layers (hydra) of each head"
    )
    width: int | None = Field(
        None, ge=1, description="units of hydra's hidden layers; null: the base's hidden size"
    )
    lm_head: Literal["shared", "own"] = Field(
        "shared", description="the base's LM head, frozen, or one per head"
    )
    draft_vocab_size: int | None = Field(
        8192,
        ge=1,
        description="V'; guess only the most frequent answer tokens; null: all (arXiv 2502.14856)",
    )


class TrainingSection(_Section):
    """The optimisation."""

    start: str | None = Field(
        None, description="folder of a checkpoint whose heads learn on; null: new heads (the identity)"
    )
    epochs: int = Field(5, ge=1, description="passes over the training answers")
    batch_tokens: int = Field(
        2048, ge=1, description="answer tokens of one batch of one process; whole answers"
    )
    accumulation: int = Field(1, ge=1, description="batches of each process for one optimiser step")
    learning_rate: float = Field(
        1e-3, gt=0, description="peak of the schedule; Medusa-1 uses 1e-3 (arXiv 2401.10774)"
    )
    final_rate: float = Field(0.0, ge=0, le=1, description="share of the peak left at the end of the cosine")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of all steps in which the rate rises from 0")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's, decoupled (arXiv 1711.05101)")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first moment")
    beta2: float = Field(0.99, ge=0, lt=1, description="AdamW's second moment")
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    loss: Literal["cross_entropy", "sampled_cross_entropy", "plain_cross_entropy"] = Field(
        "cross_entropy",
        description="fused; fused over a part of the vocabulary for each batch, nearly twice as fast on a CPU "
        "(arXiv 1412.2007); or the obvious one that both are tested against",
    )
    sampled: int = Field(
        1024, ge=1, description="tokens beside a batch's targets that the sampled loss takes"
    )
    head_decay: float = Field(
        0.8, gt=0, le=1, description="head k's loss weighs head_decay ** k (arXiv 2401.10774)"
    )
    ema: float = Field(
        0.0, ge=0, lt=1, description="decay of the averaged weights that are evaluated; 0: none"
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="bf16: autocast; auto: bf16 where the device multiplies it natively, else fp32"
    )
    seed: int = Field(0, ge=0, description="of the heads' start and the order of the answers")
    save_steps: int = Field(
        50, ge=1, description="optimiser steps between saves of the state that --resume reads"
    )
    log_steps: int = Field(10, ge=1, description="optimiser steps between lines to the trackers")
    trackers: tuple[str, ...] = Field(
        ("tensorboard",), description="accelerate's names: tensorboard, wandb, ..."
    )


class EvaluationSection(_Section):
    """What decides which weights are kept: the longest simulated acceptance length."""

    steps: int | None = Field(
        None, ge=1, description="optimiser steps between evaluations; null: each epoch's end"
    )
    max_tokens: int | None = Field(
        20_000, ge=1, description="validation tokens read, whole answers; null: all"
    )
    tree_width: int = Field(
        16, ge=2, description="nodes, root included, of the tree that is simulated and saved"
    )


class CardSection(_Section):
    """The model card's metadata, as the Hub names it."""

    license: str | None = Field(None, description="SPDX id of the heads' licence")
    base_model: str | None = Field(None, description="the base's id on the Hub; null: its name here")
    language: str | None = Field(None, description="ISO 639-1")
    weights_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="weights on disk"
    )


class Recipe(_Section):
    """One reproducible training run."""

    base: str = Field("smollm2-135m", description="known name, local folder or Hub id")
    data: DataSection
    heads: HeadsSection = HeadsSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    card: CardSection = CardSection()

    def save(self, path: str | os.PathLike) -> None:
        """Writes the resolved recipe as YAML, atomically."""
        with atomic_file(path) as temporary:
            temporary.write_text(
                yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
            )


def load_recipe(path: str | os.PathLike | None, overrides: Iterable[str] = ()) -> Recipe:
    """Reads a recipe.

    Args:
        path: YAML; None starts from the defaults.
        overrides: words `section.key=value`, values in YAML; later ones win.

    Raises:
        MedusaError: the file cannot be read, a key is unknown (the nearest known one is named), a value is
            wrong.
    """
    values = _read_yaml(Path(path)) if path is not None else {}
    for word in overrides:
        key, sep, text = word.partition("=")
        if not sep or not key:
            raise MedusaError(
                f"{word!r} is not an override; write section.key=value, such as training.epochs=3"
            )
        node = values
        *sections, last = key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise MedusaError(f"override {word!r}: {section!r} is a value, not a section")
        try:
            node[last] = _numbers(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise MedusaError(f"override {word!r}: the value is not YAML") from error
    try:
        return Recipe.model_validate(values)
    except pydantic.ValidationError as error:
        where = f"{path}: " if path is not None else ""
        raise MedusaError(where + "; ".join(_explain(problem) for problem in error.errors())) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MedusaError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MedusaError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise MedusaError(
            f"{path}: a recipe is sections of keys, such as `training:`, not {type(values).__name__}"
        )
    return _numbers(values)


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` (no dot) as text; everyone who writes it means a number."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, str) and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    name = ".".join(location)
    if problem["type"] == "extra_forbidden":
        model: Any = Recipe
        for part in location[:-1]:
            model = _section_type(model.model_fields[part].annotation)
        known = list(model.model_fields)
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.4)
        return f"unknown key {name!r}; " + (
            f"did you mean {'.'.join([*location[:-1], near[0]])!r}?" if near else f"known: {', '.join(known)}"
        )
    if problem["type"] == "missing":
        return f"{name} is missing; give it in the recipe or as {name}=VALUE"
    return f"{name}: {problem['msg']}, got {problem['input']!r}"


def _section_type(annotation: Any) -> Any:
    return next((arg for arg in get_args(annotation) if isinstance(arg, type)), annotation)
