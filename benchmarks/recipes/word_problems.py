"""Word problems in everyday wording for a pretrained model with a calculator. There is no shipped policy for them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly_kit.envs.exact import shown, value

SIZES = {"train": 648, "test": 96}
_PEOPLE = {
    "train": ("Alma", "Bruno", "Carla", "Daniel", "Elena", "Felix", "Greta", "Hassan", "Ines", "Jonas"),
    "test": ("Kaya", "Leo", "Marta", "Noah", "Paula", "Samir"),
}
# The wordings of each expression. Those of the test split share no sentence with those of the train split; see
# tests/test_word_problems.py.
WORDINGS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "train": {
        "{a}*{b}+{c}": (
            "A school orders {a} boxes of pencils. Each box holds {b} pencils. There are already {c} pencils in the "
            "cupboard. How many pencils does the school have after the delivery?",
            "{name} earns {a} euros a day and works for {b} days. At the end there is a bonus of {c} euros. How much "
            "money does {name} get in total?",
            "A hall has {a} rows with {b} seats each, and {c} more seats on the balcony. How many seats are there "
            "altogether?",
            "A truck carries {a} crates of {b} bottles, and another {c} bottles are loaded without a crate. How many "
            "bottles are on the truck?",
            "A farmer plants {a} trees in each of {b} fields. Along the road, {c} more trees are planted. How many "
            "trees does the farmer plant in all?",
            "{name} reads {a} pages a day for {b} days and then {c} pages on the last evening. How many pages has "
            "{name} read?",
            "Repairing a car takes {a} hours at {b} euros per hour. The spare parts cost {c} euros. How much does the "
            "repair cost?",
            "A printer makes {a} posters a minute and has been running for {b} minutes. Before that, {c} posters were "
            "finished. How many posters are finished now?",
            "A theatre puts {a} chairs into each of {b} rows and {c} chairs behind the last row. How many chairs are "
            "in the theatre?",
            "{name} buys {a} bags of rice for {b} euros each and a pot for {c} euros. How much does {name} pay?",
            "A ship loads {a} containers that weigh {b} tons each and a machine that weighs {c} tons. What is the "
            "weight of the load?",
            "A book has {b} pages with {a} words each and a foreword of {c} words. How many words does the book "
            "have?",
        ),
        "{a}*{b}-{c}": (
            "A bakery fills {a} trays with {b} rolls each. By noon, {c} rolls have been sold. How many rolls are "
            "left?",
            "{name} buys {a} packs of {b} stickers and gives {c} stickers to a friend. How many stickers does {name} "
            "still have?",
            "A cinema sells {a} tickets at {b} euros each. The rent for the evening is {c} euros. How much money "
            "remains?",
            "A library receives {a} parcels of {b} books. {c} of the books are damaged and are sent back. How many "
            "books does the library keep?",
            "A factory produces {a} lamps an hour for {b} hours. {c} of the lamps fail the final test. How many "
            "lamps "
            "pass the test?",
            "There are {a} buses with {b} seats each, and {c} of the seats are empty. How many passengers are on the "
            "buses?",
            "A farm collects {a} baskets of {b} potatoes. {c} potatoes are thrown away because they are rotten. How "
            "many good potatoes are there?",
            "{name} saves {a} euros a month for {b} months and then spends {c} euros on a holiday. How many euros "
            "does "
            "{name} have after the holiday?",
            "A tank is filled with {a} litres a minute for {b} minutes. Then {c} litres leak out. How many litres "
            "are in the tank?",
            "{name} bakes {a} plates of {b} biscuits each, and the children eat {c} biscuits. How many biscuits "
            "remain?",
            "A street has {a} houses with {b} windows each. A storm breaks {c} windows. How many windows are not "
            "broken?",
            "A florist ties {a} bunches of {b} tulips and removes {c} tulips that have faded. How many fresh tulips "
            "are there?",
        ),
        "{a}+{b}-{c}": (
            "There are {a} cars in a garage. In the morning {b} cars arrive, and in the afternoon {c} cars leave. "
            "How "
            "many cars are in the garage in the evening?",
            "{name} has {a} euros, gets {b} euros from an aunt and spends {c} euros on a bicycle. How much money "
            "does "
            "{name} have now?",
            "A train leaves with {a} passengers. At the first station {b} people get on and {c} people get off. How "
            "many passengers are on the train?",
            "A pond holds {a} litres of water. The rain adds {b} litres, and {c} litres evaporate. How many litres "
            "does the pond hold then?",
            "A village has {a} inhabitants. Within a year {b} people move in and {c} people move away. How many "
            "inhabitants does it have after that year?",
            "A warehouse has {a} tables on the ground floor and {b} tables upstairs. {c} tables are sold. How many "
            "tables remain?",
            "A library has {a} novels and {b} comics. Readers have borrowed {c} of these books. How many books are "
            "on "
            "the shelves?",
            "{name} picks {a} cherries on Monday and {b} cherries on Tuesday, and eats {c} cherries. How many "
            "cherries "
            "does {name} bring home?",
            "A concert hall sells {a} tickets on the internet and {b} tickets at the door. {c} people do not come. "
            "How many people are in the hall?",
            "{name} collects {a} shells in the morning and {b} shells after lunch and loses {c} shells on the way "
            "home. How many shells does {name} have?",
            "A shepherd has {a} sheep and buys {b} sheep. In autumn {c} sheep are sold. How many sheep does the "
            "shepherd have in winter?",
            "A firm employs {a} people, hires {b} people and dismisses {c} people. How many people does it employ "
            "now?",
        ),
    },
    "test": {
        "{a}*{b}+{c}": (
            "A hotel washes {a} towels per floor on {b} floors. The pool needs {c} towels as well. What is the total "
            "number of towels?",
            "{name} fills {a} shelves with {b} jars on every shelf and puts {c} additional jars on the table. How "
            "many "
            "jars is that together?",
            "A choir travels in {a} vans with {b} singers in each van, and {c} singers come by train. How many "
            "singers travel?",
            "A builder lays {a} lines of {b} tiles and needs {c} tiles for the corners. How many tiles does the "
            "builder use?",
        ),
        "{a}*{b}-{c}": (
            "A gardener buys {a} bags with {b} bulbs in each. Mice eat {c} of the bulbs. How many bulbs can be "
            "planted?",
            "A band sells {a} records for {b} dollars apiece, and making them costs {c} dollars. How large is the "
            "profit?",
            "A postman has {a} bundles with {b} letters in every bundle. {c} letters have a wrong address. How many "
            "letters can he deliver?",
            "{name} plants {a} beds with {b} lettuces in each bed, and snails destroy {c} lettuces. How many "
            "lettuces can {name} harvest?",
        ),
        "{a}+{b}-{c}": (
            "A museum owns {a} paintings, buys {b} new paintings and lends {c} paintings to another museum. How many "
            "paintings are in the museum?",
            "{name} has {a} points in a game, wins {b} points and then loses {c} points. What is the score of "
            "{name}?",
            "A bakery has {a} loaves at dawn, bakes {b} more loaves and sells {c} loaves. How many loaves does the "
            "bakery have at night?",
            "A server stores {a} files. A user uploads {b} files and deletes {c} files. How many files does the "
            "server store now?",
        ),
    },
}


def tasks(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Generate the rows of both splits. The wordings take turns, so that each occurs equally often."""
    return {split: _rows(split, count, seed) for split, count in SIZES.items()}


def _rows(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"word problems {split} {seed}")
    expressions = list(WORDINGS[split])
    rows: list[dict[str, Any]] = []
    for i in range(count):
        shape = expressions[i % len(expressions)]
        wordings = WORDINGS[split][shape]
        numbers = _numbers(shape, rng)
        expression = shape.format(**numbers)
        person = rng.choice(_PEOPLE[split])
        rows.append(
            {
                "id": f"word-problems-{split}-{i:04d}",
                "question": wordings[i // len(expressions) % len(wordings)].format(name=person, **numbers),
                "answer": shown(value(expression)),
                "expression": expression,
            }
        )
    return rows


def _numbers(shape: str, rng: random.Random) -> dict[str, int]:
    """Draw numbers between 3 and 999 with which no intermediate result is negative."""
    if shape == "{a}+{b}-{c}":
        a, b = rng.randint(101, 999), rng.randint(101, 999)
        return {"a": a, "b": b, "c": rng.randint(11, min(a, 999))}
    a, b = rng.randint(12, 999), rng.randint(11, 99)
    return {"a": a, "b": b, "c": rng.randint(11, min(a * b, 999))}
