"""Generator of a fictional shop: products, attributes and instructions in the format of WebShop's files.

A shop is generated from a number. The same number gives the same shop on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from agentfly_kit import task_files

_WORDS = task_files.bundled_json("vocabularies", "webshop.json")
BRANDS = tuple(_WORDS["brands"].split())
# Maps the name of a product option, such as its colour, to the possible values.
VALUES: dict[str, tuple[str, ...]] = {name: tuple(values.split()) for name, values in _WORDS["values"].items()}
COLORS, SIZES, FLAVORS, _, PACKS = VALUES.values()
# Number of products of each kind.
PER_KIND = 18
# Number of instructions per product.
ASKED = 5


@dataclass(frozen=True)
class Group:
    """Group of product kinds that share attributes, options and a price range (`cost`, in whole dollars)."""

    shelf: str
    kinds: tuple[str, ...]
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    cost: tuple[int, int]


GROUPS = tuple(
    Group(
        row["shelf"],
        tuple(row["kinds"].split()),
        tuple(row["attributes"].split()),
        tuple(row["options"].split()),
        tuple(row["cost"]),
    )
    for row in _WORDS["groups"]
)
KINDS = tuple(kind for group in GROUPS for kind in group.kinds)
ATTRIBUTES = tuple(sorted({name for group in GROUPS for name in group.attributes}))
_ASKS = ("i am looking for {what} {options}", "find me {what} {options}", "i need {what} {options}")
# All words of titles, options and instructions, in lower case.
WORDS = tuple(
    dict.fromkeys(
        [
            *(brand.lower() for brand in BRANDS),
            *(*KINDS, *ATTRIBUTES, *VALUES, *COLORS, *SIZES, *FLAVORS, *PACKS),
            *"i am looking for find me need with and price lower than dollars".split(),  # noqa: SIM905
        ]
    )
)

Files = tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]


def make(world: int = 0) -> Files:
    """Generate a shop in WebShop's format: items, and dicts from ASINs to attributes and to instructions."""
    rng = random.Random(f"webshop goods {world}")
    items: list[dict[str, Any]] = []
    known: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    numbers = rng.sample(range(10**7), PER_KIND * len(KINDS))
    for group in GROUPS:
        for kind in group.kinds:
            titles: set[str] = set()
            while len(titles) < PER_KIND:
                attributes = rng.sample(group.attributes, 3)
                title = f"{rng.choice(BRANDS)} {attributes[0].title()} {attributes[1].title()} {kind.title()}"
                if title in titles:
                    continue
                titles.add(title)
                asin = f"B0S{numbers[len(items)]:07}"
                options = {name: _some(VALUES[name], rng) for name in group.options}
                items.append(_item(asin, title, kind, group, attributes, options, rng))
                known[asin] = {
                    "attributes": attributes,
                    "instruction": f"find me {attributes[0]} {attributes[1]} {kind}",
                    "instruction_attributes": attributes[:2],
                }
                asked[asin] = [_asked(kind, attributes, options, n, rng) for n in range(ASKED)]
    return items, known, asked


def _some(values: tuple[str, ...], rng: random.Random) -> list[str]:
    """Sample three to five of the values (or all, if there are fewer), keeping their order."""
    chosen = set(rng.sample(values, rng.randint(min(3, len(values)), min(5, len(values)))))
    return [value for value in values if value in chosen]


def _item(
    asin: str, title: str, kind: str, group: Group, attributes: list[str], options: dict[str, list[str]], rng: Any
) -> dict[str, Any]:
    first, second, third = attributes
    return {
        "asin": asin,
        "name": title,
        "full_description": f"This {kind} by {title.split()[0]} is {first}, {second} and made to be used every day.",
        "small_description": [
            f"A {third} {kind}.",
            f"Comes in {', '.join(value for values in options.values() for value in values)}.",
            "Sent within two days; returns are free.",
        ],
        "pricing": f"${rng.randint(*group.cost)}.00",
        "customization_options": {name: [{"value": value} for value in values] for name, values in options.items()},
        "query": kind,
        "product_category": f"{group.shelf} › {kind}",
    }


def _asked(
    kind: str, attributes: list[str], options: dict[str, list[str]], n: int, rng: random.Random
) -> dict[str, Any]:
    """Generate an instruction that asks for one or two attributes and a value of each option."""
    wanted = rng.sample(attributes[:2], 2) if n % 2 == 0 else [rng.choice(attributes)]
    chosen = {name: rng.choice(values) for name, values in options.items()}
    words = " and ".join(f"{name} {value}" for name, value in chosen.items())
    return {
        "instruction": rng.choice(_ASKS).format(what=" ".join([*wanted, kind]), options=f"with {words}") + ".",
        "instruction_attributes": wanted,
        "instruction_options": list(chosen.values()),
    }
