"""webshop: find, configure and buy the product that an instruction asks for, in a shop of text pages (Yao et al. 2022).

The pages (search, ten results per page, items with options and subpages, Buy Now), their text, the clickable elements
and the reward are those of WebShop. The included catalogue is fictional; `Catalogue.load` reads WebShop's own files.

    tasks = af.envs.webshop.tasks(200, "train")
    mine = af.envs.webshop.Catalogue.load("folder with items_shuffle_1000.json")
    agent = af.envs.webshop.agent(policy, options={"catalogue": mine})
    tasks = af.envs.webshop.tasks(catalogue=mine)

The reward compares nouns in product titles. By default, `scoring.likely_nouns` guesses these nouns. To use spaCy
instead, as WebShop does:

    tagger = spacy.load("en_core_web_sm")
    options = {"nouns": lambda title: [t.text.lower() for t in tagger(title) if t.pos_ in ("NOUN", "PROPN")]}
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentfly_kit.agent.agent import Agent
from agentfly_kit.envs.family import Family, Move, int_field, row_id, tool_outputs
from agentfly_kit.envs.webshop import pages
from agentfly_kit.envs.webshop.catalogue import Catalogue, Product
from agentfly_kit.envs.webshop.scoring import Nouns, alike, color_of, likely_nouns, score
from agentfly_kit.errors import SettingsError, ToolError, check_count
from agentfly_kit.tasks import Tasks
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, text_of

if TYPE_CHECKING:
    from agentfly_kit.policy.policy import Policy

__all__ = [
    "BRIEF",
    "Catalogue",
    "Shop",
    "WebShop",
    "WebShopText",
    "agent",
    "expert",
    "family",
    "random_agent",
    "tasks",
]

# Environment options with which the shipped policy was pretrained: `agent(af.tiny.policy("webshop"), options=BRIEF)`.
BRIEF: dict[str, Any] = {"brief": True, "page_size": 3}


class Shop:
    """Environment for one visit to the shop. The tools are defined in `WebShop` and `WebShopText`.

    Args:
        catalogue: a `Catalogue`, or the folder with WebShop's files; by default the built-in fictional catalogue.
        nouns: function from a title to its nouns in lower case.
        page_size: number of products per page of results.
        brief: for small models, omit the instruction and navigation from pages, and select results by number.
    """

    def __init__(
        self,
        catalogue: Catalogue | str | None = None,
        *,
        nouns: Nouns = likely_nouns,
        page_size: int = 10,
        brief: bool = False,
    ) -> None:
        check_count("page_size", page_size)
        self._given = None if catalogue is None else _catalogue(catalogue)
        self._nouns = nouns
        self._page_size, self._brief = page_size, brief

    def check_task(self, task: Task) -> None:
        """Raise TaskError or SettingsError if the task does not belong to the shop's catalogue."""
        catalogue = _of_task(task, self._given)
        text = catalogue.goal(task.fields["goal"])["instruction_text"]
        if text not in text_of(task.messages[-1]):
            raise SettingsError(
                f"the task must match goal {task.fields['goal']} of {catalogue!r}, {text!r}; use the same catalogue: "
                "tasks(catalogue=mine), agent(..., options={'catalogue': mine})"
            )

    async def reset(self, task: Task, seed: int) -> str | None:
        self.check_task(task)
        self.enter(_of_task(task, self._given), task.fields["goal"])
        return None if self._brief else self.page.text

    def enter(self, catalogue: Catalogue, goal: int) -> None:
        """Start a visit for the goal with the given number."""
        self.catalogue = catalogue
        self.goal: dict[str, Any] = catalogue.goal(goal)
        self.keywords: str | None = None
        # ASINs found by the last search.
        self.found: list[str] = []
        self.number = 1
        self.asin: str | None = None
        self.subpage: str | None = None
        self.options: dict[str, str] = {}
        # ASINs of the products whose page was opened.
        self.seen: list[str] = []
        self.bought: str | None = None
        self.done = False

    # --- current page ---

    @property
    def page(self) -> pages.Page:
        """Current page of the shop."""
        text = self.goal["instruction_text"]
        if self.bought is not None:
            return pages.done(self._product(self.bought), self.options, self.goal, self._score()["reward"])
        if self.asin is not None:
            product = self._product(self.asin)
            if self.subpage is not None:
                return pages.sub(text, product, self.subpage)
            return pages.brief_item(product) if self._brief else pages.item(text, product)
        if self.keywords is None:
            return pages.search(text)
        shown = [self._product(asin) for asin in self._shown]
        if self._brief:
            return pages.brief_results(shown, self.number)
        return pages.results(text, shown, self.number, len(self.found))

    @property
    def clickables(self) -> tuple[str, ...]:
        """Values that `click` accepts on the current page."""
        return self.page.clickables

    @property
    def _shown(self) -> list[str]:
        first = (self.number - 1) * self._page_size
        return self.found[first : first + self._page_size]

    def _product(self, asin: str) -> Product:
        return self.catalogue.products[asin]

    @property
    def _text(self) -> str:
        return "\n".join(self.page.parts) if self._brief else self.page.text

    # --- actions ---

    def searched(self, keywords: str) -> str:
        """Search the catalogue. Return the results page as an observation for the tool `search`."""
        if not keywords.strip():
            raise ToolError("the keywords must not be empty")
        self._search(keywords)
        return self._text

    def clicked(self, value: str) -> str:
        """Click on an element of the page. Return the observation for the tool `click`."""
        before = dict(self.options)
        if not self._click(value):
            if self._brief:
                raise ToolError("not on this page")
            raise ToolError(f"{value!r} is not on this page; you can click: {', '.join(self.clickables)}")
        if self._brief and (chosen := [f"{k} {v}" for k, v in self.options.items() if before.get(k) != v]):
            return chosen[0]
        return "bought" if self._brief and self.done else self._text

    def _search(self, keywords: str) -> None:
        self.keywords = keywords.lower()
        self.found = self.catalogue.find(self.keywords)
        self.number, self.asin, self.subpage, self.options = 1, None, None, {}

    def _click(self, value: str) -> bool:
        value = value.strip().lower()
        if value not in self.clickables:
            return False
        if value == pages.BACK.lower():
            self.keywords, self.found, self.number, self.asin, self.subpage, self.options = (
                None,
                [],
                1,
                None,
                None,
                {},
            )
        elif value == pages.NEXT.lower():
            self.number += 1
        elif value == pages.PREVIOUS.lower():
            if self.subpage is not None:
                self.subpage = None
            elif self.asin is not None:
                self.asin, self.options = None, {}
            else:
                self.number -= 1
        elif self.asin is None and self.keywords is not None:
            shown = self._shown
            self.asin = shown[int(value) - 1] if self._brief else next(a for a in shown if a.lower() == value)
            self.seen.append(self.asin)
        elif value == pages.BUY.lower():
            self.bought, self.done = self.asin, True
        elif self.asin is not None:
            tabs = {name.lower(): name for name in pages.SUBPAGES}
            named = [name for name, values in self._product(self.asin).options.items() if value in values]
            if named:
                self.options[named[-1]] = value
            else:
                self.subpage = tabs[value]
        return True

    def _score(self) -> dict[str, float]:
        if self.bought is None:
            return {"reward": 0.0, "attributes": 0.0, "options": 0.0, "price": 0.0, "type": 0.0}
        got = score(self._product(self.bought), self.goal, self.options.values(), self._nouns)
        options = self.goal["goal_options"]
        return {
            "reward": got.reward,
            "attributes": got.attributes / max(len(self.goal["attributes"]), 1),
            "options": got.options / len(options) if options else 1.0,
            "price": float(got.price),
            "type": got.kind,
        }

    async def reward(self) -> dict[str, float]:
        """Return WebShop's reward for the purchase, from 0 to 1; 0 if nothing was bought.

        Additional metrics: `success` (the reward is 1), `found` (the requested product was opened), `bought`, and the
        parts of the reward: `attributes` and `options` (fractions met), `price` (1 if met) and `type` (a factor).
        """
        got = self._score()
        return got | {
            "success": float(got["reward"] >= 1.0),
            "found": float(self.goal["asin"] in self.seen),
            "bought": float(self.bought is not None),
        }

    async def fork(self, into: Shop) -> None:
        into.__dict__.update(self.__dict__)
        into.options, into.seen = dict(self.options), list(self.seen)


class WebShop(Shop):
    """The shop with the tools `search` and `click`. The error for an invalid click lists the clickable elements."""

    @tool
    def search(self, keywords: str) -> str:
        """Search the shop.

        Args:
            keywords: the search terms.
        """
        return self.searched(keywords)

    @tool
    async def click(self, value: str) -> str:
        """Click a button, a product or an option on the page.

        Args:
            value: the text of the element.
        """
        return self.clicked(value)


class WebShopText(Shop):
    """The shop with WebShop's own actions, `search[keywords]` and `click[value]`, in one tool.

    Any other action shows the page again. With `format="action"` a model writes <action>search[red shoes]</action>.
    """

    @tool
    def act(self, action: str) -> str:
        """Carry out one action in the shop.

        Args:
            action: search[keywords] or click[value].
        """
        name, _, rest = action.strip().partition("[")
        value = rest.removesuffix("]").lower()
        if value and rest.endswith("]"):
            if name == "search":
                self._search(value)
            elif name == "click":
                self._click(value)
        return self._text


@functools.lru_cache(2)
def _loaded(path: str) -> Catalogue:
    return Catalogue.load(path)


def _catalogue(given: Catalogue | str) -> Catalogue:
    return given if isinstance(given, Catalogue) else _loaded(str(given))


def _of_task(task: Task, given: Catalogue | None) -> Catalogue:
    missing = [name for name in ("goal", *(() if given else ("world",))) if name not in task.fields]
    if missing:
        raise SettingsError(
            f"field {missing[0]!r} is missing: create tasks with af.envs.webshop.tasks(...); for your own "
            "catalogue, also pass options={'catalogue': yours} to the agent"
        )
    return Catalogue.invented(int_field(task, "world")) if given is None else given


# --- tasks ---------------------------------------------------------------------------------------


def rows(n: int, split: str, seed: int = 0, catalogue: Catalogue | None = None) -> list[dict[str, Any]]:
    """Return tasks as rows {"id", "question", "world", "goal"}. The question is the instruction; `goal` is a number.

    No instruction is in both splits. In the fictional catalogue, every fifth product belongs to the test split. In
    catalogues with more than 2,000 goals, the first 500 goals are the test split, and all goals except the first 1,500
    are the training split, as in WebShop. In smaller catalogues, the first fifth of the goals is the test split.
    """
    of = Catalogue.invented(seed) if catalogue is None else catalogue
    numbers = _split(of, split, invented=catalogue is None)
    world = {"world": seed} if catalogue is None else {}
    return [
        {
            "id": row_id("webshop", split, seed if catalogue is None else 0, i),
            "question": of.goals[number]["instruction_text"],
            **world,
            "goal": number,
        }
        for i, number in enumerate(numbers[:n])
    ]


def _split(of: Catalogue, split: str, invented: bool) -> list[int]:
    count = len(of.goals)
    if invented:
        tested = {asin for i, asin in enumerate(of.products) if i % 5 == 0}
        test = [i for i, goal in enumerate(of.goals) if goal["asin"] in tested]
        train = [i for i, goal in enumerate(of.goals) if goal["asin"] not in tested]
    elif count > 2000:
        test, train = list(range(500)), list(range(1500, count))
    else:
        test, train = list(range(count // 5)), list(range(count // 5, count))
    seen: set[str] = set()

    def fresh(numbers: list[int]) -> list[int]:
        kept = [i for i in numbers if of.goals[i]["instruction_text"] not in seen]
        kept = list({of.goals[i]["instruction_text"]: i for i in reversed(kept)}.values())[::-1]
        seen.update(of.goals[i]["instruction_text"] for i in kept)
        return kept

    tests, trains = fresh(test), fresh(train)
    return tests if split == "test" else trains


# --- scripted players ----------------------------------------------------------------------------


def plan(task: Task, options: Mapping[str, Any]) -> list[Move]:
    """Return the actions of an expert: search for the title, open the product, choose the options, and buy."""
    given = options.get("catalogue")
    catalogue = _of_task(task, None if given is None else _catalogue(given))
    goal = catalogue.goal(task.fields["goal"])
    product = catalogue.products[goal["asin"]]
    found = catalogue.find(product.title.lower())
    if product.asin not in found:
        return [("search", {"keywords": product.title.lower()}), "It is not here."]
    page, place = divmod(found.index(product.asin), options.get("page_size", 10))
    clicks = [pages.NEXT.lower()] * page + [str(place + 1) if options.get("brief") else product.asin.lower()]
    wanted = goal["goal_options"]
    for value in wanted.values() if isinstance(wanted, Mapping) else wanted:
        every = [v for values in product.options.values() for v in values]
        if every:
            clicks.append(max(every, key=lambda v: (v == value, alike(color_of(v), color_of(value)))))
    return [
        ("search", {"keywords": product.title.lower()}),
        *(("click", {"value": value}) for value in (*clicks, pages.BUY.lower())),
    ]


def expert_player(
    task: Task, messages: Sequence[Message], rng: random.Random, options: Mapping[str, Any] | None = None
) -> Move:
    """Take the next action of `plan`, which buys the requested product."""
    return plan(task, options or {})[len(tool_outputs(messages))]


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Search for a word of the instruction, then click on random parts of the page, or buy."""
    seen = tool_outputs(messages)
    if not seen or rng.random() < 0.1:
        return "search", {"keywords": rng.choice(text_of(task.messages[-1]).split())}
    return "click", {"value": "buy now" if rng.random() < 0.2 else rng.choice(re.split(r" \[SEP\] |\n", seen[-1]))}


family = Family(
    name="webshop",
    what="find, configure and buy the product that an instruction asks for; WebShop's pages and reward",
    environment=WebShop,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=15,
    size="1,500 train and 400 test tasks of a fictional catalogue included; reads WebShop's files",
    needs=("bm25s", "rapidfuzz"),
    install='pip install "agentfly_kit[envs]"',
    splits={"train": 1500, "test": 400},
)
agent, random_agent = family.agent, family.random_agent


def expert(policy: Policy | None = None, **settings: Any) -> Agent:
    """Create an agent whose scripted player buys the requested product. Takes the same `options` as `agent`."""
    known = functools.partial(expert_player, options=settings.get("options") or {})
    return dataclasses.replace(family, expert_player=known).expert(policy, **settings)


def tasks(
    n: int | None = None, split: str | None = None, *, seed: int = 0, catalogue: Catalogue | str | None = None
) -> Tasks:
    """Return n tasks of the split "train" or "test", or n of each split by default.

    `catalogue` is your own Catalogue, or the folder with its files. By default, the fictional catalogue is used.
    """
    if catalogue is None:
        return family.tasks(n, split, seed=seed)
    family.require_installed()
    of = _catalogue(catalogue)
    return dataclasses.replace(family, splits=dict.fromkeys(family.splits, len(of.goals))).tasks(
        n, split, seed=seed, catalogue=of
    )
