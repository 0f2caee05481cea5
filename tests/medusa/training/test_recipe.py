"""Recipes: defaults, overrides, and the nearest key named for every unknown one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from medusa.errors import MedusaError
from medusa.training.recipe import Recipe, load_recipe

DATA = {"data": {"train": "a", "validation": "b"}}
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(DATA))
    return path


def test_overrides_win_in_order_and_are_yaml(file: Path) -> None:
    words = ["training.epochs=3", "heads.width=null", "training.learning_rate=2e-3", "training.epochs=4"]
    recipe = load_recipe(file, [*words, "training.trackers=[tensorboard, wandb]", "data.train=x=y"])
    assert recipe.training.epochs == 4
    assert recipe.training.learning_rate == 0.002
    assert recipe.heads.width is None
    assert recipe.training.trackers == ("tensorboard", "wandb")
    assert recipe.data.train == "x=y"


def test_saved_recipe_loads_as_the_same(file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(file, ["heads.kind=hydra", "evaluation.steps=7"])
    recipe.save(tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml") == recipe


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("training.epoch=3", "training.epochs"),
        ("training.learning_rat=3", "training.learning_rate"),
        ("trainin.epochs=3", "training"),
        ("heads.num_head=3", "heads.num_heads"),
        ("bas=x", "base"),
        ("evaluation.tree_with=9", "evaluation.tree_width"),
        ("card.licence=mit", "card.license"),
    ],
)
def test_an_unknown_key_names_the_nearest(file: Path, word: str, near: str) -> None:
    with pytest.raises(MedusaError, match=rf"unknown key '.+'; did you mean '{near}'"):
        load_recipe(file, [word])


def test_a_key_like_no_other_lists_them(file: Path) -> None:
    with pytest.raises(MedusaError, match=r"unknown key 'training\.zzz'; known: start, epochs, "):
        load_recipe(file, ["training.zzz=1"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("training.epochs=0", r"training.epochs: .*greater than or equal to 1"),
        ("training.epochs=many", "training.epochs: .*integer"),
        ("heads.lm_head=two", "heads.lm_head: .*'shared' or 'own'"),
        ("epochs", "write section.key=value"),
        ("base.name=x", "'base' is a value"),
        ("training=3", "training: "),
        ("training.epochs=[", "not YAML"),
    ],
)
def test_wrong_values(file: Path, word: str, message: str) -> None:
    words = ["base=there", word] if word.startswith("base.") else [word]
    with pytest.raises(MedusaError, match=message):
        load_recipe(file, words)


def test_missing_data_says_how_to_give_it() -> None:
    with pytest.raises(
        MedusaError, match=r"data.train is missing; give it in the recipe or as data.train=VALUE"
    ):
        load_recipe(None, ["data.validation=b"])


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "- x"])
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(MedusaError, match=r"bad\.yaml"):
        load_recipe(path)
    with pytest.raises(MedusaError, match="cannot read"):
        load_recipe(tmp_path / "absent.yaml")


def test_every_field_is_documented() -> None:
    sections = [Recipe, *(field.annotation for field in Recipe.model_fields.values())]
    for section in sections:
        for name, field in getattr(section, "model_fields", {}).items():
            nested = hasattr(field.annotation, "model_fields")
            assert nested or field.description, f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "recipes").glob("smollm2-*.yaml")), ids=lambda p: p.name
)
def test_shipped_recipes_load(path: Path) -> None:
    assert load_recipe(path).base == "smollm2-135m"


def test_infinity_is_no_setting() -> None:
    with pytest.raises(MedusaError, match="training.clip"):
        load_recipe(None, ["data.train=a", "data.validation=b", "training.clip=.inf"])
