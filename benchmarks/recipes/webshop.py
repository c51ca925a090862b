"""Demonstrations for pretraining the `webshop` policy, using the environment's shop, goals and reward.

The task is simpler than WebShop: brief pages of three results (see `af.envs.webshop.BRIEF`) and the fictional
catalogue, in which every word of titles, options and instructions is one token.
"""

from __future__ import annotations

from typing import Any, ClassVar

from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs.webshop import BRIEF, Catalogue, WebShop, family, goods
from agentfly_kit.envs.webshop.scoring import likely_nouns, score
from agentfly_kit.trajectories import Trajectory
from recipes.base import UNSURE, BaseRecipe, single_tokens

_SHORT = ("search", "keywords", "click", "value", "buy now", "bought", *goods.WORDS)
# Shops used for pretraining. They exclude the tasks' shop.
_WORLDS = range(1000, 1012)


class Recipe(BaseRecipe):
    """Recipe for the `webshop` policy. Each example is a shop number and a goal number."""

    name = "webshop"
    words = single_tokens((*_SHORT, *(f" {word}" for word in goods.WORDS)))
    tools = tuple(tool.schema for tool in family.tools)
    # solves: search for everything requested, open the best result, choose the options and buy; takes the first: search
    # only for the type of product and open the first result; forgets: leave out one option; hurries: buy without
    # choosing options; unsure: answer "I don't know".
    habits: ClassVar = {"solves": 9, "takes the first": 2, "forgets": 3, "hurries": 6, "unsure": 12}
    skill_steps, mixed_steps = 350, 80
    half = True

    def __init__(self, chat: Chat, seed: int = 0) -> None:
        super().__init__(chat, seed)
        self._shop = WebShop(**BRIEF)

    def sample(self) -> tuple[int, int]:
        world = self.rng.choice(_WORLDS)
        return world, self.rng.randrange(len(Catalogue.invented(world).goals))

    def demonstrate(self, habit: str, example: tuple[int, int]) -> Trajectory:
        world, number = example
        shop = self._shop
        shop.enter(Catalogue.invented(world), number)
        goal = shop.goal
        if habit == "unsure":
            return self.conversation(goal["instruction_text"], (), UNSURE)
        calls: list[tuple[str, dict[str, Any], str | None]] = []

        def click(value: str) -> None:
            page = shop.clicked(value)
            calls.append(("click", {"value": value}, None if shop.done else page))  # the last page is not shown

        wanted = list(goal["goal_options"])
        first = habit == "takes the first"
        keywords = goal["query"] if first else " ".join((*goal["attributes"], goal["query"], *wanted))
        calls.append(("search", {"keywords": keywords}, shop.searched(keywords)))
        click(str(1 if first else 1 + best(shop)))
        if habit == "hurries":
            wanted = []
        elif habit == "forgets":
            wanted.remove(self.rng.choice(wanted))
        for value in wanted:
            if value in shop.clickables:
                click(value)
        click("buy now")
        return self.conversation(goal["instruction_text"], calls)


def best(shop: WebShop) -> int:
    """Return the index of the shown product with the highest reward, assuming that all matching options are chosen."""
    worth = []
    for asin in shop.found[: BRIEF["page_size"]]:
        product = shop.catalogue.products[asin]
        offered = [v for v in shop.goal["goal_options"] if any(v in values for values in product.options.values())]
        worth.append(score(product, shop.goal, offered, likely_nouns).reward)
    return worth.index(max(worth))
