"""Text pages of the shop and their clickable elements.

Source: the observations of WebShop's text environment (the visible strings of its pages, joined by " [SEP] ").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.envs.webshop.catalogue import Product

SEARCH, BACK, NEXT, PREVIOUS, BUY = "Search", "Back to Search", "Next >", "< Prev", "Buy Now"
SUBPAGES = ("Description", "Features", "Reviews")


@dataclass(frozen=True)
class Page:
    """A page of the shop: its strings in order (`parts`), and the strings that can be clicked (`clicks`)."""

    parts: tuple[str, ...]
    clicks: tuple[str, ...] = ()

    @property
    def clickables(self) -> tuple[str, ...]:
        """Clickable strings in lower case, as `click` accepts them."""
        return tuple(dict.fromkeys(text.lower() for text in self.clicks))

    @property
    def text(self) -> str:
        """The strings of the page, joined with " [SEP] "."""
        return " [SEP] ".join(self.parts)


def search(instruction: str) -> Page:
    return Page(("WebShop", "Instruction:", instruction, SEARCH), (SEARCH,))


def results(instruction: str, found: Sequence[Product], number: int, total: int) -> Page:
    """Return page `number` (from 1) of the results. As in WebShop, even the last page has a button "Next >"."""
    buttons = (*((PREVIOUS,) if number > 1 else ()), NEXT)
    items = tuple(text for p in found for text in (p.asin, p.title, p.price_text))
    head = ("Instruction:", instruction, BACK, f"Page {number} (Total results: {total})")
    return Page((*head, *buttons, *items), (BACK, *buttons, *(p.asin for p in found)))


def item(instruction: str, product: Product) -> Page:
    """Return the page of a product: first its options, then its description."""
    options = tuple(text for name, values in product.options.items() for text in (name, *values))
    about = (product.title, f"Price: {product.price_text}", "Rating: N.A.")
    values = tuple(value for values in product.options.values() for value in values)
    return Page(
        ("Instruction:", instruction, BACK, PREVIOUS, *options, *about, *SUBPAGES, BUY),
        (BACK, PREVIOUS, *values, *SUBPAGES, BUY),
    )


def sub(instruction: str, product: Product, name: str) -> Page:
    """Return a subpage of an item. Reviews are empty, as in WebShop for products without reviews."""
    texts = {"Description": (product.description,), "Features": product.bullets, "Reviews": ()}
    return Page(("Instruction:", instruction, BACK, PREVIOUS, *texts[name]), (BACK, PREVIOUS))


def done(product: Product, options: Mapping[str, str], goal: Mapping[str, Any], reward: float) -> Page:
    """Return the page that follows a purchase and shows the score. The model never sees this page."""
    none = (part for name in ("attrs", "category", "query", "product category") for part in (name, "None"))
    bought = ("Purchased", "asin", product.asin, "options", json.dumps(dict(options)), *none)
    wanted = {"asin": "asin", "options": "goal_options", "attrs": "attributes", "price upper": "price_upper"}
    wanted |= {"instuction text": "instruction_text"}  # spelled this way in WebShop
    target = ("Target", *(part for name, key in wanted.items() for part in (name, str(goal[key]))))
    thanks = ("Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)")
    score = ("Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None")
    return Page((*thanks, *bought, *target, *score))


# --- brief pages, for policies of a few hundred thousand parameters --------------------------------


def brief_results(found: Sequence[Product], number: int) -> Page:
    """Return a results page with one line per product, identified by a number to click."""
    buttons = (BACK, *((PREVIOUS,) if number > 1 else ()), NEXT)
    lines = tuple(f"{i} {p.title.lower()} ${p.price:g}" for i, p in enumerate(found, 1))
    return Page(lines or ("nothing found",), (*buttons, *(str(i) for i in range(1, len(found) + 1))))


def brief_item(product: Product) -> Page:
    """Return the page of a product with one line per option."""
    lines = tuple(f"{name}: {' '.join(values)}" for name, values in product.options.items())
    return Page(lines, item("", product).clicks)
