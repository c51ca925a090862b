"""The pages of the shop as text, and what on each can be clicked. Knows no reward.

Source: what WebShop's text environment shows (the visible strings of its pages, joined by " [SEP] ").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfly_kit.envs.webshop.catalogue import Product

SEARCH, BACK, NEXT, PREVIOUS, BUY = "Search", "Back to Search", "Next >", "< Prev", "Buy Now"
SUBPAGES = ("Description", "Features", "Reviews")
ATTRIBUTES = "Attributes"


@dataclass(frozen=True)
class Page:
    """Strings in order; `clicks` are those that can be clicked, as they are written."""

    parts: tuple[str, ...]
    clicks: tuple[str, ...] = ()
    chosen: frozenset[str] = field(default_factory=frozenset)
    """Option values that were clicked."""

    @property
    def clickables(self) -> tuple[str, ...]:
        """As `click` takes them: in lower case."""
        return tuple(dict.fromkeys(text.lower() for text in self.clicks))

    def text(self, rich: bool = False) -> str:
        """Joined by [SEP]; `rich` marks the buttons and which of them were clicked."""
        if not rich:
            return " [SEP] ".join(self.parts)
        marked = []
        for part in self.parts:
            if part in self.clicks:
                mark = "clicked button" if part in self.chosen else "button"
                part = f"[{mark}] {part} [{mark}_]"
            marked.append(part)
        return "\n".join(marked)


def search(instruction: str) -> Page:
    """The first page."""
    return Page(("WebShop", "Instruction:", instruction, SEARCH), (SEARCH,))


def results(instruction: str, found: Sequence[Product], number: int, total: int) -> Page:
    """One page of what was found; `number` from 1. "Next >" is always there, past the end too."""
    buttons = (*((PREVIOUS,) if number > 1 else ()), NEXT)
    items = tuple(text for p in found for text in (p.asin, p.title, p.price_text))
    head = ("Instruction:", instruction, BACK, f"Page {number} (Total results: {total})")
    return Page((*head, *buttons, *items), (BACK, *buttons, *(p.asin for p in found)))


def item(instruction: str, product: Product, chosen: Mapping[str, str], show_attributes: bool) -> Page:
    """A product: options first, then what it is."""
    options = tuple(text for name, values in product.options.items() for text in (name, *values))
    tabs = (*SUBPAGES, ATTRIBUTES) if show_attributes else SUBPAGES
    about = (product.title, f"Price: {product.price_text}", "Rating: N.A.")
    values = tuple(value for values in product.options.values() for value in values)
    return Page(
        ("Instruction:", instruction, BACK, PREVIOUS, *options, *about, *tabs, BUY),
        (BACK, PREVIOUS, *values, *tabs, BUY),
        frozenset(chosen.values()),
    )


def sub(instruction: str, product: Product, name: str) -> Page:
    """A page behind an item's; there are no reviews, as in WebShop's own text pages of products without any."""
    texts: dict[str, tuple[str, ...]] = {
        "Description": (product.description,),
        "Features": product.bullets,
        "Reviews": (),
        ATTRIBUTES: (*product.attributes, product.category, product.query, product.product_category),
    }
    return Page(("Instruction:", instruction, BACK, PREVIOUS, *texts[name]), (BACK, PREVIOUS))


def done(product: Product, options: Mapping[str, str], goal: Mapping[str, Any], reward: float) -> Page:
    """The last page. The episode is over then: no model reads the score."""
    none = (part for name in ("attrs", "category", "query", "product category") for part in (name, "None"))
    bought = ("Purchased", "asin", product.asin, "options", json.dumps(dict(options)), *none)
    wanted = {"asin": "asin", "options": "goal_options", "attrs": "attributes", "price upper": "price_upper"}
    wanted |= {"instuction text": "instruction_text"}  # so it is written there
    target = ("Target", *(part for name, key in wanted.items() for part in (name, str(goal[key]))))
    thanks = ("Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)")
    score = ("Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None")
    return Page((*thanks, *bought, *target, *score))


# --- the same in few words, for a policy of a few hundred thousand parameters ----------------------


def brief_results(found: Sequence[Product], number: int) -> Page:
    """A line a product; it is clicked by its number on the page."""
    buttons = (BACK, *((PREVIOUS,) if number > 1 else ()), NEXT)
    lines = tuple(f"{i} {p.title.lower()} ${p.price:g}" for i, p in enumerate(found, 1))
    return Page(lines or ("nothing found",), (*buttons, *(str(i) for i in range(1, len(found) + 1))))


def brief_item(product: Product, chosen: Mapping[str, str], show_attributes: bool) -> Page:
    """What can be chosen, a line an option."""
    full = item("", product, chosen, show_attributes)
    return Page(tuple(f"{name}: {' '.join(values)}" for name, values in product.options.items()), full.clicks)
