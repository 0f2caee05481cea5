"""Categories of the catalogue, the products invented from them, and the blocks people paste of those."""

import random
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import yaml

from medusa.errors import MedusaError

LISTS = ("features", "uses", "traits", "compat", "sizing", "care", "accessories", "problems", "pros", "cons")
LISTS += ("questions", "types")


@dataclass(frozen=True)
class Category:
    """One product category. Phrases complete a sentence; the comment says which."""

    id: str
    group: str
    name: str  # "espresso machine"; for number "plural": "running shoes"; for "mass": "dog food"
    plural: str
    a: str  # "an espresso machine", "a pair of running shoes", "some dog food"
    number: str  # "singular", "plural", "mass"
    split: str  # "train", "validation", "test"
    price: tuple[float, float]
    recipients: str  # which pool of gift recipients fits: "any", "none", ...
    brands: tuple[str, ...]
    series: tuple[str, ...]
    colours: tuple[str, ...]
    specs: dict[str, tuple[str, ...]]
    features: tuple[str, ...]  # "with ..."
    uses: tuple[str, ...]  # "for ..."
    traits: tuple[str, ...]  # "something ..."
    compat: tuple[str, ...]  # "does it work with ..."
    sizing: tuple[str, ...]  # a whole question, no question mark
    care: tuple[str, ...]  # "how do I ..."
    accessories: tuple[str, ...]  # "do I also need ..."
    problems: tuple[str, ...]  # a whole clause
    pros: tuple[str, ...]  # a whole clause
    cons: tuple[str, ...]  # a whole clause
    questions: tuple[str, ...]  # a whole question, no question mark
    types: tuple[str, ...]  # "... or ...?"
    foreign: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # language -> ("einen Toaster", "Toaster")


@dataclass(frozen=True)
class Product:
    """An invented product. `name` is what people call it, `title` what a shop's page says."""

    name: str
    title: str
    brand: str
    price: float
    rating: float
    ratings: int
    specs: dict[str, str]
    feature: str


def _article(noun: str) -> str:
    return ("an " if noun[0].lower() in "aeio" or noun.startswith(("ultra", "umbrella")) else "a ") + noun


@cache
def load_catalogue() -> tuple[Category, ...]:
    """Every packaged category, in file order. Raises MedusaError if one lacks a field or is given twice."""
    groups, categories, foreign = {}, {}, {}
    for item in sorted((files(__package__) / "catalogue").iterdir(), key=lambda f: f.name):
        if not item.name.endswith(".yaml"):
            continue
        loaded = yaml.safe_load(item.read_text(encoding="utf-8"))
        if "languages" in loaded:
            foreign = loaded["languages"]
            continue
        for group, body in loaded.items():
            groups[group] = body
            for name, fields in body["categories"].items():
                if name in categories:
                    raise MedusaError(f"category {name!r} is given twice; the second time in {item.name}")
                categories[name] = _category(name, group, body, fields, item.name)
    for name, words in foreign.items():
        if name not in categories:
            raise MedusaError(f"words for the unknown category {name!r}; remove them or add the category")
        categories[name].foreign.update({language: tuple(pair) for language, pair in words.items()})
    return tuple(categories.values())


def _category(name: str, group: str, body: dict, fields: dict, file: str) -> Category:
    missing = [key for key in (*LISTS, "price", "specs") if not fields.get(key)]
    if missing:
        raise MedusaError(f"category {name!r} in {file} lacks {', '.join(missing)}; add them")
    number = fields.get("number", "singular")
    noun = name.replace("_", " ")
    plural = fields.get("plural", noun + "s" if number == "singular" else noun)
    a = {"singular": _article(noun), "plural": f"a pair of {noun}", "mass": f"some {noun}"}[number]
    return Category(
        id=name.replace("_", "-").replace(" ", "-"),
        group=group,
        name=noun,
        plural=plural,
        a=fields.get("a", a),
        number=number,
        split=fields.get("split", "train"),
        price=tuple(fields["price"]),
        recipients=fields.get("gift", body.get("gift", "any")),
        brands=tuple(fields.get("brands", body["brands"])),
        series=tuple(fields.get("series", body["series"])),
        colours=tuple(fields.get("colours", body["colours"])),
        specs={key: tuple(str(v) for v in values) for key, values in fields["specs"].items()},
        **{key: tuple(str(text) for text in fields[key]) for key in LISTS},
    )


def nice_price(rng: random.Random, low: float, high: float) -> float:
    """A shop's price, spread evenly over the logarithm of the range: most things are cheap."""
    value = low * (high / low) ** rng.random()
    if value < 20:
        return round(value) + rng.choice((-0.01, 0.49, 0.99, 0.0)) if value > 2 else round(value, 2)
    if value < 200:
        return round(value) - rng.choice((0.01, 0.05, 0.0, 0.01))
    return float(round(value / 10) * 10 - rng.choice((0, 1, 1, 0.01)))


def make_product(rng: random.Random, category: Category) -> Product:
    """An invented product of `category`."""
    brand, series = rng.choice(category.brands), rng.choice(category.series)
    number = rng.choice(("", "", "2", "3", "Pro", "Plus", "Lite", "Mini", "X", "S", "Max", "Air", "SE"))
    if rng.random() < 0.4:
        number = rng.choice(("{}", "{}", "{}", "{}S", "{}i", "X{}", "{}-B", "T{}")).format(
            rng.choice(
                (5, 7, 10, 12, 20, 24, 40, 60, 75, 80, 100, 150, 200, 220, 300, 350, 410, 500, 520, 700, 900)
            )
        )
    model = f"{series} {number}".strip()
    specs = {key: rng.choice(values) for key, values in category.specs.items()}
    feature = rng.choice(category.features)
    noun = category.name.title()
    colour = rng.choice(category.colours)
    named = sorted(f"{value} {key}" if value.isdigit() else value for key, value in specs.items())
    values = rng.sample(named, min(len(named), rng.randint(1, 3)))
    bare = feature.removeprefix("an ").removeprefix("a ")
    joined = ", ".join(values)
    title = (
        lambda: f"{brand} {model} {noun} with {bare.title()}, {joined}, {colour}",
        lambda: f"{brand} {model} {noun} ({joined})",
        lambda: f"{brand} {model} – {noun}, {joined}",
        lambda: f"{brand} {noun} {model}, {values[0]}, {bare}, {colour.lower()}",
        lambda: f"{brand} {model} {noun} {colour}",
        lambda: f"{brand} {model} {noun} | {bare.title()} | {' | '.join(values)}",
    )[rng.randrange(6)]()
    name = f"{brand} {model} {category.name}" if rng.random() < 0.25 else f"{brand} {model}"
    return Product(
        name=name,
        title=title,
        brand=brand,
        price=nice_price(rng, *category.price),
        rating=rng.choice(
            (3.1, 3.6, 3.8, 3.9, 4.0, 4.1, 4.2, 4.3, 4.3, 4.4, 4.4, 4.5, 4.5, 4.6, 4.6, 4.7, 4.8, 4.9)
        ),
        ratings=int(4 * 2 ** (rng.random() * 12)),
        specs=specs,
        feature=feature,
    )


def money(value: float, currency: str) -> str:
    """`value` as people of that currency write it; whole amounts without decimals."""
    text = f"{value:,.0f}" if abs(value - round(value)) < 0.005 else f"{value:,.2f}"
    return f"{text} €" if currency == "€" else f"{currency}{text}"


def _facts(product: Product, count: int | None = None) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(product.specs.items())[:count])


_LINES = {
    "numbered": lambda i, p, price: f"{i}. {p.title} - {price}",
    "facts": lambda i, p, price: f"- {p.name}: {price}, {p.rating}/5 ({p.ratings} ratings), {_facts(p)}",
    "shop": lambda i, p, price: f"{p.title}\n{price}  {p.rating} out of 5 stars, {p.ratings:,} ratings\n",
    "feature": lambda i, p, price: f"* {p.name} ({price}) - {p.feature}",
    "short": lambda i, p, price: f"{i}) {p.name}, {_facts(p, 2)}, {price}",
    "stock": lambda i, p, price: (
        f"[{i}] {p.title}. Price: {price}. In stock: {'no' if p.ratings % 4 == 0 else 'yes'}"
    ),
}


def product_list(rng: random.Random, products: list[Product], currency: str) -> str:
    """Several products as a pasted list, in one of the forms shops and people use."""
    form = rng.choice((*_LINES, "table"))
    if form != "table":
        lines = (_LINES[form](i, p, money(p.price, currency)) for i, p in enumerate(products, 1))
        return "\n".join(lines).strip()
    keys = sorted(products[0].specs)[: rng.randint(1, 3)]
    lines = [
        "| Product | " + " | ".join(key.capitalize() for key in keys) + " | Price |",
        "|---" * (len(keys) + 2) + "|",
    ]
    for p in products:
        lines.append(
            f"| {p.name} | " + " | ".join(p.specs[k] for k in keys) + f" | {money(p.price, currency)} |"
        )
    return "\n".join(lines)


def spec_sheet(rng: random.Random, product: Product, category: Category, currency: str) -> str:
    """One product's page or table of specifications, as pasted."""
    rows = [("Brand", product.brand), ("Model", product.name.removeprefix(product.brand).strip())]
    rows += [(key.capitalize(), value) for key, value in product.specs.items()]
    if rng.random() < 0.5:
        rows.append(("Price", money(product.price, currency)))
    if rng.random() < 0.5:
        rows.append(("Warranty", rng.choice(("1 year", "2 years", "24 months", "3 years", "5 years"))))
    form = rng.randrange(4)
    if form == 0:
        return "\n".join(f"{key}: {value}" for key, value in rows)
    if form == 1:
        return "\n".join(["| Specification | Value |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows)])
    features = rng.sample(category.features, min(len(category.features), rng.randint(2, 4)))
    if form == 2:
        body = "; ".join(f"{key.lower()} {value}" for key, value in rows[2:])
        return f"{product.title}\nComes with {', '.join(features)}. {body[:1].upper()}{body[1:]}."
    bullets = "\n".join(f"- {f.removeprefix('a ').removeprefix('an ').capitalize()}" for f in features)
    return f"{product.title}\n\nAbout this item\n{bullets}\n" + "\n".join(f"- {k}: {v}" for k, v in rows[2:])
