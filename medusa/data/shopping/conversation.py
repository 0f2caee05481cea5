"""The user turns (and at times a system message) of one shopping conversation."""

import random

from medusa.data.shopping.grammar import sentence_case, shopping_grammar, tidy
from medusa.data.shopping.manner import MANNERS
from medusa.data.shopping.products import Category
from medusa.data.shopping.scene import Scene

INTENTS = (
    "discovery",
    "comparison",
    "specification",
    "compatibility",
    "sizing",
    "care",
    "gift",
    "budget",
    "reviews",
    "order",
    "returns",
    "delivery",
    "alternatives",
    "bundle",
    "troubleshooting",
    "decision",
)

# style -> weight. "vague" starts with next to nothing and tells the need over several turns, as people do.
STYLES = {
    "plain": 40,
    "lower": 16,
    "typos": 9,
    "chat": 10,
    "fragment": 8,
    "dictation": 4,
    "email": 5,
    "vague": 7,
    "shout": 1,
}
_TURNS = {1: 42, 2: 28, 3: 18, 4: 8, 5: 4}


def _weighted(rng: random.Random, weights: dict):
    return rng.choices(list(weights), list(weights.values()))[0]


def make_conversation(rng: random.Random, category: Category, intent: str) -> dict:
    """One conversation: {"messages", "category", "intent", "style", "language", "turns"}, roles system and user."""
    grammar, scene = shopping_grammar(), Scene(category, rng)
    style = _weighted(rng, STYLES)
    turns = _weighted(rng, _TURNS)
    if style == "vague" and intent != "discovery":
        style = "plain"
    if style == "vague":
        turns = rng.choice((2, 3, 3, 4, 5))
    manner = MANNERS.get(style)

    def write(text: str, first: bool) -> str:
        if style == "vague":
            text = rng.choice((sentence_case, lambda t: t.lower()))(text)
        elif style == "fragment" and first:
            text = text if rng.random() < 0.4 else text.lower()
        elif manner is not None:
            text = manner(rng, sentence_case(text) if style != "dictation" else text)
        else:
            text = sentence_case(text)
        return scene.fill(text)

    users = [write(_first_turn(rng, grammar, scene, intent, style), first=True)]
    rules = (
        ["follow_any", f"follow_{intent}"]
        if style != "vague"
        else ["vague_follow", "vague_follow", "follow_any"]
    )
    while len(users) < turns:
        rule = rng.choice(rules)
        if len(users) == turns - 1 and turns > 2 and rng.random() < 0.15:
            rule = "follow_end"
        text = write(grammar.rule(rule, rng, scene), first=False)
        if text not in users:
            users.append(text)
    messages = [{"role": "user", "content": text} for text in users]
    if rng.random() < 0.22:
        system = scene.fill(sentence_case(grammar.rule("system", rng, scene)))
        messages.insert(0, {"role": "system", "content": system})
    return {
        "messages": messages,
        "category": category.id,
        "intent": intent,
        "style": style,
        "language": "en",
        "turns": len(users),
    }


def _first_turn(rng: random.Random, grammar, scene: Scene, intent: str, style: str) -> str:
    own = f"{style}_{intent}"
    if style == "vague":
        return grammar.rule("vague", rng, scene)
    if style in ("fragment", "email") or rng.random() < 0.4:
        if own in grammar:
            return grammar.rule(own, rng, scene)
    text = grammar.rule(f"intent_{intent}", rng, scene)
    if style == "email":
        hello, bye = grammar.rule("hello", rng, scene), grammar.rule("bye", rng, scene)
        return f"{hello},\n\n{sentence_case(text)}\n\n{bye}\n{grammar.rule('first_name', rng, scene)}"
    if style == "fragment":
        return text
    head = grammar.rule("opener", rng, scene) if rng.random() < 0.22 and text[0] not in "\x00-" else ""
    if head.endswith(","):
        text = (
            text[:1].lower() + text[1:]
            if not text[:2].isupper() and not text.startswith(("I ", "I'"))
            else text
        )
    tail = grammar.rule("form", rng, scene) if rng.random() < 0.16 else ""
    if rng.random() < 0.14:
        tail = f"{tail} {grammar.rule('closer', rng, scene)}"
    if tail and text[-1:] not in ".?!\x00":
        text += "."
    joint = "\n\n" if "\x00" in text[-2:] else " "
    return tidy(f"{head} {text}{joint if tail else ''}{tail}")
