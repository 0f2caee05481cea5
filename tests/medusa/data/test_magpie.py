from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from medusa.base import Base, load_base
from medusa.data.backends import EngineBackend
from medusa.data.filters import NearDuplicates, reject
from medusa.data.magpie import MagpieOptions, magpie
from medusa.data.prompts import packaged_prompts
from medusa.data.shopping.products import load_catalogue
from medusa.errors import MedusaError
from medusa.generation import Completion, Request
from tests.medusa.data.bases import TEMPLATE, save_base


class Typist:
    """Types user turns: random letters would pass no filter. Notes what it was asked."""

    name, gives_hidden, max_length = "typist", False, 4000

    def __init__(self, base: Base, texts: Iterable[str]):
        self._base, self._texts, self.asked = base, iter(texts), []

    def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for request in requests:
            assert request is not None, "a sequential backend always has its completion by now"
            text = self._base.tokenizer.decode(request.ids)
            self.asked.append((request, text))
            yield Completion(request.key, [2], "stop", next(self._texts, ""))


def numbered(count: int) -> Iterator[str]:
    """Texts that share no three words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    for i in range(count):
        name = letters[i % 26] + letters[i // 26 % 26]
        yield f" kettle{name} with lid{name} for home{name}, please{name}"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_prompts_of_both_kinds_and_it_goes_on(base: Base, tmp_path: Path) -> None:
    out = tmp_path / "magpie.jsonl"
    options = MagpieOptions(follow_up_share=0.5, seed=4)
    typist = Typist(base, numbered(600))
    counts = magpie(out, base, typist, count=30, options=options, progress=False)
    rows = read(out)
    assert counts["kept"] == len(rows) == len({row["id"] for row in rows}) == 30
    assert {row["source"] for row in rows} == {"magpie-shopping", "magpie-general"}
    assert {row["turns"] for row in rows} == {1, 2, 3}
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system"] * (roles[0] == "system") + ["user"] * row["turns"]
        assert row["category"] is row["intent"] is None
    assert {row["messages"][0]["role"] for row in rows} == {"system", "user"}
    began = sum(not row["messages"][-1]["content"].startswith("kettle") for row in rows)
    assert 0 < began < 30
    before = out.read_bytes()
    more = Typist(base, numbered(676))
    for _ in range(600):
        next(more._texts)
    magpie(out, base, more, count=40, options=options, progress=False)
    assert out.read_bytes().startswith(before)
    assert len({row["id"] for row in read(out)}) == 40
    with pytest.raises(MedusaError, match="seed: 4 there, 0 now"):
        magpie(out, base, more, count=50, progress=False)


def test_the_base_writes_after_its_templates_user_prefix(base: Base, tmp_path: Path) -> None:
    typist = Typist(base, numbered(600))
    options = MagpieOptions(follow_up_share=1.0)
    magpie(tmp_path / "m.jsonl", base, typist, count=5, options=options, progress=False)
    users = [(request, text) for request, text in typist.asked if request.key[1] == "user"]
    answers = [(request, text) for request, text in typist.asked if request.key[1] == "assistant"]
    assert len(users) >= 15
    assert len(answers) >= 10
    for request, text in users:
        assert re.search(r"<\|im_start\|>user\n[^<]*$", text)
        assert text.startswith("<|im_start|>system\n")
        assert not text.endswith(" ")
        assert request.sampling.temperature > 0
    for request, text in answers:
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert request.sampling.temperature == 0
    assert any("<|im_start|>assistant\n" in text for _, text in users)


def test_bad_and_repeated_texts_are_counted_not_kept(base: Base, tmp_path: Path) -> None:
    held_out = next(c for c in load_catalogue() if c.split == "test")
    texts = [
        "Sure, here is a list of kettles",
        "which kettle would you buy for a caravan",
        "Which kettle would you buy for a caravan?",
        "never again this one",
        *(f"i want {held_out.plural} number {word}" for word in ("one", "two", "three")),
        "какой чайник лучше выбрать мне",
    ]
    options = MagpieOptions(shopping_share=1.0, follow_up_share=0.0, seed=1)
    exclude = [{"messages": [{"role": "user", "content": "Never again this one!"}]}]
    typist = Typist(base, [*texts, *numbered(600)])

    class Bare(Typist):
        def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
            for completion in super().complete(requests):
                completion.key[0].started = ""  # so that the texts are judged as they stand
                yield completion

    typist = Bare(base, [*texts, *numbered(600)])
    counts = magpie(
        tmp_path / "m.jsonl", base, typist, count=4, options=options, exclude=exclude, progress=False
    )
    assert counts == {"kept": 4, "assistant": 1, "duplicate": 2, "held-out category": 3, "language": 1}
    kept = [row["messages"][-1]["content"] for row in read(tmp_path / "m.jsonl")]
    assert kept[0] == texts[1]
    assert len(kept) == 4


def test_a_base_that_writes_only_nonsense_is_an_error(base: Base, tmp_path: Path) -> None:
    typist = Typist(base, [])
    with pytest.raises(MedusaError, match="only 0 of 2 prompts"):
        magpie(tmp_path / "m.jsonl", base, typist, count=2, progress=False)
    assert len(typist.asked) == 40


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (TEMPLATE.replace("'<|im_end|>\n'", "'<|endoftext|>\n'"), "does not end an answer"),
        ("{{ '<|im_start|>' }}", "leaves user turns out"),
    ],
)
def test_templates_without_a_place_for_it(tmp_path: Path, template: str, words: str) -> None:
    base = load_base(str(save_base(tmp_path / "base", template=template)), dtype=torch.float32)
    with pytest.raises(MedusaError, match=words):
        magpie(tmp_path / "m.jsonl", base, Typist(base, []), count=2, progress=False)


def test_a_user_turn_that_ends_in_plain_text_stops_there(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [/{{ m['role'] }}]{% endfor %}"
    base = load_base(str(save_base(tmp_path / "base", template=template)), dtype=torch.float32)
    typist = Typist(base, numbered(100))
    magpie(tmp_path / "m.jsonl", base, typist, count=2, progress=False)
    assert all(request.stop == ("[/user]",) for request, _ in typist.asked if request.key[1] == "user")


def test_packaged_prompts_are_good_and_no_run_repeats_them(base: Base, tmp_path: Path) -> None:
    rows = packaged_prompts()
    assert sorted({row["source"] for row in rows}) == ["magpie-general", "magpie-shopping"]
    assert len(rows) == len({row["id"] for row in rows}) >= 40
    memory = NearDuplicates()
    for row in rows:
        users = [message["content"] for message in row["messages"] if message["role"] == "user"]
        assert all(reject(text) is None for text in users)
        assert not memory.seen("\n".join(users))
        memory.add("\n".join(users))
        assert row["intent"] is None
    first = next(m["content"] for r in rows for m in r["messages"] if m["role"] == "user" and r["turns"] == 1)
    options = MagpieOptions(shopping_share=0.0, follow_up_share=0.0)

    class Repeats(Typist):
        def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
            for completion in super().complete(requests):
                completion.key[0].started = ""
                yield completion

    typist = Repeats(base, [first, *numbered(100)])
    counts = magpie(tmp_path / "m.jsonl", base, typist, count=1, options=options, progress=False)
    assert counts["duplicate"] == 1


def test_the_real_base_writes_prompts(smollm2: Path, tmp_path: Path) -> None:
    base = load_base(str(smollm2), dtype=torch.float32)
    backend = EngineBackend(base, in_flight=4, max_length=512)
    options = MagpieOptions(max_user_tokens=48, follow_up_share=0.0)
    magpie(tmp_path / "m.jsonl", base, backend, count=4, options=options, progress=False)
    rows = read(tmp_path / "m.jsonl")
    assert len(rows) == 4
    assert all(reject(row["messages"][-1]["content"]) is None for row in rows)
