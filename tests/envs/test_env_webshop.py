"""webshop: reward, pages and clicks, players, and WebShop's files."""

import json
import re
from pathlib import Path
from typing import Any

import errors
import pytest

import agentfly_kit as af
from agentfly_kit.envs.webshop import Catalogue, WebShop, WebShopText, expert, goods, scoring, tasks
from agentfly_kit.envs.webshop.catalogue import UNBOUNDED, Product


def product(title: str = "Adwin Cotton Shirt", **changes: Any) -> Product:
    settings: dict[str, Any] = {
        "asin": "B1", "title": title, "description": "Made to last.", "bullets": ("Soft to the touch.",), "price": 20.0,
        "price_text": "$20.0", "options": {"color": ("red", "navy blue")}, "attributes": ("machine washable",),
        "query": "shirt", "product_category": "clothing › tops › shirts",
    }  # fmt: skip
    return Product(**(settings | changes))


def goal(**changes: Any) -> dict[str, Any]:
    return {
        "asin": "B1", "query": "shirt", "name": "Adwin Cotton Shirt", "price_upper": 30.0,
        "product_category": "clothing › tops › shirts", "instruction_text": "a shirt", "attributes": ["washable"],
        "goal_options": ["red"],
    } | changes  # fmt: skip


def reward(of: Product, wanted: dict[str, Any], *options: str, nouns: Any = scoring.likely_nouns) -> float:
    return scoring.score(of, wanted, options, nouns).reward


async def visit(task: af.Task, **options: Any) -> WebShop:
    shop = WebShop(**options)
    await shop.reset(task, 0)
    return shop


# ---- the reward


@pytest.mark.parametrize(
    ("bought", "wanted", "options", "expected"),
    [
        (product(), goal(), ["red"], 1.0),
        (product(), goal(), [], pytest.approx(2 / 3)),
        (product(price=30.0), goal(), ["red"], 1.0),  # the bound itself is allowed
        (product(price=30.01), goal(), ["red"], pytest.approx(2 / 3)),
        (product(attributes=("DUMMY_ATTR",)), goal(), ["red"], pytest.approx(2 / 3)),
        (product(attributes=(), bullets=("It is WASHABLE.",)), goal(), ["red"], 1.0),
        (product(attributes=(), description="A washable thing"), goal(), ["red"], 1.0),
        (product("Adwin Washable Shirt", attributes=()), goal(), ["red"], 1.0),
        (product(), goal(attributes=[], goal_options=[]), ["blue"], 1.0),  # the price alone
        (
            product(),
            goal(attributes=["washable", "silk"], goal_options=["red", "large"]),
            ["red"],
            pytest.approx(3 / 5),
        ),
    ],
)
def test_each_part_of_the_reward_counts_as_it_is_defined(
    bought: Any, wanted: Any, options: list[str], expected: Any
) -> None:
    assert reward(bought, wanted, *options) == expected


@pytest.mark.parametrize(
    ("chosen", "wanted", "met"),
    [
        ("red", "red", 1), ("bright red", "red", 1), ("navy blue", "blue", 1),  # "blue" comes before "navy"
        ("dark red", "dark green", 1),  # WebShop's list has "dark" before "red" and "green"
        ("x-large", "large", 1), ("large", "x-large", 1), ("12 ounce", "16 ounce", 1), ("size 8", "8", 1),
        ("red", "blue", 0), ("", "red", 0), ("rouge", "red", 0), ("größe 8", "grosse 8", 0), ("红色", "red", 0),
        ("red " * 500, "blue", 0), ("pack of 2", "pack of two", 1), ("pack of 2", "pack of 12", 1),
    ],
)  # fmt: skip
def test_options_match_by_similarity_or_colour(chosen: str, wanted: str, met: int) -> None:
    got = scoring.score(product(), goal(goal_options=[wanted]), [chosen], scoring.likely_nouns)
    assert got.options == met, (chosen, wanted, scoring.alike(chosen, wanted))


def test_a_synthetic_goals_options_are_pairs() -> None:
    pairs = goal(goal_options={"color": "red", "size": "large"})
    assert scoring.score(product(), pairs, ["red", "large"], scoring.likely_nouns).options == 2
    assert scoring.score(product(), pairs, ["small"], scoring.likely_nouns).options == 0
    assert reward(product(), pairs, "red", "large") == 1.0


@pytest.mark.parametrize(
    ("title", "wanted", "changes", "factor"),
    [
        ("shirt", "shirt", {}, 1.0),
        ("mug", "shirt", {"query": "shirt"}, 0.0),  # not one noun in common
        ("mug", "shirt", {}, 0.0),
        ("a", "a b c d e", {}, 0.5),  # one of five nouns is 0.2, which is not above the threshold
        ("a", "a b c d e", {"query": "shirt"}, 1.0),
        ("a", "a b c d e", {"product_category": "tops › clothing › x"}, 1.0),  # two equal categories, in any order
        ("a", "a b c d e", {"product_category": "clothing › x"}, 0.5),
        ("a", "a b c d", {}, 1.0),
        ("a", "a " + "b " * 10, {"query": "shirt"}, 0.1),  # below a tenth, whatever else agrees
        ("a", "", {"query": "shirt"}, 1.0),  # without nouns in the goal the share is 0.2
        ("a", "", {}, 0.5),
    ],
)
def test_the_type_factor_depends_on_the_nouns_of_the_titles(
    title: str, wanted: str, changes: dict[str, str], factor: float
) -> None:
    bought = product(title, **({"query": "x", "product_category": "a › b"} | changes))
    assert scoring.type_factor(bought, goal(name=wanted), str.split) == factor


def test_likeness_is_that_of_thefuzz() -> None:
    for a, b, ratio in [
        ("cotton", "cotton", 100), ("Cotton!", "  cotton", 100), ("cotton shirt", "shirt", 100), ("", "", 0),
        ("a", "", 0), ("---", "red", 0), ("abcd", "abce", 75), ("é", "e", 0), ("crème", "crme", 100),
    ]:  # fmt: skip
        assert scoring.alike(a, b) == ratio, (a, b)


def test_likely_nouns_are_no_adjectives() -> None:
    assert scoring.likely_nouns("Adwin Washable Cotton Shirt, extra LARGE (2 Pack)") == ["adwin", "shirt", "pack"]
    assert scoring.likely_nouns("") == []


def test_no_two_words_of_the_invented_shop_are_alike() -> None:
    for words in (*goods.VALUES.values(), goods.ATTRIBUTES):
        for a in words:
            assert [b for b in words if scoring.alike(a, b) > scoring.ALIKE] == [a]
    assert len({scoring.color_of(c) for c in goods.COLORS}) == len(goods.COLORS)


# ---- the pages


async def test_pages_are_those_of_webshop() -> None:
    task = tasks(1, "test")[0]
    shop = WebShop()
    opening = await shop.reset(task, 0)
    text = task.messages[-1]["content"]
    assert opening == f"WebShop [SEP] Instruction: [SEP] {text} [SEP] Search"
    assert shop.clickables == ("search",)
    got = shop.search("vegan soap").split(" [SEP] ")
    asins = shop.found[:10]
    assert got[:5] == ["Instruction:", text, "Back to Search", f"Page 1 (Total results: {len(shop.found)})", "Next >"]
    assert got[5::3] == asins
    assert shop.clickables == ("back to search", "next >", *(a.lower() for a in asins))
    second = (await shop.click("next >")).split(" [SEP] ")
    assert second[3:6] == [f"Page 2 (Total results: {len(shop.found)})", "< Prev", "Next >"]
    for _ in range(7):
        past = await shop.click("Next >")  # even the last page has this link
    assert past.endswith("[SEP] < Prev [SEP] Next >")
    for _ in range(8):
        back = await shop.click("< prev")
    assert back.split(" [SEP] ") == got
    one = shop.catalogue.products[asins[0]]
    shown = (await shop.click(asins[0].lower())).split(" [SEP] ")
    options = [t for name, values in one.options.items() for t in (name, *values)]
    about = [one.title, f"Price: {one.price_text}", "Rating: N.A.", "Description", "Features", "Reviews", "Buy Now"]
    assert shown == ["Instruction:", text, "Back to Search", "< Prev", *options, *about]
    assert (await shop.click("Features")).split(" [SEP] ")[2:] == ["Back to Search", "< Prev", *one.bullets]
    assert (await shop.click("< Prev")).split(" [SEP] ") == shown
    scent = one.options["scent"]
    await shop.click(scent[0])
    await shop.click(scent[1])
    assert shop.options == {"scent": scent[1]}  # the last one counts
    last = await shop.click("buy now")
    assert last.startswith(
        "Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk"
    )
    assert f"Purchased [SEP] asin [SEP] {one.asin} [SEP]" in last
    assert re.search(r"Your score \(min 0.0, max 1.0\) \[SEP\] [\d.]+ \[SEP\] Reward Details \[SEP\] None$", last)
    assert shop.done


async def test_clicks_on_missing_elements_change_nothing() -> None:
    task = tasks(1, "test")[0]
    shop = await visit(task)
    await errors.check(
        lambda: shop.click("buy now"), af.ToolError, "'buy now' is not on this page; you can click: search"
    )
    errors.check(lambda: shop.search("  "), af.ToolError, "the keywords must not be empty")
    assert shop.search("qwertyuiop").endswith("Page 1 (Total results: 0) [SEP] Next >")
    text = WebShopText()
    page = await text.reset(task, 0)
    for nonsense in ("", "buy", "click[]", "click[buy now]", "search", "think[hard]", "click[red", "搜索[x]"):
        assert text.act(nonsense) == page, nonsense
        assert not text.done
    assert "Page 1" in text.act("search[VEGAN soap]") and text.keywords == "vegan soap"
    asin = text.found[0]
    assert asin in text.act("search[vegan soap]")  # a search from any page
    assert "Buy Now" in text.act(f" click[{asin}] ")
    assert text.act("click[buy now]").startswith("Thank you")
    assert (await text.reward())["bought"] == 1.0


async def test_a_search_from_an_item_forgets_the_item_and_its_options() -> None:
    shop = await visit(tasks(1, "test")[0])
    shop.search("soap")
    await shop.click(shop.found[0])
    await shop.click(shop.clickables[2])
    assert shop.options
    shop.search("candle")
    assert (shop.asin, shop.options, shop.number) == (None, {}, 1)


# ---- chains


async def test_brief_pages_show_the_same_shop() -> None:
    options = {"brief": True, "page_size": 3}
    some = tasks(20, "test")
    assert (await af.evaluate(expert(options=options), some)).success == 1.0
    shop = await visit(some[0], **options)
    assert re.fullmatch(r"1 [a-z ]+ soap \$\d+\n2 .*\n3 .*", shop.search("soap"))
    assert await shop.click("2") == "\n".join(
        f"{name}: {' '.join(values)}" for name, values in shop.catalogue.products[shop.found[1]].options.items()
    )
    assert (await shop.click(shop.clickables[2])).startswith("scent ")
    assert await shop.click("buy now") == "bought"


# ---- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    items, attributes, instructions = goods.make(3)
    items[0]["pricing"] = "$10.50 to $1,020.00"
    items[1]["pricing"] = ""
    items[2]["asin"] = "nan"
    items[3]["asin"] = items[4]["asin"]
    items[5]["asin"] = "MUCHTOOLONG"
    items[6]["customization_options"] = ""
    items[7]["small_description"] = "one text"
    items[8]["customization_options"] = {"Size": [{"value": " 5/6 XL ", "image": None}], "Fit": None}
    del attributes[items[9]["asin"]]
    for name, value in {
        "items_shuffle_1000": items, "items_ins_v2_1000": attributes, "items_human_ins": instructions,
    }.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return tmp_path


def test_webshops_files_are_read_with_their_quirks(folder: Path) -> None:
    items = json.loads((folder / "items_shuffle_1000.json").read_text(encoding="utf-8"))
    shop = Catalogue.load(folder)
    assert len(shop.products) == 450 - 3
    at: list[Any] = [shop.products.get(row["asin"]) for row in items]
    assert 10.5 <= at[0].price <= 1020 and at[0].price_text == "$10.5 to $1020.0"
    assert (at[1].price, at[1].price_text) == (100.0, "$100.0")
    assert (at[6].options, at[7].bullets, at[8].options) == ({}, ("one text",), {"size": ("5 | 6 xl",)})
    assert at[9].attributes == ("DUMMY_ATTR",)
    for wanted in shop.goals:
        price, bound = shop.products[wanted["asin"]].price, wanted["price_upper"]
        assert (price < bound <= price + 40 and bound % 10 == 0) or bound == UNBOUNDED
        assert wanted["instruction_text"].endswith(f", and price lower than {bound:.2f} dollars") != (
            bound == UNBOUNDED
        )
    assert repr(shop.goals) == repr(Catalogue.load(folder).goals)
    synthetic = Catalogue.load(folder / "items_shuffle_1000.json", folder / "items_ins_v2_1000.json")
    assert isinstance(synthetic.goals[0]["goal_options"], dict)


async def test_tasks_of_files_are_solved_by_the_same_expert(folder: Path) -> None:
    mine = Catalogue.load(folder)
    done = await af.evaluate(expert(options={"catalogue": mine}), tasks(30, "test", catalogue=mine))
    assert done.success == 1.0
    errors.check(
        lambda: tasks(9999, "test", catalogue=mine),
        af.errors.SettingsError,
        re.compile(r"n must be at most \d+, the number of test tasks, got 9999"),
    )
    shop = WebShop(str(folder))
    await errors.check(
        lambda: shop.reset(tasks(5, "train")[4], 0),
        af.errors.SettingsError,
        "use the same catalogue: tasks(catalogue=mine)",
    )
    other = af.Task("x", ({"role": "user", "content": "buy"},), {"goal": 99999, "world": 0})
    await errors.check(
        lambda: WebShop().reset(other, 0),
        af.errors.SettingsError,
        re.compile(r"invalid goal 99999: the catalogue .* has goals 0 to 2249"),
    )


def test_invalid_files_are_named(folder: Path, tmp_path: Path) -> None:
    errors.check(
        lambda: Catalogue.load("nowhere.json"),
        af.errors.SettingsError,
        "nowhere.json: no such file. WebShop's files are items_shuffle",
    )
    (tmp_path / "empty").mkdir()
    errors.check(lambda: Catalogue.load(tmp_path / "empty"), af.errors.SettingsError, "contains no items_shuffle")
    items = folder / "items_shuffle_1000.json"
    for text, words in (
        (items.read_text(encoding="utf-8")[:1000], "is not JSON .* is the download complete"),
        ("{}", "must contain a list of products, got dict"),
        ('[{"title": "x"}]', "product 0 has no 'asin': this is not one of WebShop's files"),
        ("[]", "has no product"),
    ):
        items.write_text(text, encoding="utf-8")
        errors.check(lambda: Catalogue.load(folder), af.errors.SettingsError, re.compile(words))
