"""`recipes/demo.yaml` as data: how large each part of the demo is."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medusa.errors import MedusaError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Prompts(_Section):
    """What the base is asked."""

    train: int = Field(700, ge=1, description="prompts from the grammar")
    general: float = Field(0.25, ge=0, lt=1, description="share of the grammar's prompts outside shopping")
    magpie: int = Field(200, ge=0, description="prompts that the base writes itself (arXiv 2406.08464)")


class Answers(_Section):
    """What the base answers."""

    max_new_tokens: int = Field(128, ge=1, description="most tokens of an answer")
    greedy_share: float = Field(0.5, ge=0, le=1, description="answers decoded greedily; the rest is sampled")
    tokens: int | None = Field(
        None, ge=1, description="begin nothing after so many tokens; None: all prompts"
    )
    minutes: float | None = Field(None, gt=0, description="begin nothing after so long; None: all prompts")
    workers: int = Field(2, ge=1, description="processes that answer side by side")
    in_flight: int = Field(48, ge=1, description="conversations that each of them decodes together")
    max_length: int = Field(512, ge=2, description="most tokens of a whole conversation")
    validation_minutes: float | None = Field(None, gt=0, description="the same, for the validation prompts")
    validation: int = Field(64, ge=1, description="validation prompts, answered greedily")


class Heads(_Section):
    """One kind of heads to train."""

    recipe: str = Field(description="file beside this one")
    set: dict[str, Any] = Field({}, description="section.key: value, on top of that recipe")


class Eval(_Section):
    """What is measured."""

    limit: int = Field(12, ge=1, description="conversations of the test split")
    max_new_tokens: int = Field(128, ge=1, description="most tokens of an answer")
    turns: Literal["first", "all"] = Field("first", description="of each conversation")
    peer_conversations: int = Field(4, ge=1, description="answered by other implementations as well")


class DemoRecipe(_Section):
    """The whole demo."""

    base: str = Field("smollm2-135m", description="known name, local folder or Hub id")
    seed: int = Field(0, ge=0, description="of prompts, sampling and training")
    prompts: Prompts = Prompts()
    answers: Answers = Answers()
    heads: dict[str, Heads] = Field(min_length=1, description="name of the run -> heads")
    eval: Eval = Eval()


def load_demo_recipe(path: Path) -> DemoRecipe:
    """Reads the recipe.

    Raises:
        MedusaError: it cannot be read, a key is unknown (the nearest known one is named), a value is wrong.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MedusaError(f"cannot read the recipe {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise MedusaError(f"{path} is not YAML: {error}") from error
    try:
        return DemoRecipe.model_validate(values)
    except ValidationError as error:
        raise MedusaError(f"{path}: {'; '.join(_explain(problem) for problem in error.errors())}") from error


def _explain(problem: Any) -> str:
    *sections, last = map(str, problem["loc"]) if problem["loc"] else ("",)
    name = ".".join([*sections, last])
    if problem["type"] != "extra_forbidden":
        return f"{name or 'recipe'}: {problem['msg']}, got {problem['input']!r}"
    model: Any = {"prompts": Prompts, "answers": Answers, "eval": Eval, "heads": Heads}.get(
        sections[0] if sections else "", DemoRecipe
    )
    near = difflib.get_close_matches(last, model.model_fields, n=1)
    return f"unknown key {name!r}" + (f"; did you mean {'.'.join([*sections, near[0]])!r}?" if near else "")
