"""Which texts of a base could be a user's turn: pure functions, and a memory of what was there before."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict

_LEAST_WORDS, _MOST_WORDS = 3, 220
_LATIN_SHARE = 0.95  # of the letters
_WORD = re.compile(r"\w+(?:['’]\w+)?")
# What assistants say, not users; and blanks that nobody filled in.
_ASSISTANT = re.compile(
    r"^(sure|certainly|of course|absolutely|i'd be happy|i would be happy|i'm happy to"
    r"|as an ai|i can help you|here('s| is| are) (an?|the|some|your)"
    r"|based on (the|your) (text|input|document|information)"
    r"|you are (an?|the) |thank you for (reaching|contacting|providing)"
    r"|(i'm|i am) sorry(, but| for)|we apologi[sz]e)",
    re.IGNORECASE,
)
_BLANK = re.compile(r"\[[A-Za-z][A-Za-z '/]{2,}\]|\{[a-z_ ]+\}|<[a-z_ ]+>|lorem ipsum", re.IGNORECASE)


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.lower())


def reject(text: str) -> str | None:
    """Why a text is no user turn (short, long, language, repetition, assistant, blank); None if it is one."""
    words = words_of(text)
    if len(words) < _LEAST_WORDS:
        return "short"
    if len(words) > _MOST_WORDS:
        return "long"
    if not _mostly_latin(text):
        return "language"
    if _repetitive(words):
        return "repetition"
    if _ASSISTANT.match(text):
        return "assistant"
    if _BLANK.search(text):
        return "blank"
    return None


def _mostly_latin(text: str) -> bool:
    letters = [character for character in text if character.isalpha()]
    latin = sum(c.isascii() or unicodedata.name(c, "").startswith("LATIN") for c in letters)
    return bool(letters) and "\N{REPLACEMENT CHARACTER}" not in text and latin >= _LATIN_SHARE * len(letters)


def _repetitive(words: list[str]) -> bool:
    triples = list(zip(words, words[1:], words[2:], strict=False))
    if any(a == b == c for a, b, c in triples):
        return True
    if len(words) < 12:
        return False
    most = Counter(triples).most_common(1)[0][1]
    return len(set(words)) < 0.4 * len(words) or most > max(2, len(words) // 25)


class NearDuplicates:
    """Remembers texts; tells whether a new one is nearly one of them.

    Two texts are near duplicates if at least `threshold` of their word triples together are common to both
    (the Jaccard index). Case, punctuation and numbers do not count.
    """

    def __init__(self, threshold: float = 0.5):
        self._threshold = threshold
        self._sizes: list[int] = []
        self._holders: dict[tuple[str, ...], list[int]] = defaultdict(list)

    def seen(self, text: str) -> bool:
        """Whether a text like this was added."""
        triples = self._triples(text)
        common = Counter(number for triple in triples for number in self._holders.get(triple, ()))
        return any(
            count >= self._threshold * (len(triples) + self._sizes[number] - count)
            for number, count in common.items()
        )

    def add(self, text: str) -> None:
        """Remembers a text."""
        triples = self._triples(text)
        for triple in triples:
            self._holders[triple].append(len(self._sizes))
        self._sizes.append(len(triples))

    @staticmethod
    def _triples(text: str) -> set[tuple[str, ...]]:
        words = [word for word in words_of(text) if not word.isdigit()]
        return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}
