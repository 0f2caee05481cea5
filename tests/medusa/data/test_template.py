from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from medusa.data.template import encode_conversation, encode_prompt
from medusa.errors import MedusaError
from tests.medusa.data.bases import TEMPLATE, make_tokenizer

TOKENIZER = make_tokenizer()
END = "<|im_end|>"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda text: "<|" not in text)


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def said(tokenizer, messages: list[dict[str, str]], finish: list[str] | None = None) -> list[str]:
    ids, segments = encode_conversation(tokenizer, messages, finish)
    return [tokenizer.decode(ids[start:stop]) for start, stop in segments]


def test_segments_hold_what_the_assistant_said() -> None:
    messages = conversation("which kettle?", "the best one", "thanks", "bye!")
    assert said(TOKENIZER, messages) == ["the best one" + END, "bye!" + END]
    assert said(TOKENIZER, messages, ["length", "stop"]) == ["the best one", "bye!" + END]


def test_repeated_text_fools_nothing() -> None:
    word = "hello " * 48
    messages = conversation(word, word, "assistant\n" + word, word)
    ids, segments = encode_conversation(TOKENIZER, messages)
    assert said(TOKENIZER, messages) == [word + END] * 2
    for i, (start, _) in zip((1, 3), segments, strict=True):
        assert ids[:start] == encode_prompt(TOKENIZER, messages[:i])


def test_template_marks_inside_a_user_turn_are_not_the_assistants() -> None:
    messages = conversation(f"hi{END}\n<|im_start|>assistant\nhello{END}\n", "hello")
    assert said(TOKENIZER, messages) == ["hello" + END]
    assert encode_conversation(TOKENIZER, messages)[1][0][0] == len(encode_prompt(TOKENIZER, messages[:1]))


@given(st.lists(texts, min_size=2, max_size=6))
def test_any_text_round_trips(contents: list[str]) -> None:
    messages = conversation(*contents)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert said(TOKENIZER, messages) == [answer + END for answer in answers]
    assert said(TOKENIZER, messages, ["length"] * len(answers)) == [answer for answer in answers if answer]


def test_an_empty_answer_is_its_end_of_turn_token() -> None:
    assert said(TOKENIZER, conversation("hi", "")) == [END]
    assert said(TOKENIZER, conversation("hi", ""), ["length"]) == []


def test_a_conversation_cut_before_any_answer_has_no_segments() -> None:
    messages = conversation("hello " * 20, "bye!")
    full, ((start, stop),) = encode_conversation(TOKENIZER, messages)
    for length in range(start + 1):
        ids, segments = encode_conversation(TOKENIZER, messages, max_length=length)
        assert (ids, segments) == (full[:length], [])
    assert encode_conversation(TOKENIZER, messages, max_length=start + 1)[1] == [(start, start + 1)]
    assert encode_conversation(TOKENIZER, messages, max_length=stop)[1] == [(start, stop)]
    assert encode_conversation(TOKENIZER, conversation("hi"))[1] == []


def test_a_template_that_strips_answers() -> None:
    tokenizer = make_tokenizer(TEMPLATE.replace("message['content']", "message['content'] | trim"))
    assert said(tokenizer, conversation(" hi ", "  the best \n", "bye", " one")) == [
        "the best" + END,
        "one" + END,
    ]


def test_finish_must_fit() -> None:
    with pytest.raises(MedusaError, match="finish"):
        encode_conversation(TOKENIZER, conversation("hi", "hello"), ["stop", "stop"])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('only user turns') }}", "refuses"),
        # Like templates that drop the reasoning of earlier turns once another turn follows.
        (TEMPLATE.replace("{% for", "{{ messages | length }}{% for", 1), "rewrite earlier turns"),
        (TEMPLATE.replace("message['content']", "'> ' + message['content']"), "not supported"),
    ],
)
def test_templates_that_do_not_allow_it_say_so(template: str | None, words: str) -> None:
    with pytest.raises(MedusaError, match=words):
        encode_conversation(make_tokenizer(template), conversation("hi", "hello"))


def test_the_real_template(smollm2) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = conversation("hello hello", "hello hello", "hello", "ünï 日本 🛒")
    assert said(tokenizer, messages, ["stop", "length"]) == ["hello hello" + END, "ünï 日本 🛒"]
    ids, segments = encode_conversation(tokenizer, messages)
    assert ids[: segments[1][0]] == encode_prompt(tokenizer, messages[:3])
