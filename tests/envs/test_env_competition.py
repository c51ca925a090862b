"""competition: positions on leaderboards, submissions, what the sandbox contains, and hostile programs."""

import math
import random
import re
from typing import Any

import errors
import pytest
from waiting import GUARD

import agentfly_kit as af
from agentfly_kit.envs.competition import KINDS, Contest, generate, position, read_submission


def task(kind: str = "slope", world: int = 3) -> af.Task:
    return af.Task("t", ({"role": "user", "content": "?"},), {"competition": kind, "world": world})


async def call(of: Contest, name: str, **arguments: str) -> Any:
    return await af.Tool.__get__(vars(Contest)[name], of).function(of, **arguments)


async def run(of: Contest, code: str, name: str = "execute") -> str:
    return str((await call(of, name, code=code)).observation)


@pytest.mark.parametrize(
    ("score", "expected", "lower"),
    [
        (0.95, 1.0, False), (0.9, 1.0, False), (0.85, 0.75, False), (0.6, 0.25, False), (0.5, 0.0, False),
        (0.05, 1.0, True), (0.25, 0.5, True), (0.5, 0.0, True), (math.inf, 0.0, True),
    ],
)  # fmt: skip
def test_positions(score: float, expected: float, lower: bool) -> None:
    board = [0.1, 0.2, 0.3, 0.4] if lower else [0.9, 0.8, 0.7, 0.6]
    assert position(score, board, lower=lower) == position(score, board[::-1], lower=lower) == expected


def test_ties_count_as_wins() -> None:
    assert position(0.5, [0.5] * 8) == position(0.5, [0.5] * 8, lower=True) == 1.0
    assert position(0.4, [0.5] * 8) == 0.0


@pytest.mark.parametrize(
    ("metric", "predicted", "labels", "score"),
    [
        ("accuracy", [1, 0, 1], [1, 1, 1], pytest.approx(2 / 3)),
        ("rmse", [1, 5], [1, 1], pytest.approx(math.sqrt(8))),
        ("mae", [1, 5], [1, 1], 2),
        ("rmsle", [-3, math.e - 1], [0, 0], pytest.approx(math.sqrt(0.5))),
        ("rmse", [1e308], [-1e308], math.inf),
    ],
)
def test_raw_scores(metric: str, predicted: list[float], labels: list[float], score: Any) -> None:
    assert af.envs.competition.raw_score(metric, predicted, labels) == score


def test_submissions_are_read() -> None:
    assert read_submission("id,y\n0,1e-3\n1, 2\n", range(2)) == [0.001, 2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_competitions_are_reproducible_and_their_leaderboards_sorted(kind: str) -> None:
    one = generate(kind, 7)
    generate.cache_clear()
    assert generate(kind, 7) == one != generate(kind, 8)
    for board in (one.public, one.private):
        assert len(board) == 8
        assert list(board) == sorted(board, reverse=not one.lower)
    assert one.score(one.labels)[1:] == (1.0, 1.0)
    rng = random.Random(0)
    assert one.score([rng.uniform(-99, 99) for _ in one.labels])[1:] == (0.0, 0.0)


async def test_better_models_rank_higher_and_a_replay_gives_the_same_scores(closed_later: Any) -> None:
    of = closed_later(Contest())
    for kind, models in {
        "slope": ("mean()", "knn(5)", "linear()"), "tide": ("mean()", "linear()", "quadratic()"),
        "growth": ("mean()", "linear()", "exponential()"), "ring": ("mean()", "knn(5)", "quadratic()"),
    }.items():  # fmt: skip
        means, runs = [], []
        for model in (*models, models[0]):
            best = []
            for world in range(4):
                await of.reset(task(kind, world), 0)
                runs.append(await run(of, f"import baselines\nbaselines.{model}"))
                best.append((await of.reward())["best"])
            means.append(sum(best) / 4)
        assert means[0] < means[1] < means[2] >= 0.75, (kind, means)
        assert runs[:4] == runs[-4:]


async def test_reused_predictions_give_the_same_results_as_running_the_program(closed_later: Any) -> None:
    seen: list[list[str]] = []
    af.envs.competition._KNOWN.clear()
    first, then = "import baselines; x = 'set by the first'; baselines.mean()", "print(x); baselines.linear()"
    for reuse in (False, True, True):
        of = closed_later(Contest(reuse=reuse))
        await of.reset(task(world=11), 0)
        seen.append([await run(of, code) for code in (first, first, then)] + [await run(of, "missing()")])
        assert len(af.envs.competition._KNOWN) == reuse  # only the first program of a chain, and only if it succeeds
        await call(of, "restart")
        assert "NameError" in await run(of, then)  # the reused program is not run again after a restart
    assert seen[0] == seen[1] == seen[2] and "position" in seen[0][2]
    af.envs.competition._KNOWN.clear()


async def test_turn_rewards_add_up_to_the_best_position_and_resubmission_earns_nothing(closed_later: Any) -> None:
    of = closed_later(Contest(shaped=True))
    await of.reset(task(), 0)
    gains = [
        (await call(of, "execute", code=f"import baselines\nbaselines.{code}")).reward
        for code in ("knn(25)", "knn(25)", "linear()", "linear()", "mean()")
    ]
    assert [gain > 0 for gain in gains] == [True, False, True, False, False] and min(gains) == 0
    reward = await of.reward()
    assert reward["reward"] == 0 and reward["submissions"] == 5
    assert sum(gains) == pytest.approx(reward["best"])
    assert (await call(of, "validate", code="import baselines\nbaselines.linear()")).reward == 0
    assert (await of.reward())["submissions"] == 5
    await call(of, "restart")
    assert (await call(of, "execute", code="import baselines\nbaselines.linear()")).reward == 0
    assert len((await call_sync(of, "history")).splitlines()) == 7


async def call_sync(of: Contest, name: str, **arguments: str) -> str:
    return str(vars(Contest)[name].function(of, **arguments))


async def test_information(closed_later: Any) -> None:
    of = closed_later(Contest())
    await of.reset(task("ring"), 0)
    assert await call_sync(of, "request_info", info="metric") == (
        "accuracy, higher is better; the position on the leaderboard counts"
    )
    assert "train.csv (120 rows" in await call_sync(of, "request_info", info="all")
    assert await call_sync(of, "history") == "no program has been run"
    await errors.check(
        lambda: call_sync(of, "request_info", info="labels"), af.ToolError, "info must be overview, metric"
    )


async def test_the_labels_are_not_in_the_sandbox(closed_later: Any) -> None:
    """Search all readable files and the memory of the sandbox for a label that is in no file of the chain."""
    of = closed_later(Contest())
    await of.reset(task(), 0)
    await run(of, "import baselines\nbaselines.mean()")  # scored with the labels
    contest = generate("slope", 3)
    label = f"{contest.labels[0]:.6g}"
    assert not any(label in text for text in contest.files.values())
    code = (
        "import glob, os, re\n"
        "seen = []\n"
        "for path in [*glob.glob('/proc/[0-9]*/environ'), *glob.glob('/proc/[0-9]*/cmdline'), *glob.glob('*'),\n"
        "             *glob.glob('/tmp/**', recursive=True)]:\n"
        "    try:\n"
        "        seen.append(open(path, 'rb').read(10**6).decode('latin-1'))\n"
        "    except OSError:\n"
        "        pass\n"
        "import gc\n"
        "seen += [text for text in gc.get_objects() if isinstance(text, str)]\n"
        f"needle = {label[::-1]!r}[::-1]\n"
        "own = [text for text in seen if needle in text]\n"
        "print(len(seen) > 3, len(own))"
    )
    result = await of._sandbox.run(code)
    assert result.ok, result.error
    assert result.stdout.split() == ["True", "0"]
    assert (await of._sandbox.run("import agentfly_kit")).error_type == "ModuleNotFoundError"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1/0", "the program failed: ZeroDivisionError"), ("x = (", "the program failed: SyntaxError"),
        ("pass", "the program did not write submission.csv"), ("import os; os._exit(3)", "the program failed"),
        ("open('submission.csv', 'w').write('id,y\\n' + '0,1\\n' * 10**7)", "has more than 32768 bytes"),
        ("open('submission.csv', 'wb').write(bytes(10**8))", "the program failed|has more than 32768 bytes"),
        ("import os; os.symlink('/etc/passwd', 'submission.csv')", "submission.csv is not a file"),
        ("import os; os.mkfifo('submission.csv')", "submission.csv is not a file"),
        ("import os; os.mkdir('submission.csv')", "submission.csv is not a file"),
        ("open('submission.csv', 'wb').write(b'\\xff\\xfe' * 50)", "the first line of submission.csv"),
        ("while True: pass", "the program failed"),
        ("import builtins; builtins.print = None\nopen('submission.csv', 'w').write('id,y')", "cannot be read"),
        ("import builtins, sys\nbuiltins.print = lambda *a: sys.stdout.write('ok\\nid,y\\n')", "100 rows, got 0"),
    ],
)  # fmt: skip
async def test_hostile_programs_earn_nothing_and_the_next_chain_is_not_affected(
    code: str, words: str, closed_later: Any
) -> None:
    of = closed_later(Contest(seconds=0.1 if code == "while True: pass" else GUARD))
    await of.reset(task(), 0)
    text = await run(of, code)
    assert re.search(words, text), text
    of._seconds = GUARD
    assert (await of.reward())["best"] == 0
    await of.reset(task(), 1)
    assert "position" in await run(of, "import baselines\nbaselines.linear()")


async def test_an_old_submission_is_not_submitted_again(closed_later: Any) -> None:
    of = closed_later(Contest())
    await of.reset(task(), 0)
    assert await run(of, "import baselines\nbaselines.mean()", "validate") == "the submission is valid"
    assert await run(of, "pass") == "the program did not write submission.csv"
    assert (await of.reward()) == {"reward": 0.0, "success": 0.0, "best": 0.0, "submissions": 0.0, "programs": 2.0}


async def test_a_fork_has_its_own_folder_and_scores(closed_later: Any) -> None:
    one, two, early = closed_later(Contest()), closed_later(Contest()), closed_later(Contest())
    await one.reset(task(), 0)
    score = await run(one, "import baselines\nbaselines.mean()")
    await one.fork(two)
    assert await run(two, "baselines.linear()") != await run(one, "baselines.mean()")
    assert (await two.reward())["best"] > (await one.reward())["best"]
    await one.reset(task(), 1)
    await one.fork(early)  # before the first program of the chain, when its files are not written yet
    assert await run(early, "import baselines\nbaselines.mean()") == score
    assert early.submissions == 1
