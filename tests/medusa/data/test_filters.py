from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa.data.filters import NearDuplicates, reject, words_of

WORDS = [f"word{chr(97 + i)}{chr(97 + j)}" for i in range(20) for j in range(20)]


@pytest.mark.parametrize(
    "text",
    [
        "which kettle is best for hard water?",
        "hi, my order 12345 never arrived, can you check please",
        "j'ai commandé un grille-pain qui ne marche pas, que faire ?",
        "Écharpe ou bonnet pour ma mère?",
        "Summarize this: the shop opened in 1990. It moved twice. It has sold bread ever since.",
        "def f(x): return x  # why does this not print?",
    ],
)
def test_people_write_like_this(text: str) -> None:
    assert reject(text) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "short"),
        ("ok thanks", "short"),
        (" ".join(WORDS[:221]), "long"),
        ("какой чайник лучше выбрать?", "language"),
        ("which kettle \N{REPLACEMENT CHARACTER} is best", "language"),
        ("1 2 3 4 5", "language"),
        ("is it very very very good", "repetition"),
        ("is it red or is it blue or is it green or is it red or is it blue", "repetition"),
        ("Sure, here is a list of kettles", "assistant"),
        ("I'd be happy to help you with that", "assistant"),
        ("You are a helpful shopping assistant", "assistant"),
        ("Dear [Customer Name], where is my order", "blank"),
        ("I want to buy {product_name} for my wife", "blank"),
    ],
)
def test_people_do_not_write_like_this(text: str, why: str) -> None:
    assert reject(text) == why


@given(st.text())
def test_any_text_gets_an_answer(text: str) -> None:
    assert reject(text) in (None, "short", "long", "language", "repetition", "assistant", "blank")


def jaccard(a: str, b: str) -> float:
    def triples(text: str) -> set:
        words = [word for word in words_of(text) if not word.isdigit()]
        return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}

    return len(triples(a) & triples(b)) / len(triples(a) | triples(b))


def test_near_duplicates_are_those_with_half_their_triples_in_common() -> None:
    rng = random.Random(3)
    texts = [" ".join(rng.choices(WORDS[:4], k=rng.randint(1, 6))) for _ in range(150)]
    memory, added, found = NearDuplicates(), [], 0
    for text in texts:
        expected = any(jaccard(text, other) >= 0.5 for other in added)
        assert memory.seen(text) == expected
        found += expected
        memory.add(text)
        added.append(text)
    assert 20 < found < 130


def test_case_marks_and_numbers_do_not_make_a_text_new() -> None:
    memory = NearDuplicates()
    memory.add("Where is my order no. 7235401? It is late.")
    assert memory.seen("where is my order no 99 it is late")
    assert not memory.seen("can i return my order if it is late")
