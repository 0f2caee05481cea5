"""Self-distillation: the base answers the prompts, so that heads learn to guess what it really says.

Every assistant turn is generated in its own context: system message, user turns, and the base's own earlier
answers. When a turn ends, the conversation's next one becomes a request; conversations fill each other's
gaps. Rows are appended as conversations end, so a run that was killed goes on where it was; a torn last line
is dropped.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from medusa.base import Base
from medusa.data.backends import Backend
from medusa.data.conversations import Row
from medusa.data.interrupts import soft_sigterm, undisturbed
from medusa.data.rows import RowFile
from medusa.data.states import NoAnswers, StatesWriter
from medusa.data.template import encode_prompt
from medusa.errors import MedusaError
from medusa.generation import Completion, Request
from medusa.sampling import SamplingParams

_LEAST_ROOM = 32  # tokens that must be left for an answer, unless fewer are asked for


@dataclass(frozen=True)
class Sampling:
    """How the base answers.

    Attributes:
        max_new_tokens: most tokens of a turn; turns cut off by it are kept and marked.
        greedy_share: share of the conversations answered greedily, all turns of them; the others are sampled.
        temperature: (low, high); each sampled conversation gets one between them.
        top_p: nucleus mass of the sampled ones.
        seed: of the choice and of the sampling; with the conversation's id it decides both.
    """

    max_new_tokens: int = 256
    greedy_share: float = 0.7
    temperature: tuple[float, float] = (0.7, 1.0)
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.temperature
        if self.max_new_tokens < 1:
            raise MedusaError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.greedy_share <= 1:
            raise MedusaError(f"greedy_share must lie between 0 and 1, not {self.greedy_share}")
        if not 0 < low <= high < math.inf:
            raise MedusaError(
                f"temperature must be (low, high), 0 < low <= high, both finite, not {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise MedusaError(f"top_p must lie in (0, 1], not {self.top_p}")

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**vars(self), "temperature": list(self.temperature)}


@dataclass
class Distilled:
    """What a run did; earlier runs' rows are only in `rows`.

    Attributes:
        rows: conversations in the file.
        new: conversations added.
        skipped: prompts without room for an answer in the context.
        tokens: tokens generated.
        seconds: wall-clock time of generating.
    """

    rows: int = 0
    new: int = 0
    skipped: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Conversation:
    """A conversation while it is being answered."""

    row: Row
    waiting: deque[dict[str, str]]  # turns that were not said yet
    sampling: dict[str, float]
    seed: int
    messages: list[dict[str, str]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    answers: list[tuple[list[int], torch.Tensor | None]] = field(default_factory=list)

    @classmethod
    def open(cls, row: Row, sampling: Sampling) -> _Conversation:
        rng = random.Random(f"{sampling.seed}:{row['id']}")
        greedy = rng.random() < sampling.greedy_share
        temperature = 0.0 if greedy else round(rng.uniform(*sampling.temperature), 3)
        asked = deque(message for message in row["messages"] if message["role"] != "assistant")
        chosen = {"temperature": temperature, "top_p": 1.0 if greedy else sampling.top_p}
        return cls(row, asked, chosen, rng.getrandbits(31))

    def say_next(self) -> None:
        """Moves the next user turn into the context, with the system message before it if there is one."""
        self.messages.append(self.waiting.popleft())
        if self.messages[-1]["role"] == "system":
            self.messages.append(self.waiting.popleft())

    def answer(self, completion: Completion) -> None:
        text = completion.text
        if completion.finish == "length":
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the limit fell inside a character
        self.messages.append({"role": "assistant", "content": text})
        self.finish.append(completion.finish)
        self.answers.append((completion.token_ids, completion.hidden))

    def to_row(self) -> Row:
        """The row, without turns that were never answered."""
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        kept = self.messages[: last + 1]
        tokens = [len(ids) for ids, _ in self.answers]
        made = {"finish": self.finish, "tokens": tokens, "sampling": self.sampling}
        return {**self.row, "messages": kept, **made}


def distill(
    prompts: Sequence[Row],
    out: Path | str,
    base: Base,
    backend: Backend,
    *,
    sampling: Sampling | None = None,
    token_budget: int | None = None,
    seconds: float | None = None,
    states_dir: Path | str | None = None,
    progress: bool = True,
    log: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Distilled:
    """Answers prompts and appends the conversations to `out`; those that are there are not done again.

    Args:
        prompts: normalised rows with distinct ids; assistant turns in them are left out and generated anew.
        out: a .jsonl file; `<out>.manifest.json` beside it says how it was made.
        base: its tokenizer, fingerprints, and with `states_dir` its weights.
        backend: what answers.
        sampling: how; None: the defaults.
        token_budget: no conversation is begun once the answers in `out` have this many tokens together; None:
            all prompts.
        seconds: neither a conversation nor a further turn is begun after so long in this call.
        states_dir: also write the hidden-state cache there (see `medusa.data.states`): from the decoding
            itself where the backend gives hidden states, else by running the base over the answers at the
            end.
        progress: show a progress bar.
        log: takes lines for people.

    Returns:
        What was done.

    Raises:
        MedusaError: ids repeat; `out` was made with another base or other settings, or is not such a file;
            `states_dir` holds something else; the disk is full.
        KeyboardInterrupt, SystemExit: Ctrl-C, SIGTERM. Every answer and its states are saved by then.
    """
    sampling = sampling or Sampling()
    repeated = [name for name, count in Counter(row["id"] for row in prompts).items() if count > 1]
    if repeated:
        raise MedusaError(f"several prompts have the id {repeated[0]!r}; give each its own")
    made = {"fingerprint": base.fingerprints, "sampling": sampling.to_dict()}
    with soft_sigterm(), RowFile(out, made, fields=("id", "messages", "finish")) as file:
        done = {row["id"] for row in file.rows}
        todo = [row for row in prompts if row["id"] not in done]
        report = Distilled(rows=len(file.rows))
        states = None
        if states_dir is not None:
            states = StatesWriter(base, file.rows, Path(states_dir))
        began = time.perf_counter()
        want_hidden = states is not None and backend.gives_hidden
        earlier = sum(sum(row.get("tokens", ())) for row in file.rows)

        def late() -> bool:
            return seconds is not None and time.perf_counter() - began >= seconds

        def enough() -> bool:
            """Whether to begin no further conversation."""
            return late() or (token_budget is not None and earlier + report.tokens >= token_budget)

        def save() -> None:
            with undisturbed():
                file.sync()  # never states of answers that a power cut takes away
                if states is not None:
                    states.flush()

        answered = _answer(todo, base, backend, sampling, enough, late, report, want_hidden)
        begun = len(prompts) - len(todo)
        with (
            tqdm(total=len(prompts), initial=begun, unit=" conversations", disable=not progress) as bar,
            contextlib.ExitStack() as interrupted,
        ):
            interrupted.callback(save)  # Ctrl-C and SIGTERM lose no states
            for conversation in answered:
                row = conversation.to_row()
                file.append(row)
                if states is not None and states.add(row, conversation.answers):
                    save()
                report.new += 1
                report.rows += 1
                report.seconds = time.perf_counter() - began
                rate = f"{report.tokens:,} tokens, {report.tokens_per_second:,.0f} tokens/s"
                bar.set_postfix_str(rate, refresh=False)
                bar.update()
        if report.skipped:
            log(
                f"{report.skipped} prompts left no room for an answer in {backend.max_length} tokens: skipped"
            )
        if states is not None:
            _finish(states, progress, log)
    return report


def _finish(states: StatesWriter, progress: bool, log: Callable[[str], None]) -> None:
    try:
        states.close(progress=progress)
    except NoAnswers:  # a part without prompts, or a budget that is spent: nothing is wrong
        states.remove_if_empty()
        log("no answers, so no hidden states either")


def _answer(
    todo: Sequence[Row],
    base: Base,
    backend: Backend,
    sampling: Sampling,
    enough: Callable[[], bool],
    late: Callable[[], bool],
    report: Distilled,
    want_hidden: bool,
) -> Iterator[_Conversation]:
    """Yields conversations as they end. Counts tokens and skipped prompts in `report`."""
    fresh = iter(todo)
    ready: deque[Request] = deque()
    open_conversations = 0

    def request(conversation: _Conversation) -> Request | None:
        """The conversation's next turn, or None if it has none, or no room for it."""
        if not conversation.waiting:
            return None
        conversation.say_next()
        ids = encode_prompt(base.tokenizer, conversation.messages)
        room = backend.max_length - len(ids)
        if room < min(_LEAST_ROOM, sampling.max_new_tokens):
            return None
        return Request(
            ids,
            max_new_tokens=sampling.max_new_tokens,
            sampling=SamplingParams(
                temperature=conversation.sampling["temperature"],
                top_p=conversation.sampling["top_p"],
                seed=conversation.seed + len(conversation.finish),
            ),
            key=conversation,
            want_hidden=want_hidden,
        )

    def requests() -> Iterator[Request | None]:
        nonlocal open_conversations
        while True:
            if ready:
                yield ready.popleft()
                continue
            row = None if enough() else next(fresh, None)
            if row is not None:
                first = request(_Conversation.open(row, sampling))
                if first is None:
                    report.skipped += 1
                else:
                    open_conversations += 1
                    yield first
            elif open_conversations:
                yield None
            else:
                return

    for completion in backend.complete(requests()):
        conversation: _Conversation = completion.key
        conversation.answer(completion)
        report.tokens += len(completion.token_ids)
        # When time is up an open conversation ends with this turn: its others could take as long again.
        following = None if late() else request(conversation)
        if following is not None:
            ready.append(following)
        else:
            open_conversations -= 1
            yield conversation
