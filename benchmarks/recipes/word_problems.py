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
            "{name} types {a} words in each of {b} letters and {c} words in a note. How many words did {name} type?",
            "Every one of {a} trucks brings {b} bricks to the site, where {c} bricks are already waiting. How "
            "many bricks are on the site then?",
            "For a wedding, {a} tables are laid with {b} plates each. A further {c} plates stay in the kitchen. "
            "How many plates are used or kept ready?",
            "One ticket for the museum costs {b} francs. A group of {a} visitors buys tickets and a guided tour "
            "for {c} francs. What does the group pay in all?",
            "{name} swims {a} metres every day. After {b} days {name} swims {c} metres more in a race. What "
            "distance has {name} swum?",
            "A beekeeper has {a} hives with {b} frames per hive, plus {c} spare frames in the shed. How many "
            "frames does the beekeeper own?",
            "A stadium has {b} blocks. Each block seats {a} people, and {c} people can stand. How many people "
            "fit into the stadium?",
            "{name} had {c} stamps. Then {name} inherited {a} albums of {b} stamps. How many stamps are in the "
            "collection now?",
            "A machine needs {a} grams of plastic per toy. It makes {b} toys and wastes {c} grams. How many "
            "grams of plastic does it need?",
            "Renting a boat costs {a} pesos an hour, and the deposit is {c} pesos. {name} rents the boat for "
            "{b} hours. How many pesos must {name} bring?",
            "An orchestra plays {b} concerts for {a} listeners each, and {c} listeners attend the rehearsal. "
            "How many listeners hear the orchestra?",
            "In a forest {a} squirrels hide {b} nuts each, and a jay hides {c} nuts. How many nuts are hidden?",
            "A phone plan costs {b} dollars a month. {name} keeps the plan for {a} months and pays {c} dollars "
            "for the phone. How many dollars is that altogether?",
            "The cook peels {a} carrots for each of {b} pots and {c} carrots for a salad. Find the number of "
            "carrots the cook peels.",
            "A cyclist rides {b} kilometres on each of {a} days. On the day after that, the cyclist rides {c} "
            "kilometres. Calculate the total distance in kilometres.",
            "A gym owns {c} old weights and orders {a} sets with {b} weights in a set. How many weights will "
            "the gym own?",
            "{a} students plant {b} seeds each, and their teacher plants {c} seeds. How many seeds are planted?",
            "A pipe carries {a} litres of oil per second. It runs for {b} seconds into a basin that already "
            "contains {c} litres. How much oil is in the basin at the end?",
            "There were {c} bees in the garden before {a} swarms of {b} bees came. How many bees were there then?",
            "{name} knits {b} rows of {a} stitches and a border of {c} stitches. How many stitches does {name} knit?",
            "A shop sells {a} pairs of shoes at {b} pounds a pair, and socks for {c} pounds in total. How much "
            "money does the shop take in?",
            "{b} ferries with {a} cars on board and one ferry with {c} cars reach the island. How many cars "
            "reach the island?",
            "A camera takes {a} pictures per minute. After {b} minutes {name} adds {c} older pictures. How many "
            "pictures are there in the end?",
            "A quarry sends out {b} wagons of {a} stones, and {c} stones lie beside the road. What is the "
            "number of stones altogether?",
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
            "{name} has {a} boxes with {b} marbles in every box. {name} loses {c} marbles. How many marbles "
            "does {name} have after that?",
            "A hotel has {a} floors with {b} rooms on each floor. Today {c} rooms are taken. How many rooms are "
            "free?",
            "Each of {b} hens lays {a} eggs. {c} eggs break. How many whole eggs are there?",
            "An airline flies {a} times a year with {b} seats on board. Last year {c} seats stayed empty. How "
            "many seats were used?",
            "{name} works {a} hours at {b} euros per hour, and {c} euros go to taxes. How many euros does "
            "{name} keep?",
            "A fisherman empties {a} nets of {b} fish and throws {c} small fish back. How many fish does the "
            "fisherman take home?",
            "The printer prints {b} copies of a book with {a} pages. {c} pages are printed badly. How many "
            "pages are printed well?",
            "{name} must read {b} books of {a} pages. So far {name} has read {c} pages. How many pages are "
            "still to be read?",
            "A dairy fills {a} bottles in each of {b} runs, and {c} bottles turn out to be leaking. How many "
            "bottles can the dairy deliver?",
            "A club buys {a} shirts for {b} dollars each and receives a discount of {c} dollars. What does the "
            "club pay?",
            "A parking deck has {b} levels with {a} spaces per level. Repairs block {c} spaces. How many spaces "
            "can be used?",
            "There are {a} bags of {b} nails in the workshop. A carpenter uses {c} nails. How many nails remain "
            "in the workshop?",
            "{name} finds {a} coins a week and searches for {b} weeks. {name} sells {c} coins. How many coins "
            "does {name} keep?",
            "An orchard of {a} trees gives {b} apples per tree. Birds spoil {c} apples. Find the number of good "
            "apples.",
            "A baker needs {b} grams of flour for each of {a} cakes and already has {c} grams. How many grams "
            "must the baker buy?",
            "A tower has {a} steps on each of {b} stairs. {name} has climbed {c} steps. How many steps are left "
            "to climb?",
            "A company owes {b} payments of {a} pounds. It has paid {c} pounds. How many pounds does it still owe?",
            "{b} classes of {a} pupils go on a trip, but {c} pupils are ill and stay at home. How many pupils go?",
            "A jeweller strings {a} chains of {b} pearls. Later, {c} pearls are taken off again. How many "
            "pearls are still on the chains?",
            "A garage washes {a} cars a day for {b} days. It washes {c} of the cars for nothing. How many cars "
            "are paid for?",
            "{name} prepares {b} trays with {a} sandwiches each. The guests take {c} sandwiches. Calculate how "
            "many sandwiches nobody takes.",
            "A reservoir gets {a} litres an hour for {b} hours while the town uses {c} litres. By how many "
            "litres does the reservoir rise?",
            "The choreographer invites {a} groups of {b} dancers, and {c} dancers decline. How many dancers accept?",
            "A bookshop orders {a} cartons of {b} calendars. At the end of the year {c} calendars are unsold. "
            "How many calendars were sold?",
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
            "A concert hall sells {a} tickets on the internet and {b} tickets at the door. {c} people do not show up. "
            "How many people are in the hall?",
            "{name} collects {a} shells in the morning and {b} shells after lunch and loses {c} shells on the way "
            "home. How many shells does {name} have?",
            "A shepherd has {a} sheep and buys {b} sheep. In autumn {c} sheep are sold. How many sheep does the "
            "shepherd have in winter?",
            "A firm employs {a} people, hires {b} people and dismisses {c} people. How many people does it employ "
            "now?",
            "A tram carries {a} people. At the market {b} people board and {c} people leave. How many people "
            "are in the tram now?",
            "{name} owns {a} cards, is given {b} cards and swaps away {c} cards. How many cards does {name} own "
            "then?",
            "A tank contains {a} litres. {name} pours in {b} litres and then takes out {c} litres. How many "
            "litres does the tank contain?",
            "On Monday a shop has {a} bicycles. It receives {b} bicycles and rents out {c} bicycles. How many "
            "bicycles are in the shop?",
            "A zoo keeps {a} birds. This year {b} birds hatch and {c} birds are moved to another zoo. How many "
            "birds does it keep now?",
            "The account of {name} shows {a} dollars. A payment of {b} dollars arrives, and a bill of {c} "
            "dollars is paid. What does the account show?",
            "There are {a} red and {b} blue balloons at the party. The wind carries off {c} balloons. How many "
            "balloons stay?",
            "{name} walks {a} metres to the post office, {b} metres further to the park and {c} metres back. "
            "How many metres is {name} from home?",
            "A balloon rises {a} metres, then another {b} metres, and sinks by {c} metres. At what height is it?",
            "A kitchen holds {a} forks and {b} spoons. {c} of them are being washed. How many are in the drawer?",
            "A school has {a} girls and {b} boys. Today {c} children are absent. How many children are present?",
            "{name} bakes {a} muffins before lunch and {b} muffins after it. The neighbours receive {c} "
            "muffins. How many muffins does {name} still have?",
            "A hospital has {a} patients in the morning. During the day {b} patients are admitted and {c} "
            "patients are discharged. How many patients does it have in the evening?",
            "A printer had {a} sheets of paper. {name} adds {b} sheets and prints {c} sheets. How many sheets "
            "of paper remain in the printer?",
            "A lake has {a} ducks. In spring {b} ducks fly in, and in autumn {c} ducks fly away. Find the "
            "number of ducks on the lake in winter.",
            "The team scored {a} goals last season and {b} goals this season, but {c} goals were cancelled. How "
            "many goals count?",
            "{name} earns {a} pounds on Friday and {b} pounds on Saturday and pays {c} pounds for the rent. How "
            "many pounds are left?",
            "A depot stores {a} tyres. It buys {b} tyres, and mechanics fit {c} tyres. How many tyres does the "
            "depot store after that?",
            "{a} runners start the race in the first group and {b} in the second. {c} runners give up. How many "
            "runners finish?",
            "A camp has {a} tents. Volunteers put up {b} tents, and a storm tears down {c} tents. Calculate the "
            "number of tents that stand.",
            "A ship sails with {a} containers. In the next port it takes on {b} containers and unloads {c} "
            "containers. How many containers does it carry?",
            "A newspaper has {a} readers. It wins {b} new readers and {c} readers cancel. How many readers does "
            "it have?",
            "In a basket are {a} plums and {b} pears. The children take {c} pieces of fruit. How many pieces of "
            "fruit are in the basket now?",
            "{name} downloads {a} songs, then {b} songs, and deletes {c} of them. How many songs does {name} have?",
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
