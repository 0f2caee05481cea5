"""Prompts that the base writes itself: Magpie, arXiv 2406.08464.

An instruction-tuned base that is given its chat template up to where a user's turn begins writes a user turn:
what it saw in its tuning, so what it will answer best. A system message steers it, to shopping or to the
tasks of its tuning, and some turns are begun for it the way people begin them. Some conversations get an
answer and a further user turn. What comes is filtered (`filters.py`); heads need varied and plausible
prompts, not perfect ones.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from medusa.base import Base
from medusa.data.backends import Backend
from medusa.data.conversations import Row
from medusa.data.filters import NearDuplicates, reject, words_of
from medusa.data.prompts import packaged_prompts
from medusa.data.rows import RowFile
from medusa.data.shopping.products import load_catalogue
from medusa.data.template import encode_prompt
from medusa.errors import MedusaError
from medusa.generation import Completion, Request
from medusa.sampling import SamplingParams

KINDS = ("shopping", "general")
_MARK = "MAGPIE-MARK"
_STARTER_SHARE = {"shopping": 0.75, "general": 0.35}  # of the first turns
_SYSTEM_SHARE = 0.4  # of the conversations keep a system message that they do not need
_LEAST_OWN_WORDS = 2  # of a turn that was begun for the base
_MOST_TRIES = 20  # candidates for each prompt that is wanted


@dataclass(frozen=True)
class MagpieOptions:
    """How the base writes.

    Attributes:
        shopping_share: of the prompts are about shopping, the others general.
        follow_up_share: of the conversations get a second user turn, and of those as many a third.
        temperature, top_p: of the user turns. A small base needs less than 1 of either to make sense.
        max_user_tokens: longer turns are dropped, not cut.
        max_answer_tokens: of the answers between user turns, which are not kept.
        split: the catalogue split whose categories are named; other splits' are kept out of shopping prompts.
        seed: of every choice.
    """

    shopping_share: float = 0.6
    follow_up_share: float = 0.3
    temperature: float = 0.9
    top_p: float = 0.9
    max_user_tokens: int = 200
    max_answer_tokens: int = 160
    split: str = "train"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("shopping_share", "follow_up_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise MedusaError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise MedusaError("temperature must be positive and top_p in (0, 1]: user turns are sampled")


@dataclass
class _Candidate:
    """A conversation while the base writes it."""

    serial: int
    kind: str
    rng: random.Random
    system: str
    keep_system: bool
    turns: int  # user turns that it shall have
    started: str = ""  # what the user turn that is being written was begun with
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def users(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def to_row(self, seed: int) -> Row:
        system = [{"role": "system", "content": self.system}] if self.keep_system else []
        return {
            "id": f"magpie-{seed}-{self.serial:06d}",
            "messages": system + [{"role": "user", "content": text} for text in self.users],
            "source": f"magpie-{self.kind}",
            "category": None,
            "intent": None,
            "turns": len(self.users),
        }


def magpie(
    out: Path | str,
    base: Base,
    backend: Backend,
    *,
    count: int,
    options: MagpieOptions | None = None,
    exclude: Iterable[Row] = (),
    progress: bool = True,
    log: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Counter[str]:
    """Lets the base write `count` prompts into `out`; a run that was stopped goes on where it was.

    Args:
        out: a .jsonl file of prompt rows with the sources "magpie-shopping" and "magpie-general".
        base: its tokenizer and chat template.
        backend: what samples.
        count: prompts in the file at the end.
        options: how; None: the defaults.
        exclude: rows that no prompt may nearly repeat. Those of the packaged test split are always among
            them.
        progress: show a progress bar.
        log: takes lines for people.

    Returns:
        How many candidates were "kept", and how many were rejected for what.

    Raises:
        MedusaError: the file was made in another way; the base's chat template has no place for user turns;
            too few of the base's texts pass the filters.
    """
    options = options or MagpieOptions()
    memory = NearDuplicates()
    for row in [*packaged_prompts(), *exclude]:
        memory.add(_text(row))
    counts: Counter[str] = Counter()
    with RowFile(out, {"fingerprint": base.fingerprints, "options": vars(options)}) as file:
        for row in file.rows:
            memory.add(_text(row))
        missing = count - len(file.rows)
        first = max((int(row["id"].rsplit("-", 1)[-1]) + 1 for row in file.rows), default=0)
        writer = _Writer(base, backend, options, memory, counts)
        with tqdm(total=count, initial=len(file.rows), unit=" prompts", disable=not progress) as bar:
            for candidate in writer.write(first, missing):
                file.append(candidate.to_row(options.seed))
                bar.update()
    rejected = ", ".join(f"{number} {why}" for why, number in counts.most_common() if why != "kept")
    log(f"{counts['kept']} prompts kept; rejected: {rejected or 'none'}")
    if counts["kept"] < missing:
        raise MedusaError(
            f"only {counts['kept']} of {missing} prompts were good enough (rejected: {rejected}); is the "
            "base instruction-tuned, and is its chat template the right one?"
        )
    return counts


@cache
def _guides() -> dict[str, dict[str, list[Any]]]:
    return yaml.safe_load((files("medusa.data.shopping") / "magpie.yaml").read_text(encoding="utf-8"))


class _Writer:
    """Runs candidates through the backend: a user turn; for further ones, an answer and a user turn."""

    def __init__(
        self,
        base: Base,
        backend: Backend,
        options: MagpieOptions,
        memory: NearDuplicates,
        counts: Counter[str],
    ):
        self._base, self._backend, self._options = base, backend, options
        self._memory, self._counts = memory, counts
        catalogue = load_catalogue()
        self._categories = [c for c in catalogue if c.split == options.split]
        others = {name for c in catalogue if c.split != options.split for name in (c.name, c.plural)}
        self._held_out = re.compile(r"\b(" + "|".join(map(re.escape, sorted(others))) + r")\b", re.IGNORECASE)
        self._stop = self._end_of_user_turn()

    def write(self, first: int, missing: int) -> Iterator[_Candidate]:
        """Yields the prompts that are kept; candidates are numbered from `first`."""
        ready: deque[Request] = deque()
        flying = kept = 0
        serials = iter(range(first, first + missing * _MOST_TRIES))

        def requests() -> Iterator[Request | None]:
            nonlocal flying
            while kept < missing:
                if ready:
                    yield ready.popleft()
                    continue
                # No more are begun than may still be needed: what is thrown away at the end costs as much.
                serial = next(serials, None) if flying < max(2 * (missing - kept), 1) else None
                if serial is not None:
                    flying += 1
                    yield self._user_turn(self._begin(serial))
                elif flying:
                    yield None
                else:
                    return

        for completion in self._backend.complete(requests()):
            candidate, role = completion.key
            following = self._take(candidate, role, completion)
            if following is not None:
                ready.append(following)
                continue
            flying -= 1
            if candidate.messages and kept < missing:
                kept += 1
                self._counts["kept"] += 1
                self._memory.add("\n".join(candidate.users))
                yield candidate
                if kept == missing:
                    return

    def _begin(self, serial: int) -> _Candidate:
        options = self._options
        rng = random.Random(f"magpie/{options.seed}/{serial}")
        kind = "shopping" if rng.random() < options.shopping_share else "general"
        guide = rng.choice(_guides()[kind]["systems"])
        category = rng.choice(self._categories)
        words = {"name": category.name, "plural": category.plural, "a": category.a}
        system = guide["text"].format(**words)
        turns = 1 + (rng.random() < options.follow_up_share)
        turns += turns == 2 and rng.random() < options.follow_up_share
        keep = guide.get("keep", False) or rng.random() < _SYSTEM_SHARE
        candidate = _Candidate(serial, kind, rng, system, keep, turns)
        # A text that a task needs ("Summarise ...") is best left to the base alone.
        if not guide.get("keep") and rng.random() < _STARTER_SHARE[kind]:
            candidate.started = rng.choice(_guides()[kind]["starters"]).format(**words)
        return candidate

    def _take(self, candidate: _Candidate, role: str, completion: Completion) -> Request | None:
        """Takes what the base wrote; returns the next request of the candidate, if it needs one."""
        if role == "assistant":
            candidate.messages.append({"role": "assistant", "content": completion.text})
            if candidate.rng.random() < 0.5:
                candidate.started = candidate.rng.choice(_guides()[candidate.kind]["follow_ups"])
            return self._user_turn(candidate)
        text = (candidate.started.rstrip(" ") + completion.text).strip()
        why = "unfinished" if completion.finish != "stop" else reject(text)
        if why is None and candidate.started and len(words_of(completion.text)) < _LEAST_OWN_WORDS:
            why = "short"
        candidate.started = ""
        if why is None and candidate.kind == "shopping" and self._held_out.search(text):
            why = "held-out category"
        if why is None and text in candidate.users:
            why = "duplicate"
        if why is None and not candidate.messages and self._memory.seen(text):
            why = "duplicate"
        if why is not None:
            # A bad further turn ends a conversation whose first turn was good.
            self._counts[why] += not candidate.messages
            return None
        candidate.messages.append({"role": "user", "content": text})
        if len(candidate.users) == candidate.turns:
            return None
        system = [{"role": "system", "content": candidate.system}]
        ids = encode_prompt(self._base.tokenizer, system + candidate.messages)
        if (
            len(ids) + self._options.max_answer_tokens + self._options.max_user_tokens
            > self._backend.max_length
        ):
            return None
        return Request(ids, max_new_tokens=self._options.max_answer_tokens, key=(candidate, "assistant"))

    def _user_turn(self, candidate: _Candidate) -> Request:
        before, _ = self._around_user_turn(
            [{"role": "system", "content": candidate.system}, *candidate.messages]
        )
        # Without the space at its end, which byte-level tokenizers join to the word after it.
        text = before + candidate.started.rstrip(" ")
        return Request(
            self._base.tokenizer(text, add_special_tokens=False)["input_ids"],
            max_new_tokens=self._options.max_user_tokens,
            sampling=SamplingParams(
                temperature=self._options.temperature,
                top_p=self._options.top_p,
                seed=candidate.rng.getrandbits(31),
            ),
            stop=self._stop,
            key=(candidate, "user"),
        )

    def _around_user_turn(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        """The template's text before and after a user turn that follows `messages`."""
        template = self._base.tokenizer
        if template.chat_template is None:
            raise MedusaError("the base's tokenizer has no chat template; use an instruction-tuned base")
        turn = {"role": "user", "content": _MARK}
        before, mark, after = template.apply_chat_template([*messages, turn], tokenize=False).rpartition(
            _MARK
        )
        if not mark:
            raise MedusaError("the base's chat template leaves user turns out; it cannot write any")
        return before, after

    def _end_of_user_turn(self) -> tuple[str, ...]:
        """Stop strings for templates in which a user turn does not end with an end-of-turn token."""
        _, after = self._around_user_turn([{"role": "system", "content": "Help."}])
        ids = self._base.tokenizer(after, add_special_tokens=False)["input_ids"]
        if not ids or ids[0] in self._base.eos_ids:
            return ()
        if ids[0] in self._base.tokenizer.all_special_ids:
            token = self._base.tokenizer.convert_ids_to_tokens(ids[0])
            raise MedusaError(
                f"user turns of the base end with {token}, which does not end an answer; such a "
                "template is not supported here"
            )
        return (after.strip().split("\n")[0],)


def _text(row: Row) -> str:
    return "\n".join(message["content"] for message in row["messages"] if message["role"] == "user")
