import json
import random
import re
from collections import Counter
from itertools import combinations

import pytest

from medusa.data.prompts import TEST_PER_INTENT, fingerprint, make_prompts, packaged_prompts, test_prompts
from medusa.data.shopping.conversation import INTENTS, LANGUAGES, make_conversation
from medusa.data.shopping.general import general_grammar, make_general, tasks
from medusa.data.shopping.grammar import Deck, Grammar, sentence_case, shopping_grammar, tidy
from medusa.data.shopping.manner import MANNERS
from medusa.data.shopping.products import load_catalogue, money
from medusa.data.shopping.scene import PASTED, Scene
from medusa.errors import MedusaError

SPLITS = ("train", "validation", "test")
test_prompts.__test__ = False  # the library's function, not a test


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts") / "out"
    manifest = make_prompts(folder, train=2400, seed=3)
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in SPLITS
    }
    return folder, manifest, rows


def words(row):
    return sum(len(m["content"].split()) for m in row["messages"])


def test_rows_have_the_fields_of_the_format(made):
    _, _, rows = made
    for name in SPLITS:
        ids = [row["id"] for row in rows[name]]
        assert ids
        assert len(set(ids)) == len(ids)
        for row in rows[name]:
            roles = [m["role"] for m in row["messages"]]
            assert roles.count("system") <= 1
            assert "system" not in roles[1:]
            assert roles.count("user") == row["turns"] >= 1
            assert all(m["content"].strip() == m["content"] != "" for m in row["messages"])
            written = ("magpie-shopping", "magpie-general") if name == "test" else ()
            assert row["source"] in ("grammar", "general", *written)
            assert (row["category"] is None) == (row["source"] != "grammar")


def test_nothing_is_left_of_the_templates(made):
    _, _, rows = made
    left = re.compile(r"\{[A-Za-z_0-9]+\}|[<>\x00]")
    texts = [m["content"] for name in SPLITS for row in rows[name] for m in row["messages"]]
    assert len(texts) > 4000
    assert not [text for text in texts if left.search(text)]


def test_prompts_are_distinct(made):
    _, _, rows = made
    keys = [fingerprint(row["messages"]) for name in ("train", "validation") for row in rows[name]]
    assert len(set(keys)) == len(keys) >= 2400


def test_splits_share_no_category(made):
    _, _, rows = made
    used = {name: {row["category"] for row in rows[name]} - {None} for name in SPLITS}
    assert all(len(used[name]) >= 5 for name in SPLITS)
    assert len(used["train"]) >= 60
    for one, other in combinations(SPLITS, 2):
        assert not used[one] & used[other]


def test_general_prompts_are_for_training_only(made):
    _, _, rows = made
    share = sum(row["source"] == "general" for row in rows["train"]) / len(rows["train"])
    assert share == pytest.approx(0.25)
    assert {row["intent"] for row in rows["train"] if row["source"] == "general"} == set(tasks())
    assert all(row["source"] == "grammar" for name in ("validation", "test") for row in rows[name][:80])


def test_the_test_split_is_balanced_and_always_the_same(made):
    _, _, rows = made
    assert rows["test"] == test_prompts() == test_prompts()
    grammar = [row for row in rows["test"] if row["source"] == "grammar"]
    assert len(grammar) >= 80
    assert Counter(row["intent"] for row in grammar) == dict.fromkeys(INTENTS, TEST_PER_INTENT)
    assert {row["intent"] for row in grammar[: len(INTENTS)]} == set(INTENTS)


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    one = make_prompts(tmp_path / "a", train=60, validation=8, seed=5)
    same = make_prompts(tmp_path / "b", train=60, validation=8, seed=5)
    other = make_prompts(tmp_path / "c", train=60, validation=8, seed=6)
    assert one == same
    for name in ("train", "validation"):
        assert one["splits"][name]["sha256"] != other["splits"][name]["sha256"]
    assert one["splits"]["test"] == other["splits"]["test"]


def test_the_manifest_counts_what_is_in_the_files(made):
    folder, manifest, rows = made
    assert json.loads((folder / "manifest.json").read_text("utf-8")) == manifest
    assert manifest["seed"] == 3
    for name in SPLITS:
        entry = manifest["splits"][name]
        assert entry["rows"] == len(rows[name])
        assert entry["by"]["intent"] == Counter(str(row["intent"]) for row in rows[name])
        assert sum(entry["by"]["style"].values()) == len(rows[name])


def test_beginnings_are_varied(made):
    _, _, rows = made
    users = [next(m["content"] for m in row["messages"] if m["role"] == "user") for row in rows["train"]]
    first = Counter(" ".join(text.lower().split()[:3]) for text in users)
    assert first.most_common(1)[0][1] < 0.02 * len(users)
    assert len(first) > 0.4 * len(users)


def test_lengths_are_mostly_short_with_a_long_tail(made):
    _, _, rows = made
    counts = sorted(words(row) for row in rows["train"])
    assert counts[len(counts) // 2] < 60
    assert counts[int(len(counts) * 0.25)] < 25
    assert sum(count > 180 for count in counts) > 0.03 * len(counts)
    assert counts[-1] < 900


def test_styles_languages_turns_and_system_messages_all_come_up(made):
    _, _, rows = made
    train = [row for row in rows["train"] if row["source"] == "grammar"]
    for field, least in (("style", 8), ("language", 5), ("turns", 5)):
        assert len({row[field] for row in train}) >= least
    system = sum(row["messages"][0]["role"] == "system" for row in train) / len(train)
    assert 0.1 < system < 0.4


def test_more_prompts_do_not_collapse_into_duplicates(tmp_path):
    manifest = make_prompts(tmp_path / "many", train=3000, validation=10)
    assert manifest["splits"]["train"]["rows"] == 3000


@pytest.mark.parametrize("wrong", [{"train": 0}, {"validation": 0}, {"general": 1.0}, {"general": -0.1}])
def test_impossible_numbers_are_refused(tmp_path, wrong):
    with pytest.raises(MedusaError, match="change them"):
        make_prompts(tmp_path / "x", **{"train": 10, **wrong})
    assert not (tmp_path / "x").exists()


def test_running_out_of_distinct_prompts_is_an_error(monkeypatch, tmp_path):
    row = {"messages": [{"role": "user", "content": "hi"}], "intent": "x"}
    monkeypatch.setattr("medusa.data.prompts.make_conversation", lambda *args: dict(row))
    with pytest.raises(MedusaError, match="no more distinct prompts"):
        make_prompts(tmp_path / "x", train=5)


def test_the_catalogue_is_large_and_every_symbol_resolves():
    categories = load_catalogue()
    assert len(categories) >= 80
    assert Counter(c.split for c in categories)["test"] >= 10
    grammar = shopping_grammar()
    foreign = {language for c in categories for language in c.foreign}
    assert foreign == set(LANGUAGES)
    scene = Scene(next(c for c in categories if c.foreign), random.Random(0), "de")
    assert not [name for name in grammar.symbols() if name not in grammar and scene.get(name) is None]
    shadowed = [name for name in grammar.names("") if scene.get(name) is not None]
    assert not shadowed  # a rule that the scene hides would never be used


@pytest.mark.parametrize("intent", INTENTS)
def test_every_category_can_be_asked_every_intent(intent):
    for category in load_catalogue():
        row = make_conversation(random.Random(f"{category.id}"), category, intent)
        assert row["intent"] == intent
        assert row["category"] == category.id


@pytest.mark.parametrize("task", tasks())
def test_general_prompts_of_a_task_differ(task):
    texts = {make_general(random.Random(i), task)["messages"][-1]["content"] for i in range(40)}
    assert len(texts) > 20
    assert not [
        name for name in general_grammar().names("general_") if name.removeprefix("general_") not in tasks()
    ]


def test_pasted_text_keeps_its_case_in_a_careless_message():
    category = next(c for c in load_catalogue() if c.id == "toaster")
    scene = Scene(category, random.Random(1))
    title = scene.products[0].title
    typed = MANNERS["shout"](random.Random(1), f"is this good? {scene.get('t1')}")
    assert scene.fill(typed) == f"IS THIS GOOD? {title}"
    assert set(PASTED) >= {"t1", "list", "sheet", "reviews"}
    assert all(scene.get(name).startswith("\x00") for name in PASTED)


def test_a_template_expands_nested_choices_and_symbols():
    grammar = Grammar({"root": ["<a|b {x}|> end"], "x": ["<one|two>"]})
    seen = {grammar.rule("root", random.Random(i), {}) for i in range(60)}
    assert seen == {"a end", "b one end", "b two end", "end"}
    assert grammar.rule("root", random.Random(1), {"root": "fixed"}) == "fixed"


@pytest.mark.parametrize("template", ["<a|b", "a|b", "a> b"])
def test_a_malformed_template_is_refused(template):
    with pytest.raises(MedusaError, match="template"):
        Grammar({"root": [template]})


def test_an_unknown_symbol_is_refused():
    with pytest.raises(MedusaError, match="nowhere"):
        Grammar({"root": ["{nowhere}"]}).rule("root", random.Random(0), {})


def test_a_deck_repeats_nothing_before_all_were_drawn():
    deck = Deck("abcd", random.Random(0))
    assert sorted(deck.draw() for _ in range(4)) == sorted(deck.draw() for _ in range(4)) == list("abcd")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a  b , c ?.", "a b, c?"),
        ("wait... what", "wait... what"),
        ("done..", "done."),
        ("x\n    indented", "x\n    indented"),
    ],
)
def test_tidy_closes_the_gaps_of_empty_alternatives(text, expected):
    assert tidy(text) == expected


def test_sentence_case():
    assert sentence_case("i think. do you? Sam K. wrote: i'm ok") == "I think. Do you? Sam K. wrote: I'm ok"


def test_money():
    assert [money(5.0, "$"), money(5.49, "£"), money(1200.0, "€")] == ["$5", "£5.49", "1,200 €"]


def test_a_folder_with_anything_else_in_it_is_not_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MedusaError, match="file is a file; give a folder"):
        make_prompts(tmp_path / "file", train=5)
    with pytest.raises(MedusaError, match="holds no prompts of this kit; give another folder"):
        make_prompts(tmp_path, train=5)
    (tmp_path / "manifest.json").write_text('{"format": 1, "shards": []}')
    with pytest.raises(MedusaError, match="holds no prompts of this kit; give another folder"):
        make_prompts(tmp_path, train=5)
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        made = make_prompts(tmp_path / "empty", train=5, validation=2)
    (tmp_path / "empty" / "answers.jsonl").write_text("mine")
    with pytest.raises(MedusaError, match=r"also holds answers\.jsonl; move it away"):
        make_prompts(tmp_path / "empty", train=6, validation=2)
    assert (tmp_path / "file").read_text() == (tmp_path / "empty" / "answers.jsonl").read_text() == "mine"
    assert json.loads((tmp_path / "empty" / "manifest.json").read_text()) == made


def test_packaged_prompts_may_hold_any_character(monkeypatch, tmp_path):
    rows = [{"id": "1", "text": "a\u2028b\x85c\x0cd"}, {"id": "2"}]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (tmp_path / "magpie_test.jsonl").write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr("medusa.data.prompts.files", lambda package: tmp_path)
    assert packaged_prompts() == rows
