"""Text out of a stream of token ids: never half a character, never part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from medusa.errors import MedusaError


class TextStream:
    """Turns committed token ids into text piece by piece.

    Pieces end at whole characters. While the text's end could be the beginning of a stop string it is held back.

    Args:
        tokenizer: a fast tokenizer.
        stop: the text ends before the first of these.

    Raises:
        MedusaError: the tokenizer is not a fast one, or a stop string is empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        if not tokenizer.is_fast:
            raise MedusaError(f"{type(tokenizer).__name__} cannot stream text; a fast tokenizer is needed")
        if any(not text for text in stop):
            raise MedusaError("an empty stop string would stop at once; leave it out")
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._pieces = ""  # whole characters decoded so far
        self._sent = 0  # how many of them were handed out
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return self._pieces[: self._sent]

    def push(self, token: int) -> str:
        """Adds one token; returns the new text, perhaps none. Sets `stopped` when a stop string is complete."""
        self._ids.append(token)
        piece = self._decoder.step(self._tokenizer._tokenizer, token)
        if not piece:
            return ""
        searched = max(0, len(self._pieces) - max((len(text) for text in self._stop), default=0))
        self._pieces += piece
        ends = [at for text in self._stop if (at := self._pieces.find(text, searched)) >= 0]
        if ends:
            self.stopped, self._pieces = True, self._pieces[: min(ends)]
            return self._take(len(self._pieces))
        return self._take(len(self._pieces) - self._held())

    def finish(self) -> str:
        """The text that was still held back. Bytes that never became a character come out as U+FFFD."""
        if not self.stopped:
            whole = self._tokenizer.decode(
                self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            if whole.startswith(self._pieces):
                self._pieces = whole
        return self._take(len(self._pieces))

    def _held(self) -> int:
        """How many characters at the end could begin a stop string."""
        longest = 0
        for text in self._stop:
            for size in range(min(len(text) - 1, len(self._pieces)), longest, -1):
                if self._pieces.endswith(text[:size]):
                    longest = size
                    break
        return longest

    def _take(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self._pieces[start : self._sent]
