"""Invalid settings and arguments of task families. Files with errors are in the tests of each family."""

import math
from pathlib import Path
from typing import Any

import errors
from test_envs import Guess

import agentfly_kit as af
from agentfly_kit.envs.alfworld import official
from agentfly_kit.envs.chess.board import from_fen
from agentfly_kit.envs.competition import position, read_submission
from agentfly_kit.envs.judge.judging import Judge, Rubric
from agentfly_kit.envs.retrieval import VectorIndex, WordIndex
from agentfly_kit.envs.search import Corpus, Search

BARE = af.Task("x", ({"role": "user", "content": "?"},))
POSITIONS = (
    "", "8/8/8/8/8/8/8/8 w - - 0 1", "4k3/8/8/8/8/8/8/4K3", "4k3/8/8/8/8/8/8/4K3 x - - 0 1",
    "4k3/9/8/8/8/8/8/4K3 w - - 0 1", "4k3/8/8/8/8/8/4R3/4K3 w - - 0 1", "P3k3/8/8/8/8/8/8/4K3 w - - 0 1",
    "4k3/8/8/8/8/8/8/4K3 w QK - 0 1", "4k3/8/8/8/8/8/8/4K3 w - e5 0 1", "kk6/8/8/8/8/8/8/4K3 w - - 0 1",
)  # fmt: skip
RUBRICS: tuple[Any, ...] = (
    [], {}, [{"name": "x"}], 7, {"a b": "x"}, [{"name": "a", "what": "x", "weight": 0}],
    [{"name": "a", "what": "x"}] * 2,
)  # fmt: skip
LEADERBOARDS: tuple[Any, ...] = ((math.nan, [0.5]), (0.5, [0.5, math.nan]))
SUBMISSIONS = (
    ("", "the first line of submission.csv must be 'id,y', got ''"), ("id,y", "must have 2 rows, got 0"),
    ("y,id\n0,1\n1,1", "the first line of submission.csv"), ("id,y\n0,1\n1,2\n2,3", "must have 2 rows, got 3"),
    ("id,y\n0,1\n1,NaN", "row 1 of submission.csv must be '1,' and a number, got '1,NaN'"),
    ("id,y\n0,inf\n1,1", "row 0 of"), ("id,y\n0,x\n1,1", "row 0 of"), ("id,y\n1,1\n0,1", "row 0 of"),
    ("id,y\n0\n1", "row 0 of"), ("id,y\n0," + "9" * 10_000 + "\n1,1", "row 0 of"),
)  # fmt: skip


test_errors = errors.rejected(
    (lambda: af.envs.maze, AttributeError, "agentfly_kit.envs.maze was removed in 0.3; use another family, such as "),
    (lambda: af.envs.to_gymnasium, AttributeError, "was removed in 0.3; use af.envs.tools and af.envs.reward, or "),
    (
        lambda: af.envs.alfworld.tasks(1, "test", size="huge"),
        af.errors.SettingsError,
        "size must be one of 'small', 'full', got 'huge'",
    ),
    (
        lambda: af.envs.alfworld.tasks(1, "test", kinds=("cook",)),
        af.errors.SettingsError,
        "kinds must be a list with some of ",
    ),
    (lambda: af.envs.alfworld.game_of(BARE), af.errors.SettingsError, "field 'game' is missing"),
    (
        lambda: af.envs.alfworld.ALFWorld(steps=0),
        af.errors.SettingsError,
        "steps must be an integer of at least 1, got 0",
    ),
    (lambda: af.envs.alfworld.tasks_in("nowhere"), af.errors.SettingsError, "is not a folder; "),
    (lambda: official.Session("other.tw-pddl"), af.errors.SettingsError, "the game 'other.tw-pddl' does not exist"),
    *((lambda fen=fen: from_fen(fen), af.errors.SettingsError, "is not a valid position") for fen in POSITIONS),
    (lambda: af.envs.chess.tasks_in("nowhere.csv"), af.errors.TaskError, "no such file; Lichess publishes"),
    (lambda: af.envs.code.Code(seconds=0), af.errors.SettingsError, "seconds must be a finite number above 0, got 0"),
    (
        lambda: af.envs.code.tasks(9, "test", kind="problems"),
        af.errors.SettingsError,
        "n must be at most 8, the number of test tasks",
    ),
    (lambda: af.envs.code.tasks(kind="katas"), af.errors.SettingsError, "got 'katas'"),
    (
        lambda: af.envs.code.load("mbpp.jsonl"),
        af.errors.TaskError,
        "no such file; pass the path of MBPP's mbpp.jsonl",
    ),
    *((lambda given=given: position(*given), af.errors.SettingsError, "must not be NaN") for given in LEADERBOARDS),
    *((lambda text=text: read_submission(text, range(2)), af.ToolError, words) for text, words in SUBMISSIONS),
    *((lambda spec=spec: Rubric.from_spec(spec), af.errors.SettingsError, "") for spec in RUBRICS),
    (lambda: Judge(af.ScriptedEngine(["x"])).score(BARE, "x"), af.errors.SettingsError, "no field 'rubric'"),
    (lambda: af.envs.repo.mutation.mutations("("), SyntaxError, ""),
    (lambda: af.envs.repo.repository(Path("x")), af.errors.SettingsError, "repository must be an existing folder"),
    (
        lambda: af.envs.scienceworld.ScienceWorld(steps=0),
        af.errors.SettingsError,
        "steps must be an integer of at least 1, got 0",
    ),
    (lambda: af.envs.scienceworld.ScienceWorld(simplification="openDors"), af.errors.SettingsError, "got 'openDors'"),
    (
        lambda: af.envs.scienceworld.ScienceWorld(simplification="easy,openDoors"),
        af.errors.SettingsError,
        "got 'easy,openDoors'",
    ),
    (
        lambda: af.envs.scienceworld.rows(1, "test", kinds=("cook",)),
        af.errors.SettingsError,
        "no kind of task named 'cook'",
    ),
    (lambda: af.envs.scienceworld.rows(1, "exam"), af.errors.SettingsError, "unknown split 'exam'"),
    (lambda: Corpus.load("nowhere.jsonl"), af.errors.TaskError, "nowhere.jsonl: no such file; its rows must have "),
    (lambda: Corpus([]), af.errors.SettingsError, "the corpus 'yours' is empty"),
    (lambda: WordIndex([]), af.errors.SettingsError, "an index needs at least one text"),
    (lambda: VectorIndex([], list), af.errors.SettingsError, "an index needs at least one text"),
    (lambda: Search(topk=0), af.errors.SettingsError, "topk must be an integer of at least 1, got 0"),
    (lambda: Search(metric="rouge"), af.errors.SettingsError, "metric must be one of 'em', 'f1', got 'rouge'"),
    (lambda: af.envs.search.tasks(5000, "train"), af.errors.SettingsError, "the number of train tasks, got 5000"),
    (lambda: af.envs.tools(Guess()), af.errors.SettingsError, "the environment must be a class"),
    (
        lambda: af.envs.webshop.WebShop(page_size=0),
        af.errors.SettingsError,
        "page_size must be an integer of at least 1, got 0",
    ),
    (
        lambda: af.envs.webshop.WebShop().reset(BARE, 0),
        af.errors.SettingsError,
        "field 'goal' is missing: create tasks with af.envs.",
    ),
)
