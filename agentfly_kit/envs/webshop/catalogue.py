"""Catalogue of a shop: its products, goals and search. Reads WebShop's files, or uses the fictional shop of goods.py.

Nothing is downloaded.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly_kit.envs.retrieval import WordIndex
from agentfly_kit.envs.webshop import goods
from agentfly_kit.errors import SettingsError

# Maximum number of search results.
FOUND = 50
# Seed with which WebShop shuffles its goals.
SEED = 233
BOUNDS = tuple(10.0 * i for i in range(1, 100))
UNBOUNDED = 1_000_000.0
_WANTED = ("items", "ins", "human_ins")
_HELP = (
    "WebShop's files are items_shuffle_1000.json, items_ins_v2_1000.json and items_human_ins.json (or those of the "
    "full set), fetched by the setup script of github.com/princeton-nlp/WebShop; put them into one folder and type "
    "af.envs.webshop.Catalogue.load(folder). To use the fictional catalogue instead, leave catalogue= out"
)


@dataclass(frozen=True)
class Product:
    """A product with the fields that the pages and the reward use. `price` is sampled if WebShop gives a range."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    price: float
    price_text: str
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    query: str
    product_category: str


class Catalogue:
    """Products, goals, and a product search.

    Args:
        items: a list of products as in items_shuffle.json.
        attributes: attributes by ASIN, as in items_ins_v2.json.
        instructions: instructions by ASIN, as in items_human_ins.json; without them, WebShop's synthetic goals are
            used.
        name: name to show in messages.
        seed: seed for prices within ranges and for the goals' price bounds. WebShop itself samples them without a seed,
            so there the bounds vary between runs and differ from these.

    Raises:  SettingsError for items that do not have WebShop's format.
    """

    def __init__(
        self,
        items: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, Any] | None = None,
        instructions: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        *,
        name: str = "yours",
        seed: int = SEED,
    ) -> None:
        self.name = name
        self._rng = random.Random(seed)
        self._attributes = attributes or {}
        self.products: dict[str, Product] = {}
        for place, item in enumerate(items):
            asin = str(_need(item, "asin", f"product {place}"))
            if asin == "nan" or len(asin) > 10 or asin in self.products:
                continue
            self.products[asin] = self._product(asin, item)
        if not self.products:
            raise SettingsError(f"the catalogue {name!r} has no product with an ASIN of at most 10 characters. {_HELP}")
        goals = self._asked(instructions) if instructions else self._synthetic()
        random.Random(seed).shuffle(goals)
        # Goals, in WebShop's order if the products are in that order. Keys: asin, query, name, product_category,
        # instruction_text, attributes, price_upper, goal_options.
        self.goals: tuple[dict[str, Any], ...] = tuple(goals)

    # --- loading ---

    @classmethod
    def load(cls, items: str | Path, ins: str | Path | None = None, human_ins: str | Path | None = None) -> Catalogue:
        """Load WebShop's files: pass the folder that contains them, or the path of each.

        Raises:  SettingsError naming the file that is missing or invalid, and where to get it.
        """
        first = Path(items).expanduser()
        if first.is_dir():
            ins = ins or next(iter(sorted(first.glob("items_ins*.json"))), None)
            human_ins = human_ins or next(iter(sorted(first.glob("items_human_ins*.json"))), None)
            found = sorted(first.glob("items_shuffle*.json"))
            if not found:
                raise SettingsError(f"{first} contains no items_shuffle*.json. {_HELP}")
            first = found[0]
        rows = _read(first, list)
        known = _read(Path(ins).expanduser(), dict) if ins is not None else None
        asked = _read(Path(human_ins).expanduser(), dict) if human_ins is not None else None
        return cls(rows, known, asked, name=str(first))

    @staticmethod
    @functools.lru_cache(16)
    def invented(world: int = 0) -> Catalogue:
        """Return the fictional catalogue with the given number; 0 is the included one."""
        items, attributes, instructions = goods.make(world)
        return Catalogue(items, attributes, instructions, name=f"invented {world}", seed=SEED + world)

    # --- goals and search ---

    def goal(self, number: int) -> dict[str, Any]:
        """Return the goal with the given number, or raise SettingsError for a number out of range."""
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.goals):
            raise SettingsError(
                f"invalid goal {number!r}: the catalogue {self.name!r} has goals 0 to {len(self.goals) - 1}"
            )
        return self.goals[number]

    def find(self, keywords: str) -> list[str]:
        """Search and return at most 50 ASINs, best first."""
        asins = list(self.products)
        return [asins[i] for i in self.index.find(keywords, FOUND)]

    @functools.cached_property
    def index(self) -> WordIndex:
        """BM25 index of title, description, first bullet and options."""
        return WordIndex([_searched(p) for p in self.products.values()])

    def __repr__(self) -> str:
        return f"Catalogue({self.name!r}, {len(self.products)} products, {len(self.goals)} goals)"

    # --- reading ---

    def _product(self, asin: str, item: Mapping[str, Any]) -> Product:
        where = f"product {asin}"
        prices = [float(re.sub(r"[^\d.]", "", part) or 0) for part in str(item.get("pricing") or "").split("$")[1:]][:2]
        if not prices:
            price, text = 100.0, "$100.0"
        elif len(prices) == 1:
            price, text = prices[0], f"${prices[0]}"
        else:
            price, text = self._rng.uniform(*prices), f"${prices[0]} to ${prices[1]}"
        small = item.get("small_description") or []
        options: dict[str, tuple[str, ...]] = {}
        for name, values in (item.get("customization_options") or {}).items():
            if values:
                shown = (str(_need(v, "value", where)).strip().replace("/", " | ").lower() for v in values)
                options[name.lower()] = tuple(shown)
        known = self._attributes.get(asin, {}).get("attributes") or ("DUMMY_ATTR",)
        return Product(
            asin=asin,
            title=str(_need(item, "name", where)),
            description=str(item.get("full_description") or ""),
            bullets=tuple(map(str, small)) if isinstance(small, list) else (str(small),),
            price=price,
            price_text=text,
            options=options,
            attributes=tuple(known),
            query=str(item.get("query") or "").lower().strip(),
            product_category=str(item.get("product_category") or ""),
        )

    def _asked(self, instructions: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        goals = []
        for asin, product in self.products.items():
            for row in instructions.get(asin, ()):
                where = f"an instruction of {asin}"
                wanted = _need(row, "instruction_attributes", where)
                if wanted:
                    bound, text = self._bound(product.price)
                    asked = str(_need(row, "instruction", where)).strip(".") + text
                    options = list(_need(row, "instruction_options", where))
                    goals.append(_goal(product, asked, list(wanted), options, bound))
        return goals

    def _synthetic(self) -> list[dict[str, Any]]:
        goals = []
        for asin, product in self.products.items():
            row = self._attributes.get(asin, {})
            text, wanted = row.get("instruction"), list(row.get("instruction_attributes") or ())
            if not text or not wanted:
                continue
            bound, price_text = self._bound(product.price)
            names = sorted(product.options)
            for values in itertools.product(*(product.options[name] for name in names)):
                options = dict(zip(names, values, strict=True))
                chosen = ", and ".join(f"{k}: {v}" for k, v in options.items())
                asked = f"{text}{' with ' + chosen if chosen else ''}{price_text}"
                goals.append(_goal(product, asked, wanted, options, bound))
        return goals

    def _bound(self, price: float) -> tuple[float, str]:
        """Return the larger of two of the next four bounds above the price, sampled at random, and its wording."""
        above = [bound for bound in BOUNDS if bound > price][:4]
        if len(above) < 2:
            return UNBOUNDED, ""
        bound = max(self._rng.sample(above, 2))
        return bound, f", and price lower than {bound:.2f} dollars"


def _goal(product: Product, text: str, attributes: list[str], options: Any, bound: float) -> dict[str, Any]:
    return {
        "asin": product.asin,
        "query": product.query,
        "name": product.title,
        "product_category": product.product_category,
        "instruction_text": text,
        "attributes": attributes,
        "price_upper": bound,
        "goal_options": options,
    }


def _searched(product: Product) -> str:
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return " ".join((product.title, product.description, first, options)).lower()


def _need(row: Any, key: str, where: str) -> Any:
    if not isinstance(row, Mapping) or key not in row:
        raise SettingsError(f"{where} has no {key!r}: this is not one of WebShop's files. {_HELP}")
    return row[key]


def _read(path: Path, kind: type) -> Any:
    if not path.exists():
        raise SettingsError(f"{path}: no such file. {_HELP}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON ({error}); is the download complete? {_HELP}") from None
    if not isinstance(value, kind):
        shape = "a list of products" if kind is list else "an object with a key for each ASIN"
        raise SettingsError(f"{path} must contain {shape}, got {type(value).__name__}. {_HELP}")
    return value
