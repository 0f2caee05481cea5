"""What stays the same across one conversation: category, products, prices, order, pasted blocks."""

import random
import re

from medusa.data.shopping.grammar import Deck, sentence_case, shopping_grammar
from medusa.data.shopping.products import Category, make_product, money, nice_price, product_list, spec_sheet

# Pasted text goes through the grammar as a mark and is filled in at the end, so that a manner of typing
# changes what people type and not what they paste.
PASTED = ("t1", "t2", "t3", "list", "sheet", "sheet2", "reviews")
# Marks hold no letters, which a manner of typing could change.
_MARK = {name: f"\x00{i}\x00" for i, name in enumerate(PASTED)}

_DECKS = {
    "feature": "features",
    "use": "uses",
    "trait": "traits",
    "compat": "compat",
    "sizing": "sizing",
    "care": "care",
    "accessory": "accessories",
    "accessory_bare": "accessories",
    "problem": "problems",
    "pro": "pros",
    "con": "cons",
    "question": "questions",
    "type": "types",
    "brand": "brands",
}

_ONE = {"it": "it", "it_s": "it", "is": "is", "Is": "Is", "does": "does", "Does": "Does"}
_SEVERAL = {"it": "them", "it_s": "they", "is": "are", "Is": "Are", "does": "do", "Does": "Do"}


class Scene:
    """Values for the grammar, made when first asked for. `get` is all that the grammar calls.

    pasted: mark -> text for what has been pasted so far; `fill` puts it in place.
    """

    def __init__(self, category: Category, rng: random.Random, language: str = "en"):
        self.category, self._rng = category, rng
        self.currency = rng.choice(("$", "$", "$", "£", "€", "€")) if language == "en" else "€"
        self._words = language == "en"  # "50 bucks" at times, not only "$50"
        self.products = [make_product(rng, category)]
        while len(self.products) < 3:
            product = make_product(rng, category)
            if all(product.name != other.name for other in self.products):
                self.products.append(product)
        spec, values = rng.choice(sorted(category.specs.items()))
        two = rng.sample(values, 2) if len(values) > 1 else [values[0]] * 2
        budget = nice_price(rng, category.price[0] * 1.3, category.price[1] * 0.8)
        budget = float(max(5, round(budget / 5) * 5 if budget < 100 else round(budget / 50) * 50))
        self._values: dict[str, object] = {
            **(_SEVERAL if category.number == "plural" else _ONE),
            "cat": category.name,
            "cat_this": category.name,
            "cats": category.plural,
            "a_cat": category.a,
            "a_cat_bare": category.a if category.number == "singular" else category.name,
            "colour": rng.choice(category.colours).lower(),
            "spec_k": spec,
            "spec_v": rng.choice(values),
            "spec_k1": spec,
            "spec_v1": two[0],
            "spec_v2": two[1],
            "budget": self._money(budget),
            "budget_low": self._money(float(max(4, round(budget * 0.6)))),
            "budget_high": self._money(float(round(budget * 1.5 / 5) * 5 + 5)),
            "ship": self._money(rng.choice((3.95, 4.99, 5.9, 6.5, 9.0))),
            "free_from": self._money(float(rng.choice((29, 40, 50, 75)))),
            "days": str(rng.choice((4, 6, 8, 10, 12, 16, 19, 25, 33, 40))),
            "order": rng.choice(("#{}", "no. {}", "{}", "#{}-EU", "AX-{}", "#{}")).format(
                rng.randrange(10_000, 9_999_999)
            ),
        }
        for i, product in enumerate(self.products, 1):
            self._values[f"p{i}"] = product.name
            self._values[f"m{i}"] = self._money(product.price)
            self._values[f"s{i}"] = self._money(float(rng.choice((5, 10, 15, 20, 25, 30))))
        if language != "en":
            self._values["f_a"], self._values["f_pl"] = category.foreign[language]
            for i, product in enumerate(self.products, 1):
                self._values[f"p{i}"] = product.name.removesuffix(category.name).strip()
        self.pasted: dict[str, str] = {}

    def _money(self, value: float) -> str:
        text = money(value, self.currency)
        if self._words and value == int(value) and self._rng.random() < 0.15:
            word = {
                "$": ("dollars", "bucks", "USD"),
                "£": ("pounds", "quid", "GBP"),
                "€": ("euros", "euro", "EUR"),
            }
            text = f"{value:.0f} {self._rng.choice(word[self.currency])}"
        return text

    def get(self, name: str):
        """The value of `name`, or None: then the grammar's own rule of that name holds."""
        if name in PASTED:
            mark = _MARK[name]
            if mark not in self.pasted:
                self.pasted[mark] = self._paste(name)
            return mark
        if name in ("store", "bot") and name not in self._values:
            self._values[name] = shopping_grammar().rule(f"{name}_names", self._rng, {})
        if name in _DECKS and name not in self._values:
            items = getattr(self.category, _DECKS[name])
            if name == "accessory_bare":
                items = [item.removeprefix("an ").removeprefix("a ") for item in items]
            self._values[name] = Deck(items, self._rng)
        return self._values.get(name)

    def _paste(self, name: str) -> str:
        rng, category = self._rng, self.category
        if name in ("t1", "t2", "t3"):
            return self.products[int(name[1]) - 1].title
        if name == "list":
            count = rng.choice((3, 3, 4, 4, 5, 6, 8, 12))
            products = self.products + [make_product(rng, category) for _ in range(count - 3)]
            return product_list(rng, products, self.currency)
        if name in ("sheet", "sheet2"):
            return spec_sheet(rng, self.products[name == "sheet2"], category, self.currency)
        grammar = shopping_grammar()
        count = rng.choice((3, 3, 4, 5, 6, 8, 10, 14))
        form = rng.choice(("\n", "\n\n", "\n---\n"))
        reviews = (sentence_case(grammar.rule("review", rng, self)) for _ in range(count))
        return form.join(
            re.sub(r"(\n|: |^\"|^- )([a-z])", lambda m: m[1] + m[2].upper(), text) for text in reviews
        )

    def fill(self, text: str) -> str:
        """`text` with its marks replaced by what was pasted."""
        for _ in range(2):
            for mark, pasted in self.pasted.items():
                text = text.replace(mark, pasted)
        return text
