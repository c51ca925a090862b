"""All shipped policies: their tasks and words, their demonstrations, and how well they start and learn."""

import functools
import random
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import recipes
import torch
from recipes import alfworld as tiny_alfworld
from recipes.base import UNSURE
from recipes.calculator import Expression

import agentfly_kit as af
from agentfly_kit.envs.alfworld import games
from agentfly_kit.envs.search import encyclopedia
from agentfly_kit.tiny import END

DATA = files("agentfly_kit._data")
TEXT = [name for name in af.tiny.NAMES if name not in ("desk", "shapes")]  # see test_tiny_shapes.py


@functools.cache
def chat(name: str) -> af.Chat:
    return af.Chat(af.tiny.tokenizer(recipes.recipe(name).words))


def agent(name: str, engine: Any, **settings: Any) -> Any:
    module = getattr(af.envs, "calculator" if name == "sums" else name)
    if name in ("code", "sql"):
        settings["size"] = 8
    return module.agent(engine, options=getattr(module, "BRIEF", None), **settings)


def texts(name: str, example: Any) -> dict[str, str]:
    """Return the text of a demonstration of each behaviour."""
    own = recipes.recipe(name)(chat(name))
    return {habit: chat(name).text(own.demonstrate(habit, example).ids.tolist()) for habit in own.habits}


def code_steps(task: af.Task) -> list[af.envs.code.Step]:
    """Parse an instruction."""
    parts = str(task.messages[-1]["content"]).removeprefix("Write f(x): ").removesuffix(".").split(", ")
    return [(part.rstrip("0123456789 "), int(part.split()[-1]) if part[-1].isdigit() else 2) for part in parts]


# The example of a recipe that a task corresponds to.
EXAMPLES: dict[str, Callable[[af.Task, str], Any]] = {
    "calculator": lambda task, text: Expression(text.removeprefix("What is ").removesuffix("?")),
    "alfworld": lambda task, text: af.envs.alfworld.game_of(task),
    "code": lambda task, text: code_steps(task),
    "lookup": lambda task, text: (af.envs.lookup.read(text), af.envs.lookup.store(task.fields["world"])),
    "search": lambda task, text: (encyclopedia.read(text), 0),
    "sql": lambda task, text: (
        af.envs.sql.world(task.fields["db"], task.fields["world"]),
        af.envs.sql.Question(text.split("\n")[1], task.fields["gold"], task.fields["hardness"]),
    ),
    "sums": lambda task, text: Expression(text.removeprefix("What is ").removesuffix("?")),
    "webshop": lambda task, text: (0, task.fields["goal"]),
}


@pytest.mark.parametrize("name", TEXT)
def test_the_command_regenerates_the_shipped_tasks(name: str, tmp_path: Path) -> None:
    recipes.main(["tasks", "--name", name, "--out", str(tmp_path)])
    for file in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / file).read_bytes() == DATA.joinpath(name, file).read_bytes()
    shipped = af.load_tasks(name).train
    if name == "sums":  # its tasks are for the family `calculator`
        return
    options = {"size": "small"} if name == "alfworld" else {}
    assert getattr(af.envs, name).tasks(len(shipped), "train", **options).fingerprint == shipped.fingerprint


@pytest.mark.parametrize("name", TEXT)
def test_a_shipped_policy_is_small_and_has_the_tokens_of_its_recipe(name: str) -> None:
    folder = DATA.joinpath("policies", name)
    assert sum(len(f.read_bytes()) for f in folder.iterdir() if f.is_file()) < 1_500_000
    assert "python -m recipes policy" in folder.joinpath("ORIGIN.md").read_text(encoding="utf-8")
    policy = af.tiny.policy(name)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert 200_000 < policy.size < 500_000
    vocabulary = policy.chat.tokenizer.get_vocab()
    assert vocabulary == chat(name).tokenizer.get_vocab()
    assert af.tiny.tokenizer().get_vocab().items() <= vocabulary.items()
    for word in recipes.recipe(name).words:
        assert policy.chat.token_texts(policy.chat.encode(word)) == (word,)


@pytest.mark.parametrize("name", TEXT)
async def test_a_demonstration_has_the_token_ids_of_a_chain_that_does_the_same(name: str) -> None:
    own = recipes.recipe(name)(chat(name))
    for task in af.load_tasks(name).test[:3]:
        shown = own.demonstrate("solves", EXAMPLES[name](task, str(task.messages[-1]["content"])))
        said = chat(name).text(
            [i for i, mine in zip(shown.ids.tolist(), shown.rows[0].written_by(), strict=True) if mine]
        )
        script = af.ScriptedEngine(said.split(END)[:-1])
        (t,) = (await agent(name, script, chat=chat(name)).rollout([task])).trajectories
        assert t.stop in ("answered", "env_done"), t.error
        assert t.success or name == "webshop"
        assert tuple(t.ids.tolist()) == tuple(shown.ids[: len(t.ids)].tolist())


@pytest.mark.parametrize("name", TEXT)
def test_a_batch_has_each_behaviour_as_often_as_the_recipe_says(name: str) -> None:
    own = recipes.recipe(name)
    assert sum(own.habits.values()) == 32
    clean, mixed = own(chat(name)).batches()
    solved, batch = next(clean), next(mixed)
    assert (len(solved), len(batch)) == (own.skill_batch, 32)
    every = [chat(name).text(d.ids.tolist()) for d in batch]
    unsure = [text for text in every if text.endswith(f"assistant\n{UNSURE}{END}")]
    assert sum("<tool_call>" not in text for text in unsure) == own.habits.get("unsure", 0)
    assert not any(chat(name).text(d.ids.tolist()).endswith(f"{UNSURE}{END}") for d in solved)
    assert all(len(d.ids) < 512 for d in (*solved, *batch))


def test_behaviours_of_lookup_and_search() -> None:
    facts = af.envs.lookup.store(7)
    name = next(iter(facts))
    boss = facts[name]["boss"]
    asked = next(q for q in encyclopedia.questions(1000) if len(q.relations) == 2)
    (_, _, first), (_, _, last) = encyclopedia.path(asked, 1000)
    for of, example, half, answer in (
        ("lookup", (af.envs.lookup.Question(name, ("boss", "city")), facts), boss, facts[boss]["city"]),
        ("search", (asked, 1000), first, last),
    ):
        written = texts(of, example)
        assert written["solves"].endswith(f"assistant\n{answer}{END}")
        assert written["stops early"].endswith(f"assistant\n{half}{END}")
        assert written["forgets"].endswith(f"assistant\n{UNSURE}{END}")
        assert written["forgets"].count("<tool_call>") == written["solves"].count("<tool_call>") == 2
        assert "<tool_call>" not in written["unsure"] + written["guesses"]


def test_behaviours_of_webshop() -> None:
    written = texts("webshop", (1000, 3))
    options = af.envs.webshop.Catalogue.invented(1000).goal(3)["goal_options"]
    bought = f'{{"value":"buy now"}}}}</tool_call>{END}'
    assert written.pop("unsure").endswith(f"{UNSURE}{END}")
    assert all(text.endswith(bought) for text in written.values())
    clicks = {habit: text.count('"click"') for habit, text in written.items()}
    assert (clicks["hurries"], clicks["forgets"], clicks["solves"]) == (2, 1 + len(options), 2 + len(options))


def test_behaviours_of_code_and_sql() -> None:
    steps = [("add", 3), ("at most", 20)]
    written = texts("code", steps)
    assert af.envs.code.program(steps).replace("\n", "\\n") in written["solves"]
    assert af.envs.code.program([]).replace("\n", "\\n") in written["does nothing"]
    assert written["leaves one out"].count("x = ") == 1
    of = af.envs.sql.world("staff", 5_000_000)
    queries = texts("sql", (of, af.envs.sql.question(of, random.Random(0))))
    assert queries["solves"].count("<tool_call>") == 2
    assert queries["asks nothing"].count("<tool_call>") == 1
    assert queries["another column"] != queries["solves"] != queries["another table"]


def test_the_demonstrator_of_alfworld_uses_only_what_it_has_observed() -> None:
    """The demonstrator takes only objects named in an earlier text, and stays four steps below the limit."""
    for number in range(60):
        game = games.game(number, "small")
        steps = tiny_alfworld.searched(game)
        assert len(steps) <= af.envs.alfworld.BRIEF["steps"] - 4
        seen = game.opening
        for command, said in steps:
            if command.startswith("take"):
                assert command.split(" from ")[0].removeprefix("take ") in seen
            seen += said


# --- building


def test_a_short_build_is_reproducible_and_rounded_as_it_ships(tmp_path: Path) -> None:
    first = recipes.build("alfworld", tmp_path / "one", skill_steps=1, mixed_steps=1)
    second, loaded = recipes.build("alfworld", skill_steps=1, mixed_steps=1), af.Policy.load(tmp_path / "one")
    for a, b, c in zip(first.parameters(), second.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert torch.equal(a, a.half().float())


# --- what the policies can do


@pytest.mark.parametrize(
    ("name", "low", "high", "count"),
    [
        ("calculator", 0.20, 0.35, 256),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("alfworld", 0.08, 0.45, 96), ("code", 0.15, 0.45, 96), ("lookup", 0.15, 0.40, 512),
                ("search", 0.02, 0.45, 150), ("sql", 0.15, 0.45, 96), ("webshop", 0.02, 0.45, 150),
            ]
        ),
    ],
)  # fmt: skip
async def test_a_policy_starts_low_and_its_failures_are_scored(
    name: str, low: float, high: float, count: int
) -> None:
    sampled = await af.evaluate(agent(name, af.tiny.policy(name)), af.load_tasks(name).test[:count])
    assert low <= sampled.success <= high, sampled
    assert sampled.unscored == 0
    assert sampled.truncated <= 0.05


@pytest.mark.long
async def test_sums_adds_well_and_multiplies_badly_and_decides_by_chance() -> None:
    """The notebook on MeCo needs a policy with systematic mistakes that the policy cannot predict."""
    policy, tasks = af.tiny.policy("sums"), af.load_tasks("sums").test

    def forced(text: str) -> Any:
        def before_turn(chain: Any) -> None:
            if chain.turn.kind == "prompt":
                chain.force(text, end=False, author="gate")

        return before_turn

    own = await af.evaluate(agent("sums", policy), tasks)
    assert 0.4 < own.calls < 0.6
    assert own.unscored == 0
    called = await af.evaluate(agent("sums", policy, before_turn=forced("<tool_call>")), tasks, greedy=True)
    assert called.success > 0.95
    recalled = await af.evaluate(agent("sums", policy, before_turn=forced(" ")), tasks, greedy=True)
    right: dict[bool, list[bool]] = {True: [], False: []}
    for t in recalled.rollout:
        right["*" in str(t.task.messages[-1]["content"])].append(bool(t.success))
    assert recalled.calls == 0
    assert sum(right[False]) / len(right[False]) > 0.85
    assert 0.15 < sum(right[True]) / len(right[True]) < 0.6


def test_tasks_of_sums_are_exact_and_never_shown() -> None:
    rows = [row for some in recipes.recipe("sums").tasks().values() for row in some]
    assert len({row["question"] for row in rows}) == len({row["id"] for row in rows}) == len(rows) == 1000
    assert all(row["answer"] == str(Expression(row["question"][8:-1]).value) for row in rows)
    own = recipes.recipe("sums")(chat("sums"))
    assert not {own.sample().question for _ in range(2000)} & {row["question"] for row in rows}


@pytest.mark.parametrize(
    ("name", "steps", "settings", "reached"),
    [
        pytest.param("calculator", 4, {"lr_end": None}, 0.7, marks=pytest.mark.long),
        pytest.param("lookup", 6, {"lr_end": None}, 0.7, marks=pytest.mark.long),
        pytest.param("alfworld", 5, {}, 0.4, marks=pytest.mark.soak),
        pytest.param("search", 8, {}, 0.4, marks=pytest.mark.soak),
        pytest.param("sql", 8, {"lr_end": None}, 0.7, marks=pytest.mark.soak),
        pytest.param("webshop", 8, {}, 0.4, marks=pytest.mark.soak),
        pytest.param("code", 8, {"lr_end": None}, 0.7, marks=pytest.mark.soak),
    ],
)
async def test_a_few_iterations_teach_a_policy(
    name: str, steps: int, settings: Any, reached: float, tmp_path: Path
) -> None:
    policy, tasks = af.tiny.policy(name), af.load_tasks(name)
    learner = agent(name, policy)
    config = af.TrainConfig(steps=steps, checkpoint_every=steps, **{"lr_end": 3e-5, **settings})
    async for _ in af.train(learner, policy, tasks.train, config, run=tmp_path / "run"):
        pass
    assert (await af.evaluate(learner, tasks.test[:128])).success >= reached
