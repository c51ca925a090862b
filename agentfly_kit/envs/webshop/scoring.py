"""WebShop's reward, which measures how well a purchased product meets the goal.

    r = type_factor * (attributes met + options met + [price <= bound]) / (attributes + options + 1)

Source: Yao et al. 2022, WebShop, arXiv 2207.01206, section 3 and its code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentfly_kit import task_files
from agentfly_kit.envs.webshop.catalogue import Product

# Function from a title to its nouns in lower case, with repetitions.
Nouns: TypeAlias = Callable[[str], Sequence[str]]

# Threshold of `token_set_ratio` above which two strings match.
ALIKE = 85

# Colour words that the reward recognizes. `color_of` depends on the order of these words, which is the same as in
# WebShop.
COLORS = tuple(task_files.bundled_json("vocabularies", "webshop.json")["colors"].split())


@dataclass(frozen=True)
class Score:
    """Reward of a purchase and its parts: the numbers of attributes and options met, whether the price is within the
    bound, and the type factor (`kind`): 1, 0.5, 0.1 or 0.
    """

    reward: float
    attributes: int
    options: int
    price: bool
    kind: float


def score(product: Product, goal: Mapping[str, Any], options: Iterable[str], nouns: Nouns) -> Score:
    """Score the purchase of `product`, with the chosen option values, against `goal`.

    As in WebShop, one chosen option may match several options of the goal.
    """
    attributes = sum(_has(product, wanted) for wanted in goal["attributes"])
    wanted_options = goal["goal_options"]
    chosen = [color_of(value) for value in options]
    if isinstance(wanted_options, Mapping):  # synthetic goals have (name, value) pairs with unchanged colours
        wanted_values = [str(pair) for pair in wanted_options.items()]
    else:
        wanted_values = [color_of(value) for value in wanted_options]
    met = sum(any(alike(have, wanted) > ALIKE for have in chosen) for wanted in wanted_values)
    cheap = product.price <= goal["price_upper"]
    kind = type_factor(product, goal, nouns)
    parts = len(goal["attributes"]) + len(wanted_values) + 1
    return Score(kind * (attributes + met + cheap) / parts, attributes, met, cheap, kind)


def _has(product: Product, wanted: str) -> bool:
    """Return True if `wanted` is similar to a product attribute or occurs in the title, bullets or description."""
    if any(alike(have, wanted) > ALIKE for have in product.attributes):
        return True
    return any(wanted in place.lower() for place in (product.title, " ".join(product.bullets), product.description))


def type_factor(product: Product, goal: Mapping[str, Any], nouns: Nouns) -> float:
    """Return a factor for the product's type: 0 if its title contains no noun of the wanted title, 0.1 if it contains
    less than 10 % of them, 1 if the two products' queries, categories or titles match, and 0.5 otherwise."""
    have, wanted = nouns(product.title), nouns(goal["name"])
    title = len(set(have) & set(wanted)) / len(wanted) if wanted else 0.2
    shelves = (_levels(product.product_category), _levels(goal["product_category"]))
    match = product.query == goal["query"] or len(shelves[0] & shelves[1]) >= 2 or title > 0.2
    if title < 0.1:
        return 0.1 if title else 0.0
    return 1.0 if match else 0.5


def _levels(category: str) -> set[str]:
    return {level.strip() for level in category.split("›")}


def color_of(text: str) -> str:
    """Return the first colour in `COLORS` that occurs in the text, or the text itself."""
    return next((color for color in COLORS if color in text), text)


def alike(a: str, b: str) -> int:
    """Return the similarity of two strings, from 0 to 100: the `token_set_ratio` of the package thefuzz, which ignores
    case and non-ASCII Latin-1 characters."""
    from rapidfuzz import fuzz, utils

    one, two = (utils.default_process(text.translate(_LATIN)) for text in (a, b))
    return round(fuzz.token_set_ratio(one, two))


_LATIN = dict.fromkeys(range(128, 256))


# --- the nouns of a title ------------------------------------------------------------------------


_OTHERS = frozenset([*task_files.bundled_json("vocabularies", "webshop.json")["others"].split(), *COLORS])
_ENDINGS = re.compile(r".{2,}(able|ible|ful|less|ous|ive|ish|proof|resistant|friendly|free|ened|ated|ized|ly)")


def likely_nouns(text: str) -> list[str]:
    """Guess the nouns of a text without a tagger.

    Words of at least three letters are kept unless they are common adjectives, colours, sizes or function words, or end
    like an adjective. The result contains more words than that of a tagger, including brands.
    """
    words = re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text.lower())
    return [w for w in words if len(w) >= 3 and w not in _OTHERS and not _ENDINGS.fullmatch(w)]
