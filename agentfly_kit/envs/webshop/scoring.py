"""WebShop's reward: what of a goal the bought product meets. Knows no page and no search.

    r = r_type * (attributes met + options met + [price <= bound]) / (attributes + options + 1)

Source: Yao et al. 2022, WebShop, arXiv 2207.01206, section 3 and its code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from agentfly_kit.errors import SettingsError

if TYPE_CHECKING:
    from agentfly_kit.envs.webshop.catalogue import Product

Nouns: TypeAlias = Callable[[str], Sequence[str]]
"""A title -> its nouns in lower case, each as often as it stands there."""

ALIKE = 85
"""A `token_set_ratio` above this is a match."""
MODEL = "en_core_web_sm"

COLORS = tuple(
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel "  # noqa: SIM905
    "camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry "
    "cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green "
    "grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot "
    "midnight mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple "
    "rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan "
    "taupe teal tiger turquoise violet walnut wheat white wine yellow".split()
)
"""The words for colours that the reward knows, in its order."""


@dataclass(frozen=True)
class Score:
    """What a purchase is worth, and why."""

    reward: float
    attributes: int
    """Of the goal's, how many the product has."""
    options: int
    """Of the goal's, how many were chosen."""
    price: bool
    """Whether it costs at most the bound."""
    kind: float
    """r_type: 1, 0.5, 0.1 or 0."""


def score(product: Product, goal: Mapping[str, Any], options: Iterable[str], nouns: Nouns) -> Score:
    """Of buying `product` with these option values for `goal`.

    Source: as of the module. An option that is met by two of the goal's counts for both, as there.
    """
    attributes = sum(_has(product, wanted) for wanted in goal["attributes"])
    wanted_options = goal["goal_options"]
    chosen = [color_of(value) for value in options]
    if isinstance(wanted_options, Mapping):  # synthetic goals: name and value together, colours as they are
        wanted_values = [str(pair) for pair in wanted_options.items()]
    else:
        wanted_values = [color_of(value) for value in wanted_options]
    met = sum(any(alike(have, wanted) > ALIKE for have in chosen) for wanted in wanted_values)
    cheap = product.price <= goal["price_upper"]
    kind = type_factor(product, goal, nouns)
    parts = len(goal["attributes"]) + len(wanted_values) + 1
    return Score(kind * (attributes + met + cheap) / parts, attributes, met, cheap, kind)


def _has(product: Product, wanted: str) -> bool:
    """An attribute that is much like it; else the very words in title, bullets or description."""
    if any(alike(have, wanted) > ALIKE for have in product.attributes):
        return True
    places = (product.title, " ".join(product.bullets), product.description)
    return any(wanted in place.lower() for place in places)


def type_factor(product: Product, goal: Mapping[str, Any], nouns: Nouns) -> float:
    """1 for the same kind of thing; less where neither query, shelf nor the title's nouns agree."""
    have, wanted = nouns(product.title), nouns(goal["name"])
    title = len(set(have) & set(wanted)) / len(wanted) if wanted else 0.2
    shelves = (_levels(product.product_category), _levels(goal["product_category"]))
    match = product.query == goal["query"] or len(shelves[0] & shelves[1]) >= 2 or title > 0.2
    if title == 0.0:
        return 0.0
    if title < 0.1:
        return 0.1
    return 1.0 if match else 0.5


def _levels(category: str) -> set[str]:
    return {level.strip() for level in category.split("›")}


def color_of(text: str) -> str:
    """The first colour of the list, in its order, that stands anywhere in the text; else the text."""
    return next((color for color in COLORS if color in text), text)


def alike(a: str, b: str) -> int:
    """`token_set_ratio` as thefuzz gives it, 0 to 100: letters of Latin-1 above ASCII dropped, lower case, rounded."""
    from rapidfuzz import fuzz, utils

    one, two = (utils.default_process(text.translate(_LATIN)) for text in (a, b))
    return round(fuzz.token_set_ratio(one, two))


_LATIN = dict.fromkeys(range(128, 256))


# --- the nouns of a title ------------------------------------------------------------------------


_OTHERS = frozenset(
    "a an and as at by for from in into is it its of off on or our out per plus set that the their this to up with "  # noqa: SIM905
    "you your new best great good high low big small medium large xlarge tall short long wide slim thin thick soft "
    "hard warm cool hot cold dry wet fresh pure fine easy safe clean simple classic modern vintage casual formal "
    "elegant cute perfect premium quality extra ultra super mini heavy light lightweight men's women's mens womens "
    "kids unisex adult indoor outdoor everyday wooden woolen cotton linen leather canvas plastic ceramic organic "
    "vegan kosher gentle sturdy handmade homemade stretchy crunchy creamy recycled".split()
    + list(COLORS)
)
_ENDINGS = re.compile(r".{2,}(able|ible|ful|less|ous|ive|ish|proof|resistant|friendly|free|ened|ated|ized|ly)")


def likely_nouns(text: str) -> list[str]:
    """A stand-in for a tagger: words of at least three letters that are no common adjective, colour, size or function
    word, and do not end like an adjective. It takes more for nouns than a tagger does, brands among them."""
    words = re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text.lower())
    return [w for w in words if len(w) >= 3 and w not in _OTHERS and not _ENDINGS.fullmatch(w)]


@functools.cache
def spacy_nouns() -> Nouns:
    """spaCy's tags NOUN and PROPN, by its small English model, which WebShop uses.

    Raises:  SettingsError with what to type. Nothing is downloaded.
    """
    missing = missing_tagger()
    if missing:
        raise SettingsError(f"nouns='spacy' needs {missing}; or give nouns='words', or a function of your own")
    tagger = importlib.import_module("spacy").load(MODEL)

    @functools.lru_cache(100_000)
    def nouns(text: str) -> tuple[str, ...]:
        return tuple(t.text.lower() for t in tagger(text) if t.pos_ in ("NOUN", "PROPN"))

    return nouns


def missing_tagger() -> str:
    """What to type for spaCy and its model; "" where both are installed."""
    if importlib.util.find_spec("spacy") is None:
        return f"spaCy; type: pip install spacy && python -m spacy download {MODEL}"
    if importlib.util.find_spec(MODEL) is None:
        return f"its model {MODEL}; type: python -m spacy download {MODEL}    (about 13 MB)"
    return ""


def find_nouns(choice: str | Nouns) -> Nouns:
    """ "words", "spacy", "auto" (spaCy where it is installed), or a function."""
    if callable(choice):
        return choice
    if choice == "auto":
        choice = "words" if missing_tagger() else "spacy"
    if choice == "words":
        return likely_nouns
    if choice == "spacy":
        return spacy_nouns()
    raise SettingsError(f"nouns={choice!r}: want 'auto', 'words', 'spacy', or a function from a title to its nouns")
