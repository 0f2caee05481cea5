"""Messages to tokens by the base's chat template, and which of the tokens the assistant produced.

A *segment* is one assistant turn: the tokens the base has to produce there, with the end-of-turn token when
it ended the turn by itself. Its place is found by the template, never by searching for text, so repeated or
empty turns cannot fool it.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from medusa.errors import MedusaError

Message = dict[str, str]
Span = tuple[int, int]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Tokens of a conversation up to where the assistant's next turn begins.

    Raises:
        MedusaError: the tokenizer has no chat template, or the template refuses the messages.
    """
    return _encode(tokenizer, _render(tokenizer, messages, True))


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    finish: Sequence[str] | None = None,
    max_length: int | None = None,
) -> tuple[list[int], list[Span]]:
    """Tokens of a conversation and the spans of them that the assistant produced.

    Args:
        tokenizer: a fast one, with a chat template.
        messages: {"role", "content"}, the last one the assistant's if it is to be learned from.
        finish: for each assistant turn "stop" or "length"; the end-of-turn token is part of the segment
            unless the turn was cut off by the length limit. None: all ended by themselves.
        max_length: tokens after this many are dropped, and with them the segments that lie there; a segment
            that crosses it is shortened, one that begins after it is gone.

    Returns:
        (ids, segments): token ids, and (start, stop) spans into them, none empty; no spans if nothing the
        assistant said is left.

    Raises:
        MedusaError: `finish` does not fit the assistant's turns; no chat template; the template rewrites
            earlier turns, so that where a turn lies cannot be told.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if finish is not None and len(finish) != len(turns):
        raise MedusaError(
            f"a conversation has {len(turns)} assistant turns and {len(finish)} entries in `finish`"
        )
    spans: list[tuple[int, int]] = []  # in characters of the rendered text
    text = _render(tokenizer, messages, False)
    for number, i in enumerate(turns):
        start = len(_prefix(tokenizer, text, messages[:i], True))
        content = messages[i]["content"]
        end = len(_prefix(tokenizer, text, messages[: i + 1], False))
        body = text[start:end]
        # Templates may strip the content; the turn's tokens are those up to the end of what is left of it.
        kept = content if body.startswith(content) else content.strip()
        if not body.startswith(kept):
            raise MedusaError(
                "the chat template does not put the assistant's words right after its generation prompt "
                f"(message {i}); such a template is not supported"
            )
        stopped = finish is None or finish[number] == "stop"
        spans.append(
            (start, start + len(kept) + (_end_of_turn(tokenizer, body[len(kept) :]) if stopped else 0))
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    if max_length is not None:
        ids, offsets = ids[:max_length], offsets[:max_length]
    return ids, _to_tokens(spans, offsets)


def _to_tokens(spans: list[tuple[int, int]], offsets: list[tuple[int, int]]) -> list[Span]:
    segments, at = [], 0
    for first, last in spans:
        while at < len(offsets) and offsets[at][0] < first:
            at += 1
        start = at
        while at < len(offsets) and offsets[at][1] <= last:
            at += 1
        if at > start:
            segments.append((start, at))
    return segments


def _prefix(tokenizer: PreTrainedTokenizerBase, text: str, messages: Sequence[Message], prompt: bool) -> str:
    """The rendered beginning of a conversation, checked to be the beginning of the whole of it."""
    part = _render(tokenizer, messages, prompt)
    if not text.startswith(part):
        raise MedusaError(
            "the chat template renders the beginning of a conversation differently once it goes on, so the "
            "assistant's tokens cannot be told; use a template that does not rewrite earlier turns"
        )
    return part


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, tail: str) -> int:
    """Characters of the end-of-turn token that `tail`, the template's text after the content, begins with."""
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    for token in sorted({*tokens, *tokenizer.all_special_tokens}, key=len, reverse=True):
        if tail.startswith(token):
            return len(token)
    return 0


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: bool) -> str:
    if not messages and not prompt:
        return ""
    if tokenizer.chat_template is None:
        raise MedusaError("the base's tokenizer has no chat template; use an instruction-tuned base")
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    except (TemplateError, TypeError, KeyError) as error:
        raise MedusaError(f"the chat template refuses a conversation: {error}") from error
