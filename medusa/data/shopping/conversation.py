"""The user turns (and at times a system message) of one shopping conversation."""

import random

from medusa.data.shopping.grammar import Grammar, sentence_case, shopping_grammar, tidy
from medusa.data.shopping.manner import MANNERS
from medusa.data.shopping.products import Category
from medusa.data.shopping.scene import Scene

PRODUCT_INTENTS = (
    "discovery",
    "comparison",
    "specification",
    "compatibility",
    "sizing",
    "care",
    "gift",
    "budget",
    "reviews",
    "alternatives",
    "bundle",
    "decision",
)
SERVICE_INTENTS = ("order", "returns", "delivery", "troubleshooting")
INTENTS = PRODUCT_INTENTS + SERVICE_INTENTS

# Manner of the whole conversation -> weight. Two more are decided by themselves: "vague" starts with next to
# nothing and tells the need over several turns; "foreign" is written in another language than English.
STYLES = {
    "plain": 42,
    "lower": 17,
    "typos": 9,
    "chat": 10,
    "fragment": 8,
    "dictation": 4,
    "email": 5,
    "shout": 1,
}
LANGUAGES = {"de": 30, "fr": 20, "es": 20, "it": 12, "pt": 8, "nl": 10}
_TURNS = {1: 40, 2: 28, 3: 19, 4: 8, 5: 4, 6: 1}
_FOREIGN_SHARE = 0.24  # of the conversations whose intent and category have words in the language drawn
_VAGUE_SHARE = 0.4  # of the intent "discovery"
_SYSTEM_SHARE = 0.22


def _weighted(rng: random.Random, weights: dict):
    return rng.choices(list(weights), list(weights.values()))[0]


def make_conversation(rng: random.Random, category: Category, intent: str) -> dict:
    """One conversation of system and user turns.

    Returns {"messages", "category", "intent", "style", "language", "turns"}.
    """
    grammar = shopping_grammar()
    language = _weighted(rng, LANGUAGES) if rng.random() < _FOREIGN_SHARE else "en"
    if language not in category.foreign or f"{language}_{intent}" not in grammar:
        language = "en"
    scene = Scene(category, rng, language)
    style = _weighted(rng, STYLES)
    turns = _weighted(rng, _TURNS)
    if language != "en":
        style = "foreign"
    elif intent == "discovery" and rng.random() < _VAGUE_SHARE:
        style, turns = "vague", rng.choice((2, 3, 3, 4, 4, 5, 6))
    careless = style in ("vague", "foreign") and rng.random() < 0.4

    def write(rule: str | None, first: bool) -> str:
        text = (
            _first_turn(rng, grammar, scene, intent, style, language)
            if first
            else grammar.rule(rule, rng, scene)
        )
        if careless or (style == "fragment" and first and rng.random() < 0.6):
            text = text.lower()
        elif style in MANNERS:
            text = MANNERS[style](rng, text if style == "dictation" else sentence_case(text))
        elif style != "fragment" or not first:
            text = sentence_case(text)
        return scene.fill(text)

    users = [write(None, first=True)]
    rules = _follow_rules(intent, style, language)
    while len(users) < turns:
        ends = len(users) == turns - 1 and turns > 2 and language == "en" and rng.random() < 0.15
        text = write("follow_end" if ends else rng.choice(rules), first=False)
        if text not in users:
            users.append(text)
    messages = [{"role": "user", "content": text} for text in users]
    if rng.random() < _SYSTEM_SHARE:
        system = scene.fill(sentence_case(grammar.rule("system", rng, scene)))
        messages.insert(0, {"role": "system", "content": system})
    return {
        "messages": messages,
        "category": category.id,
        "intent": intent,
        "style": style,
        "language": language,
        "turns": len(users),
    }


def _follow_rules(intent: str, style: str, language: str) -> list[str]:
    """Rules that later turns are drawn from, the likelier ones more than once."""
    if language != "en":
        return [f"{language}_follow"]
    if style == "vague":
        return ["vague_follow", "vague_follow", "follow_discovery", "follow_product"]
    kind = "follow_product" if intent in PRODUCT_INTENTS else "follow_service"
    return [f"follow_{intent}", f"follow_{intent}", kind, kind, "follow_any"]


def _first_turn(
    rng: random.Random, grammar: Grammar, scene: Scene, intent: str, style: str, language: str
) -> str:
    if style == "foreign":
        return grammar.rule(f"{language}_{intent}", rng, scene)
    if style == "vague":
        return grammar.rule("vague", rng, scene)
    own = f"{style}_{intent}"
    if own in grammar and (style in ("fragment", "email") or rng.random() < 0.4):
        return grammar.rule(own, rng, scene)
    text = grammar.rule(f"intent_{intent}", rng, scene)
    if style == "email":
        hello, bye = grammar.rule("hello", rng, scene), grammar.rule("bye", rng, scene)
        return f"{hello},\n\n{sentence_case(text)}\n\n{bye}\n{grammar.rule('first_name', rng, scene)}"
    if style == "fragment":
        return text
    head = grammar.rule("opener", rng, scene) if rng.random() < 0.22 and text[0] not in "\x00-" else ""
    if head and head[-1] not in ".?!:" and not text[:2].isupper() and not text.startswith(("I ", "I'")):
        text = text[:1].lower() + text[1:]
    tail = grammar.rule("form", rng, scene) if rng.random() < 0.16 else ""
    if rng.random() < 0.14:
        tail = f"{tail} {grammar.rule('closer', rng, scene)}"
    if tail and text[-1:] not in ".?!\x00":
        text += "."
    joint = "\n\n" if "\x00" in text[-2:] else " "
    return tidy(f"{head} {text}{joint if tail else ''}{tail}")
