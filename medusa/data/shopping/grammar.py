"""A small recursive text grammar: rules of alternatives, expanded with a seeded random generator.

A template is plain text with two constructs, which nest:

- `{name}`  what `name` stands for: a value of the scene if the scene has it, else a rule of the grammar;
- `<a|b|c>` one of the alternatives; an empty one makes the text optional, as in `<please |>`.

The scene holds what must agree across one conversation (the product, the budget), rules hold ways to say it.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import yaml

from medusa.errors import MedusaError

_TOKEN = re.compile(r"\{([A-Za-z_0-9]+)\}|([<|>])")


class Deck:
    """Items drawn in shuffled order, so that one conversation repeats none before all have been used."""

    def __init__(self, items: Sequence[str], rng: random.Random):
        self._items, self._rng, self._left = list(items), rng, []

    def draw(self) -> str:
        if not self._left:
            self._left = self._rng.sample(self._items, len(self._items))
        return self._left.pop()


class Grammar:
    """Rules of alternatives, parsed once.

    rules: name -> alternatives. Raises MedusaError if a template is malformed.
    """

    def __init__(self, rules: Mapping[str, Sequence[str]]):
        self._rules = {name: tuple(_parse(str(text)) for text in texts) for name, texts in rules.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def names(self, prefix: str) -> list[str]:
        """Names of the rules that start with `prefix`, sorted."""
        return sorted(name for name in self._rules if name.startswith(prefix))

    def symbols(self) -> set[str]:
        """Every symbol that some template refers to."""
        found: set[str] = set()
        for alternatives in self._rules.values():
            for sequence in alternatives:
                found |= _symbols(sequence)
        return found

    def rule(self, name: str, rng: random.Random, scene: Mapping[str, object]) -> str:
        """One expansion of rule `name`. Raises MedusaError if a symbol is in neither scene nor rules."""
        return tidy(self._symbol(name, rng, scene))

    def text(self, template: str, rng: random.Random, scene: Mapping[str, object]) -> str:
        """One expansion of a template that is not in the rules."""
        return tidy(self._sequence(_parse(template), rng, scene))

    def _symbol(self, name, rng, scene) -> str:
        value = scene.get(name)
        if isinstance(value, Deck):
            value = value.draw()
        if value is not None:
            return str(value)
        if name not in self._rules:
            raise MedusaError(
                f"the grammar has no rule {name!r} and the scene no such value; add it to a YAML file"
            )
        return self._sequence(rng.choice(self._rules[name]), rng, scene)

    def _sequence(self, sequence, rng, scene) -> str:
        out = []
        for part in sequence:
            if isinstance(part, str):
                out.append(part)
            elif part[0] == "symbol":
                out.append(self._symbol(part[1], rng, scene))
            else:
                out.append(self._sequence(rng.choice(part[1]), rng, scene))
        return "".join(out)


@cache
def _parse(text: str):
    """A template as nested tuples: str | ("symbol", name) | ("choice", (sequence, ...))."""
    stack: list[list[list]] = [[[]]]
    end = 0
    for match in _TOKEN.finditer(text):
        if match.start() > end:
            stack[-1][-1].append(text[end : match.start()])
        end = match.end()
        symbol, mark = match.groups()
        if symbol:
            stack[-1][-1].append(("symbol", symbol))
        elif mark == "<":
            stack.append([[]])
        elif len(stack) == 1:
            raise MedusaError(f"unbalanced {mark!r} in the template {text!r}")
        elif mark == "|":
            stack[-1].append([])
        else:
            choices = tuple(tuple(sequence) for sequence in stack.pop())
            stack[-1][-1].append(("choice", choices))
    if len(stack) != 1:
        raise MedusaError(f"'<' is never closed in the template {text!r}")
    stack[0][0].append(text[end:])
    return tuple(stack[0][0])


def _symbols(sequence) -> set[str]:
    found = set()
    for part in sequence:
        if isinstance(part, tuple) and part[0] == "symbol":
            found.add(part[1])
        elif isinstance(part, tuple):
            for choice in part[1]:
                found |= _symbols(choice)
    return found


def tidy(text: str) -> str:
    """Joins left by empty alternatives: doubled spaces, spaces before punctuation, doubled full stops."""
    text = re.sub(r"(?<=\S)[ \t]{2,}", " ", text)
    text = re.sub(r"([?!])\.(?=\s|$)", r"\1", text)
    text = re.sub(r" +([,.?!;:])(?=\s|$)", r"\1", text)
    text = re.sub(r"(?<!\.)\.\.(?!\.)", ".", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def sentence_case(text: str) -> str:
    """Capital letters where sentences start; the rest is left alone."""
    text = re.sub(r"(^|(?<!\b[A-Z])[.?!][\"']?\s+|\n\n)([a-z])", lambda m: m[1] + m[2].upper(), text)
    return re.sub(r"\bi\b(?!\.)", "I", text)


def load_rules(folder: str) -> dict[str, list[str]]:
    """All rules of the packaged YAML files of `folder`. Raises MedusaError if two files define one rule."""
    rules: dict[str, list[str]] = {}
    for item in sorted((files(__package__) / folder).iterdir(), key=lambda f: f.name):
        if not item.name.endswith(".yaml"):
            continue
        for name, texts in yaml.safe_load(item.read_text(encoding="utf-8")).items():
            if name in rules:
                raise MedusaError(f"rule {name!r} is defined twice; the second time in {folder}/{item.name}")
            rules[name] = texts
    return rules


@cache
def shopping_grammar() -> Grammar:
    return Grammar(load_rules("grammar"))
