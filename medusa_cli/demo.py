"""`medusa demo`: the whole job on a real base, from prompts to a report, one command for each stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli.common import examples, notes, out, repository
from medusa_cli.demo_recipe import DemoRecipe, load_demo_recipe
from medusa_cli.stages import Runner, Stage, clock

EXAMPLES = examples(
    "medusa demo",
    "medusa demo --recipe my_demo.yaml --out runs/mine",
    "medusa demo --dry-run        # print the commands it would run",
)


def demo(
    recipe: Annotated[
        Path | None, typer.Option("--recipe", metavar="FILE", help="Sizes of its parts; recipes/demo.yaml.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Everything it makes, and what it resumes from.")
    ] = Path("runs/demo"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and do nothing.")] = False,
) -> None:
    """Train both kinds of heads on a real base, decode with them, and print what they gain.

    Half an hour on two cores. Stop it with Ctrl-C at any moment; run again, it goes on where it was. Finished
    stages are repeated only if the recipe has changed for them.
    """
    path = recipe or repository() / "recipes" / "demo.yaml"
    wanted = load_demo_recipe(path)
    stages = demo_stages(wanted, path.parent, folder)
    if dry_run:
        for stage in stages:
            out.print(stage.shown(), markup=False, soft_wrap=True)
        return
    seconds = Runner(folder / "stages", notes).run(stages)
    _print_results(wanted, folder)
    notes.print(f"all stages together: {clock(seconds)}", style="dim")


def demo_stages(recipe: DemoRecipe, recipes: Path, folder: Path) -> list[Stage]:
    """The demo's commands in order.

    Args:
        recipe: sizes.
        recipes: the folder where the heads' recipes lie.
        folder: where everything goes.

    Raises:
        MedusaError: a heads' recipe cannot be read, or has no such key.
    """
    base, seed = recipe.base, str(recipe.seed)
    asked = recipe.answers
    answers = ("--base", base, "--seed", seed, "--backend", "engine", "--in-flight", asked.in_flight)
    answers += ("--max-new-tokens", asked.max_new_tokens, "--max-length", asked.max_length)
    prompts, magpie = folder / "prompts", folder / "magpie.jsonl"
    states, validation = folder / "states" / "train", folder / "states" / "validation"
    stages = [
        Stage("base", f"the base {base}", ("medusa_cli", "base", "fetch", base), ()),
        Stage(
            "prompts",
            f"{recipe.prompts.train} prompts from the grammar",
            _medusa(
                *("data", "prompts", "--out", prompts, "--seed", seed),
                *("--train", recipe.prompts.train, "--general", recipe.prompts.general),
            ),
            (prompts,),
        ),
    ]
    sources = [prompts / "train.jsonl"]
    if recipe.prompts.magpie:
        sources.insert(0, magpie)  # before the token budget runs out
        words = ("--base", base, "--out", magpie, "--count", recipe.prompts.magpie, "--seed", seed)
        words += ("--backend", "engine", "--in-flight", asked.in_flight, "--max-length", asked.max_length)
        title = f"{recipe.prompts.magpie} prompts written by the base"
        made = (magpie, folder / "magpie.jsonl.manifest.json")
        stages.append(Stage("magpie", title, _medusa("data", "magpie", *words), made, after=("base",)))
    data = tuple(stage.name for stage in stages)
    share: tuple[object, ...] = ("--greedy-share", asked.greedy_share)
    if asked.tokens is not None:
        share += ("--token-budget", asked.tokens)
    if asked.minutes is not None:
        share += ("--time-budget", asked.minutes)
    if asked.workers > 1:
        share += ("--workers", asked.workers)
    stages.append(
        Stage(
            "answers",
            "the base's answers, and its hidden states meanwhile",
            _medusa(
                *("data", "distill", *sources, *answers, *share),
                *("--out", folder / "train.jsonl", "--states", states),
            ),
            (folder / "train.jsonl", folder / "train.jsonl.manifest.json", states),
            scratch=(folder / "train.jsonl.parts",),
            after=data,
        )
    )
    held_out: tuple[object, ...] = ("--greedy-share", 1.0, "--limit", asked.validation)
    if asked.validation_minutes is not None:
        held_out += ("--time-budget", asked.validation_minutes)
    words = (*answers, *held_out, "--out", folder / "validation.jsonl", "--states", validation)
    stages.append(
        Stage(
            "validation",
            f"{asked.validation} greedy answers for validation",
            _medusa("data", "distill", prompts / "validation.jsonl", *words),
            (folder / "validation.jsonl", folder / "validation.jsonl.manifest.json", validation),
            after=("base", "prompts"),
        )
    )
    for name in recipe.heads:
        stages += _heads_stages(name, recipe, recipes, folder, states, validation)
    return stages


def _heads_stages(
    name: str, recipe: DemoRecipe, recipes: Path, folder: Path, states: Path, validation: Path
) -> list[Stage]:
    """Train, calibrate, choose the tree, measure: for one kind of heads."""
    from medusa.training.recipe import load_recipe

    heads, base = recipe.heads[name], recipe.base
    path, checkpoint = recipes / heads.recipe, folder / name
    overrides = [
        f"base={base}",
        f"data.train={states}",
        f"data.validation={validation}",
        f"training.seed={recipe.seed}",
        *(f"{key}={json.dumps(value)}" for key, value in heads.set.items()),
    ]
    # Resolved here already: a wrong key is told now and not after twenty minutes.
    settings = load_recipe(path, overrides).model_dump(mode="json")
    report = checkpoint / "report"
    limits = ("--limit", recipe.eval.limit, "--max-new-tokens", recipe.eval.max_new_tokens)
    limits += (
        "--turns",
        recipe.eval.turns,
        "--peer-conversations",
        recipe.eval.peer_conversations,
        "--resume",
    )
    train, measure, search = f"train-{name}", f"calibrate-{name}", f"tree-{name}"
    return [
        Stage(
            train,
            f"training {name} heads",
            _medusa("train", "--recipe", path, "--out", checkpoint, "--resume", *overrides),
            (checkpoint,),
            settings,
            after=("answers", "validation"),
        ),
        Stage(
            measure,
            f"what the {name} heads guess right",
            _medusa("calibrate", "--checkpoint", checkpoint, "--states", validation, "--base", base),
            (checkpoint / "calibration.json",),
            after=(train,),
        ),
        Stage(
            search,
            f"the tree for {name}, by measured step cost",
            _medusa(
                "tree",
                "search",
                "--checkpoint",
                checkpoint,
                "--plot",
                checkpoint / "tree.png",
                "--base",
                base,
            ),
            (checkpoint / "tree.png",),
            after=(measure,),
        ),
        Stage(
            f"eval-{name}",
            f"{name} against plain decoding",
            (
                "eval",
                *_words(
                    "run",
                    "--checkpoint",
                    checkpoint,
                    "--data",
                    "test",
                    "--base",
                    base,
                    *limits,
                    "--out",
                    report,
                ),
            ),
            # The folder as well: an unfinished run of other heads may lie in it.
            (report / "results.json", report),
            after=(search,),
        ),
    ]


def _words(*parts: object) -> tuple[str, ...]:
    return tuple(str(part) for part in parts)


def _medusa(*parts: object) -> tuple[str, ...]:
    return ("medusa_cli", *_words(*parts))


def _print_results(recipe: DemoRecipe, folder: Path) -> None:
    from eval.results import load
    from eval.summary import print_side_by_side

    print_side_by_side({name: load(folder / name / "report") for name in recipe.heads}, out)
    for name in recipe.heads:
        out.print(f"report: {folder / name / 'report' / 'report.html'}", markup=False, soft_wrap=True)
