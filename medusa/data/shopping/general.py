"""Prompts from outside shopping: sums, translation, summaries, retrieval, writing, code and more."""

import random
from functools import cache

from medusa.data.shopping.grammar import Deck, Grammar, load_rules, sentence_case
from medusa.data.shopping.manner import MANNERS

_STYLES = {"plain": 70, "lower": 14, "typos": 6, "chat": 4, "dictation": 3}
_NAMES = """Anna Tom Priya Jonas Maria Kofi Elena Sam Noor Chloe Mateo Ingrid Wei Lukas Fatima Ben Zoe Paul
Carmen Olga Hugo Yara Ravi Nina Oscar Lin Amara Felix Rosa Timo""".split()
_PLACES = """Harwick, Port Ellery, Dunmore Bay, Castel Verde, Lakeview, Norrby, Saint-Aubin, Millford,
East Tarrow, Quillan, Brandsea, Oakhurst, Kirkwell, Monteverro, Ashby Point, Vollmar"""
_BUILDINGS = """library, harbour, bridge, railway station, swimming pool, cinema, lighthouse, town hall,
hospital, market, mill, theatre, museum, old factory, observatory, bus depot"""
_BLOCKS = ("translation", "summary", "retrieval", "coding", "extraction")  # case and spelling matter there


_FOLLOW = {
    "advice": "follow_knowledge",
    "brainstorm": "follow_text",
    "chitchat": "follow",
    "coding": "follow_coding",
    "everyday": "follow_knowledge",
    "explain": "follow_knowledge",
    "extraction": "follow_passage",
    "humanities": "follow_knowledge",
    "math": "follow_numbers",
    "qa": "follow_knowledge",
    "quiz": "follow",
    "reasoning": "follow",
    "retrieval": "follow_passage",
    "roleplay": "follow_text",
    "steps": "follow_knowledge",
    "summary": "follow_passage",
    "translation": "follow_text",
    "writing": "follow_text",
}


@cache
def general_grammar() -> Grammar:
    rules = load_rules("general")
    rules["weekday"] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    return Grammar(rules)


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


class _Numbers:
    """Names and numbers for one prompt; numbers are drawn anew for every use except where they must agree."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        names = Deck(_NAMES, rng)
        step = rng.randint(2, 9)
        self._fixed: dict[str, object] = {
            "first_name": names,
            **{f"first_name{i}": names.draw() for i in (1, 2, 3)},
            # Two places and one building, so that the texts of a prompt belong together.
            "place_en": Deck(rng.sample(_listed(_PLACES), 2), rng),
            "building": rng.choice(_listed(_BUILDINGS)),
            "n2s": step,
            **{f"n2s{k}": step * k for k in (2, 4, 8)},
            "n1": rng.randint(11, 60),
            "n3": rng.randint(10, 48),
            "n4": rng.randint(11, 40),
            "d": rng.randint(3, 6),
            "h": rng.randint(2, 7),
            "speed": rng.randrange(20, 130, 5),
            "big": rng.randrange(62, 200, 2),
            "pct": rng.choice((5, 8, 10, 12, 15, 20, 25, 30, 40)),
        }

    def get(self, name: str):
        if name == "big3":
            return self._rng.randrange(210, 990, self._rng.choice((1, 5, 10)))
        if name in ("n2", "n2b"):  # years of a century, the second one later than the first
            return self._rng.randint(11, 49) + 50 * (name == "n2b")
        if name == "yy":
            return f"{self._rng.randint(1, 24):02}"
        return self._fixed.get(name)


def tasks() -> list[str]:
    """Names of the kinds of prompt: "math", "translation", ..."""
    names = general_grammar().names("general_")
    return [name.removeprefix("general_") for name in names]


def make_general(rng: random.Random, task: str) -> dict:
    """One general prompt: {"messages", "category": None, "intent": task, "style", "language", "turns"}."""
    grammar, scene = general_grammar(), _Numbers(rng)
    style = rng.choices(list(_STYLES), list(_STYLES.values()))[0]
    if task in _BLOCKS or style == "plain":
        style = "plain"

    def write(rule: str) -> str:
        text = (
            sentence_case(grammar.rule(rule, rng, scene))
            if task != "coding"
            else grammar.rule(rule, rng, scene)
        )
        return MANNERS[style](rng, text) if style in MANNERS else text

    users = [write(f"general_{task}")]
    for _ in range(rng.choices((0, 1, 2), (62, 30, 8))[0]):
        text = write(rng.choice(("follow", _FOLLOW[task], _FOLLOW[task])))
        if text not in users:
            users.append(text)
    messages = [{"role": "user", "content": text} for text in users]
    if rng.random() < 0.08:
        messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
    return {
        "messages": messages,
        "category": None,
        "intent": task,
        "style": style,
        "language": "en",
        "turns": len(users),
    }
