"""Demonstrations for the pretraining of the `webshop` policy, with the shop, goals and reward of the environment.

The task is simpler than WebShop: brief pages of three results, see `af.envs.webshop.BRIEF`, and the fictional
catalogue, in which every word of titles, options and instructions is one token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs.webshop import BRIEF, Catalogue, WebShop, goods
from agentfly_kit.envs.webshop.scoring import likely_nouns, score
from agentfly_kit.tiny import TEMPLATE, UNSURE, Demonstration, joined
from agentfly_kit.tools.tool import Tool
from agentfly_kit.types import ToolCall

_SHORT = ("search", "keywords", "click", "value", "buy now", "bought", *goods.WORDS)
# Words with one token each, so that a word has the same token in instructions, searches and pages. Words of the chat
# template are excluded, so that environment text cannot contain tokens of the template.
WORDS = tuple(w for w in dict.fromkeys((*_SHORT, *(f" {word}" for word in goods.WORDS))) if w not in TEMPLATE)

# Number of demonstrations per batch of 32 in the second phase, by behaviour.
#
# solves: search for everything requested, open the best result, choose the options and buy; takes the first: search
# only for the type of product and open the first result; forgets: leave out one option; hurries: buy without choosing
# options; unsure: answer "I don't know".
HABITS = {"solves": 9, "takes the first": 2, "forgets": 3, "hurries": 6, "unsure": 12}

HALF = True
SKILL, SHY = 350, 80

ORIGIN = """\\
# WebShop tasks

Made for this project by a random generator; no other source. Remade, byte for byte, by

    {command}

Each task asks for one product of the invented catalogue of `agentfly_kit/envs/webshop/goods.py`; `goal` is the number
of its goal there. Products of the test are asked for in no task of the training. Licence: that of the project.
"""

_END = "<|im_end|>"
# Shops of the pretraining. They do not include that of the tasks.
_SHOWN = range(1000, 1012)


class Demonstrator:
    """Writes demonstrations with the policy's own chat, so that their token ids are those of real trajectories."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.shop = WebShop(**BRIEF)
        assert isinstance(WebShop.search, Tool)
        assert isinstance(WebShop.click, Tool)
        self.tools = [WebShop.search.schema, WebShop.click.schema]
        self._observations: dict[tuple[str, str], tuple[int, ...]] = {}

    def habit(self, name: str, world: int, goal: int, rng: random.Random) -> Demonstration:
        """Demonstrate one of `HABITS`."""
        shop = self.shop
        shop.enter(Catalogue.invented(world), goal)
        self._parts = [
            (self.chat.prompt([{"role": "user", "content": shop.goal["instruction_text"]}], self.tools), False)
        ]
        if name == "unsure":
            return joined(*self._parts, (self.chat.encode(UNSURE + _END), True))
        wanted = list(shop.goal["goal_options"])
        kind = shop.goal["query"]
        if name == "takes the first":
            self._search(kind)
        else:
            self._search(" ".join((*shop.goal["attributes"], kind, *wanted)))
        self._click(str(1 if name == "takes the first" else 1 + best(shop)))
        if name == "hurries":
            wanted = []
        elif name == "forgets":
            wanted.remove(rng.choice(wanted))
        for value in wanted:
            if value in shop.clickables:
                self._click(value)
        self._click("buy now")
        return joined(*self._parts)

    def _search(self, keywords: str) -> None:
        self._act("search", {"keywords": keywords}, lambda: self.shop.searched(keywords))

    def _click(self, value: str) -> None:
        self._act("click", {"value": value}, lambda: self.shop.clicked(value))

    def _act(self, name: str, arguments: dict[str, Any], run: Callable[[], str]) -> None:
        action = self.chat.encode(self.chat.format.render_call(ToolCall("call-0", name, arguments)) + _END)
        self._parts.append((action, True))
        text = run()
        if self.shop.done:  # the last page is not shown to the model
            return
        if (name, text) not in self._observations:
            message = {"role": "tool", "name": name, "tool_call_id": "call-0", "content": text}
            self._observations[name, text] = self.chat.observation_ids([message], self.tools, after=action)
        self._parts.append((self._observations[name, text], False))


def best(shop: WebShop) -> int:
    """Return the index of the shown product with the highest reward if all matching options are chosen."""
    worth = []
    for asin in shop.found[: BRIEF["page_size"]]:
        product = shop.catalogue.products[asin]
        offered = [v for v in shop.goal["goal_options"] if any(v in values for values in product.options.values())]
        worth.append(score(product, shop.goal, offered, likely_nouns).reward)
    return worth.index(max(worth))


def lessons(chat: Chat, seed: int) -> tuple[Iterator[list[Demonstration]], Iterator[list[Demonstration]]]:
    """Return infinite iterators over batches of 32 for both phases, without the shop of the tasks."""
    writer = Demonstrator(chat)
    rng = random.Random(f"webshop warm-up {seed}")
    shops = {world: len(Catalogue.invented(world).goals) for world in _SHOWN}

    def drawn() -> tuple[int, int]:
        world = rng.choice(list(shops))
        return world, rng.randrange(shops[world])

    def clean() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit("solves", *drawn(), rng) for _ in range(32)]

    def mixed() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit(name, *drawn(), rng) for name, count in HABITS.items() for _ in range(count)]

    return clean(), mixed()
