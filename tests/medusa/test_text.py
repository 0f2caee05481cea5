import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa.errors import MedusaError
from medusa.text import TextStream


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: every character outside ASCII is split over several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {letter: number for number, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


TOKENIZER = byte_tokenizer()
# Letters are few, so that stop strings occur and nearly occur.
TEXT = st.text(alphabet="ab é😀\n", max_size=30)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@given(TEXT)
def test_pieces_are_whole_characters_and_add_up(text):
    stream, pieces = TextStream(TOKENIZER), []
    for token in ids(text):
        pieces.append(stream.push(token))
    pieces.append(stream.finish())
    assert "".join(pieces) == text == stream.text
    assert not any("\ufffd" in piece for piece in pieces)


@given(TEXT, st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text, stop):
    stream, sent = TextStream(TOKENIZER, stop), ""
    for token in ids(text):
        sent += stream.push(token)
        assert not any(word in sent for word in stop)
        if stream.stopped:
            break
    sent += stream.finish()
    # The obvious rule: the shortest beginning of the text that holds a stop string, cut before it.
    expected = text
    for end in range(len(text) + 1):
        found = [text[:end].find(word) for word in stop if word in text[:end]]
        if found:
            expected = text[: min(found)]
            break
    assert sent == expected
    assert stream.stopped == (expected != text or any(word in text for word in stop))


def test_half_a_character_at_the_end_comes_out_as_the_replacement():
    stream = TextStream(TOKENIZER)
    sent = "".join(stream.push(token) for token in ids("a😀")[:-1])
    assert sent == "a"
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_no_text():
    stream = TextStream(TOKENIZER)
    assert stream.push(0) + stream.push(ids("a")[0]) + stream.finish() == "a"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(MedusaError, match="empty stop string"):
        TextStream(TOKENIZER, [""])
