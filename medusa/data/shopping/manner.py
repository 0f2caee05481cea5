"""Manners of typing: what turns a well-formed sentence into what arrives in a chat window."""

import random
import re

_NEAR = {
    **dict(
        zip("qwertyuiop", ("wa", "qes", "wrd", "etf", "ryg", "tuh", "yij", "uok", "ipl", "ol"), strict=True)
    ),
    **dict(zip("asdfghjkl", ("sq", "adw", "sfe", "dgr", "fht", "gjy", "hku", "jli", "ko"), strict=True)),
    **dict(zip("zxcvbnm", ("x", "zc", "xv", "cb", "vn", "bm", "n"), strict=True)),
}
_SHORT = {
    "you": "u",
    "please": "pls",
    "thanks": "thx",
    "because": "cuz",
    "are": "r",
    "between": "btwn",
    "with": "w/",
    "without": "w/o",
    "recommend": "rec",
    "about": "abt",
    "really": "rly",
    "probably": "prob",
    "what's": "whats",
    "I'm": "im",
    "don't": "dont",
    "it's": "its",
    "I'd": "id",
    "can't": "cant",
    "question": "q",
    "and": "n",
    "for": "4",
    "to be honest": "tbh",
    "something": "sth",
    "should": "shud",
    "tomorrow": "tmrw",
    "right now": "rn",
}
_MISSPELT = {
    "recommend": "recomend",
    "definitely": "definately",
    "receive": "recieve",
    "received": "recieved",
    "which": "wich",
    "difference": "diffrence",
    "comfortable": "comfertable",
    "warranty": "warrenty",
    "compatible": "compatable",
    "really": "realy",
    "their": "there",
    "too": "to",
    "separately": "seperately",
    "accessories": "accesories",
    "budget": "buget",
    "quality": "qualtiy",
    "address": "adress",
    "believe": "beleive",
    "until": "untill",
    "battery": "batery",
    "your": "you're",
    "delivery": "delievery",
    "the": "teh",
    "with": "wiht",
    "should": "shoud",
    "because": "becuase",
    "would": "woud",
    "it's": "its",
    "don't": "dont",
    "what's": "whats",
    "I'm": "Im",
}


def lower(rng: random.Random, text: str) -> str:
    """All lower case, now and then without full stops or question marks at the end."""
    text = text.lower()
    if rng.random() < 0.5:
        text = re.sub(r"[.?!]+(?=\s*$)", "", text)
    if rng.random() < 0.3:
        text = text.replace("'", "")
    if rng.random() < 0.2:
        text = re.sub(r"[,;]", "", text)
    return text


def typos(rng: random.Random, text: str) -> str:
    """Typing errors in a few words: a swapped, missing, doubled or neighbouring letter, a misspelling."""

    def slip(match: re.Match) -> str:
        word = match[0]
        known = _MISSPELT.get(word) or (_MISSPELT.get(word.lower()) if rng.random() < 0.5 else None)
        if known and rng.random() < 0.5:
            return known
        if len(word) < 4 or rng.random() > rate:
            return word
        i = rng.randrange(1, len(word) - 1)
        kind = rng.randrange(4)
        if kind == 0:
            return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
        if kind == 1:
            return word[:i] + word[i + 1 :]
        if kind == 2:
            return word[:i] + word[i] + word[i:]
        return word[:i] + rng.choice(_NEAR.get(word[i].lower(), word[i])) + word[i + 1 :]

    rate = rng.choice((0.06, 0.1, 0.16))
    text = re.sub(r"[A-Za-z']+", slip, text)
    if rng.random() < 0.3:
        text = re.sub(r"([,.?!]) ", lambda m: m[1] if rng.random() < 0.3 else m[0], text)
    return lower(rng, text) if rng.random() < 0.5 else text


def chat(rng: random.Random, text: str) -> str:
    """Chat shorthand, lower case, few full stops."""
    share = rng.choice((0.3, 0.6, 0.9))
    for word, short in _SHORT.items():
        text = re.sub(
            rf"(?<![\w'/-]){re.escape(word)}(?![\w'/-])",
            lambda m, s=short: s if rng.random() < share else m[0],
            text,
            flags=re.IGNORECASE,
        )
    if rng.random() < 0.85:
        text = text.lower()
    if rng.random() < 0.5:
        text = re.sub(r"\.(?=\s|$)", rng.choice(("", "", "...", " ,")), text).strip(" ,")
    if rng.random() < 0.2:
        text = text.rstrip() + rng.choice(
            (" lol", " thx", " :)", " 🙏", " haha", " pls", " ty", "??", "!!", " 😊")
        )
    return text


def dictation(rng: random.Random, text: str) -> str:
    """Spoken words as a phone writes them down: no punctuation, fillers, a restart."""
    text = re.sub(r"[.?!;:,]+(?=\s|$)", "", text).replace("\n", " ")
    words = text.split()
    if not words[0].startswith("I"):
        words[0] = words[0][:1].lower() + words[0][1:]
    for _ in range(rng.randint(1, 3)):
        words.insert(
            rng.randrange(len(words) + 1),
            rng.choice(("um", "you know", "like", "I mean", "so", "well", "uh")),
        )
    start = rng.choice(("okay so", "so", "hey", "hi", "yeah so", "um", "right", ""))
    return f"{start} {' '.join(words)}".strip()


def shout(rng: random.Random, text: str) -> str:
    """Capitals throughout, as angry or careless people type."""
    return text.upper()


MANNERS = {"lower": lower, "typos": typos, "chat": chat, "dictation": dictation, "shout": shout}
