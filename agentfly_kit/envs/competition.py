"""competition: small machine-learning competitions, scored by leaderboard position (as in MLE-Dojo).

A chain writes Python programs that read train.csv and test.csv and write submission.csv. The programs run in a sandbox
with the standard library only. The labels of the test rows never enter the sandbox: the environment reads
submission.csv and scores it in this process. Each chain's folder contains simple models in baselines.py.

    agent = af.envs.competition.agent(engine, chat=chat, options={"shaped": True})

Four kinds of data are generated: "slope" (a plane), "tide" (a curved surface), "growth" (exponential) and "ring" (two
classes). Each competition has a public and a private leaderboard of eight competitors.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit import task_files
from agentfly_kit.envs.base import SandboxEnvironment
from agentfly_kit.envs.family import Family, Move, first_world, int_field, row_id, tool_outputs
from agentfly_kit.errors import SandboxError, SettingsError, TaskError, ToolError
from agentfly_kit.sandboxes.python import PythonSandbox
from agentfly_kit.sandboxes.settings import forward_signature
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, ToolResult

# Maps a kind of competition to its metric. Lower values are better, except for accuracy.
KINDS = {"slope": "rmse", "tide": "mae", "growth": "rmsle", "ring": "accuracy"}
# A leaderboard position, from 0 to 1, of at least this value counts as a success.
MEDAL = 0.75
_TRAIN, _TEST, _COMPETITORS = 120, 100, 8
# Maximum size of submission.csv, in bytes.
_LONGEST = 32_768

# --- scores --------------------------------------------------------------------------------------


def position(score: float, leaderboard: Sequence[float], *, lower: bool = False) -> float:
    """Return the fraction of the competitors on a leaderboard that a submission ties with or beats.

    The fraction is (N - k + 1) / N, where k is the rank of the best of these competitors, or N + 1 if there are none.

    Args:
        score: score of the submission.
        leaderboard: scores of the N competitors, in any order.
        lower: True if lower scores are better.

    Raises:
        SettingsError: if a number is NaN.
    Source:
        MLE-Dojo, arXiv 2505.07782, and its code, where the reward is the average over both leaderboards.
    """
    if math.isnan(sum([score, *leaderboard])):
        raise SettingsError(f"score and leaderboard must not be NaN, got {score} and {leaderboard!r:.100}")
    return sum(score <= other if lower else score >= other for other in leaderboard) / len(leaderboard)


def raw_score(metric: str, predictions: Sequence[float], labels: Sequence[float]) -> float:
    """Compute the metric "accuracy", "rmse", "mae" or "rmsle". For "rmsle", negative predictions count as 0."""
    if metric == "accuracy":
        return sum(p == y for p, y in zip(predictions, labels, strict=True)) / len(labels)
    if metric == "rmsle":
        predictions, labels = ([math.log1p(max(v, 0.0)) for v in values] for values in (predictions, labels))
    gaps = [abs(p - y) for p, y in zip(predictions, labels, strict=True)]
    if metric == "mae":
        return sum(gaps) / len(gaps)
    return math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))


def read_submission(text: str, ids: Sequence[int]) -> list[float]:
    """Parse the text of a submission.csv and return the predictions, in the order of `ids`.

    Raises:
        ToolError: if the text is invalid. The message describes the first error.
    """
    header, *lines = text.strip().splitlines() or [""]
    if header.strip() != "id,y":
        raise ToolError(f"the first line of submission.csv must be 'id,y', got {header[:40]!r}")
    if len(lines) != len(ids):
        raise ToolError(f"submission.csv must have {len(ids)} rows, got {len(lines)}")
    found = []
    for number, line in zip(ids, lines, strict=True):
        name, _, value = line.partition(",")
        try:
            found.append(float(value) if len(value) <= 40 and name.strip() == str(number) else math.nan)
        except ValueError:
            found.append(math.nan)
        if not math.isfinite(found[-1]):
            raise ToolError(f"row {number} of submission.csv must be '{number},' and a number, got {line[:40]!r}")
    return found


# --- generated competitions ----------------------------------------------------------------------


@dataclass(frozen=True)
class Competition:
    """A generated competition. The labels and both leaderboards (`public`, `private`) are never shown to the chain."""

    name: str
    metric: str
    train: tuple[tuple[float, ...], ...]
    test: tuple[tuple[float, ...], ...]
    labels: tuple[float, ...]
    public: tuple[float, ...]
    private: tuple[float, ...]

    @property
    def lower(self) -> bool:
        return self.metric != "accuracy"

    def score(self, predictions: Sequence[float]) -> tuple[float, float, float]:
        """Return the raw score on the public half of the test rows, and the positions on both leaderboards."""
        public, private = (raw_score(self.metric, predictions[i::2], self.labels[i::2]) for i in (0, 1))
        return (
            public,
            position(public, self.public, lower=self.lower),
            position(private, self.private, lower=self.lower),
        )

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """Files to write to the chain's folder, as {name: content}."""
        return {
            "train.csv": "id,x1,x2,y\n"
            + "".join(f"{i},{x:.6f},{z:.6f},{y:.6g}\n" for i, (x, z, y) in enumerate(self.train)),
            "test.csv": "id,x1,x2\n" + "".join(f"{i},{x:.6f},{z:.6f}\n" for i, (x, z) in enumerate(self.test)),
            "sample_submission.csv": "id,y\n" + "".join(f"{i},0\n" for i in range(_TEST)),
            "baselines.py": task_files.bundled_folder().joinpath("competition", "baselines.py").read_text("utf-8"),
        }


@functools.lru_cache(256)
def generate(kind: str, world: int) -> Competition:
    """Generate a competition from its kind and number. The competitors predict the true values with random errors."""
    rng = random.Random(f"competition {kind} {world}")
    a, b, c = (rng.choice((-1, 1)) * rng.uniform(1.0, 2.0) for _ in range(3))
    laws: dict[str, Callable[[float, float], float]] = {
        "slope": lambda x, z: a * x + b * z + c,
        "tide": lambda x, z: a * x * x + b * x * z + c * z,
        "growth": lambda x, z: math.exp(a * x + b * z + 1.0),
        "ring": lambda x, z: float(x * x + z * z < 0.64),
    }
    points = [(round(rng.uniform(-1, 1), 6), round(rng.uniform(-1, 1), 6)) for _ in range(_TRAIN + _TEST)]

    def noisy(point: tuple[float, float], noise: float) -> float:
        y = laws[kind](*point)
        if kind == "ring":
            return 1.0 - y if rng.random() < min(0.6 * noise, 0.5) else y
        return float(f"{y * math.exp(rng.gauss(0, noise)) if kind == 'growth' else y + rng.gauss(0, noise):.6g}")

    ys = [noisy(point, 0.08) for point in points]
    test, labels = points[_TRAIN:], ys[_TRAIN:]
    boards: tuple[list[float], list[float]] = ([], [])
    for i in range(_COMPETITORS):
        guesses = [noisy(point, 0.12 * 1.45**i) for point in test]
        for half, board in enumerate(boards):
            board.append(raw_score(KINDS[kind], guesses[half::2], labels[half::2]))
    name = f"{kind}-{hashlib.sha256(f'{kind} {world}'.encode()).hexdigest()[:8]}"
    train = tuple((*point, y) for point, y in zip(points, ys[:_TRAIN], strict=False))
    best_first = (tuple(sorted(board, reverse=kind == "ring")) for board in boards)
    return Competition(name, KINDS[kind], train, tuple(test), tuple(labels), *best_first)


# --- environment ---------------------------------------------------------------------------------

_SEED = """
for _name, _text in {files!r}.items():
    with open(_name, "w") as _file:
        _file.write(_text)
"""
_COLLECT = f"""
def _collect():
    import os, stat
    try:
        about = os.lstat("submission.csv")
    except OSError:
        return "missing"
    try:
        if not stat.S_ISREG(about.st_mode):
            return "strange"
        if about.st_size > {_LONGEST}:
            return "long"
        with open("submission.csv", encoding="utf-8", errors="replace") as file:
            return "ok\\n" + file.read({_LONGEST})
    finally:
        os.rename("submission.csv", "submission.old") if stat.S_ISDIR(about.st_mode) else os.remove("submission.csv")
print(_collect())
"""
_REFUSED = {
    "missing": "the program did not write submission.csv",
    "strange": "submission.csv is not a file",
    "long": f"submission.csv has more than {_LONGEST} bytes",
}


# Default settings of the sandbox. `preload` lists the modules that baselines.py imports.
_SETTINGS: dict[str, Any] = {"packages": False, "max_output": 2**17, "preload": ("csv", "math")}
# Maps the name of a competition and a program to the program's predictions, for `reuse`.
_KNOWN: dict[tuple[str, str], list[float]] = {}
_MAX_KNOWN = 4096


@forward_signature(PythonSandbox, **_SETTINGS)
class Contest(SandboxEnvironment):
    """Environment for one competition, whose files are in the working folder of a Python interpreter.

    The position of a submission is the mean of its positions on the public and the private leaderboard. The reward is
    the best position.

    Args:
        shaped: if true, the turn reward of a submission is the amount by which it improves the best position, and the
            final reward is 0. Shaping does not change the total reward. Submitting the same file again gives a reward
            of 0.
        seconds: time limit for one program.
        reuse: if the first program of a chain has already succeeded as the first program of another chain of the same
            competition, reuse the predictions instead of running the program again. The programs must be deterministic,
            and all environments of the process that reuse predictions must have the same settings.
        **sandbox: settings of `PythonSandbox`.
    """

    _sandbox: PythonSandbox

    def __init__(self, *, shaped: bool = False, seconds: float = 5.0, reuse: bool = False, **sandbox: Any) -> None:
        self._sandbox = PythonSandbox(**(_SETTINGS | sandbox))
        self._shaped, self._seconds, self._reuse = shaped, seconds, reuse
        # The program whose predictions were reused and which must still run before the next program.
        self._skipped: str | None = None
        # `_fresh` is True if the interpreter is unused, `_written` if its folder has the files of the current
        # competition.
        self._fresh, self._written = True, False
        self.best, self.submissions, self.events = 0.0, 0, list[str]()

    def check_task(self, task: Task) -> None:
        """Raise TaskError if the kind of competition is unknown or `world` is not an integer."""
        kind = task.fields.get("competition")
        if not isinstance(kind, str) or kind not in KINDS:
            raise TaskError(f"field 'competition' must be one of {', '.join(map(repr, KINDS))}, got {kind!r:.100}")
        int_field(task, "world")

    async def reset(self, task: Task, seed: int) -> None:
        """Select the task's competition. The files are written before the first program runs."""
        self.check_task(task)
        self._contest = generate(task.fields["competition"], task.fields["world"])
        self.best, self.submissions, self.events = 0.0, 0, []
        self._written, self._skipped = False, None

    async def _write_files(self) -> None:
        if not self._fresh:
            await self._sandbox.reset()
        self._fresh = False
        written = await self._sandbox.run(_SEED.format(files=self._contest.files), timeout=60.0)
        if not written.ok:
            raise SandboxError(f"the files of the competition could not be written: {written.error}")
        self._written = True

    @tool
    def request_info(self, info: str) -> str:
        """Get information about the competition.

        Args:
            info: overview, metric, data, sample_submission or all.
        """
        better = "lower" if self._contest.lower else "higher"
        texts = {
            "overview": f"{self._contest.name}: predict y from x1 and x2. Write submission.csv with columns id and y.",
            "metric": f"{self._contest.metric}, {better} is better; the position on the leaderboard counts",
            "data": f"train.csv ({_TRAIN} rows: id,x1,x2,y), test.csv ({_TEST} rows: id,x1,x2), "
            "baselines.py (models that write a submission)",
            "sample_submission": "id,y\n0,0\n1,0",
        }
        if info != "all" and info not in texts:
            raise ToolError(f"info must be {', '.join(texts)} or all")
        return "\n".join(texts.values()) if info == "all" else texts[info]

    @tool(timeout=120.0)
    async def validate(self, code: str) -> ToolResult:
        """Run a program without submitting its output.

        Args:
            code: the program.
        """
        return self._log("validate", *await self._run(code, submit=False))

    @tool(timeout=120.0)
    async def execute(self, code: str) -> ToolResult:
        """Run a program and submit the submission.csv that it writes.

        Args:
            code: the program.
        """
        return self._log("execute", *await self._run(code, submit=True))

    @tool
    def history(self) -> str:
        """List the programs run so far and their results."""
        return "\n".join(self.events) or "no program has been run"

    @tool(name="reset")
    async def restart(self) -> str:
        """Restore the folder and the interpreter. Submissions made so far still count."""
        self._written, self._skipped = False, None
        return "The initial files of the folder were restored."

    async def _run(self, code: str, *, submit: bool) -> tuple[bool, str, float]:
        """Run a program. Return (True on success, observation, improvement of the best position)."""
        try:
            predictions = await self._predictions(code)
        except ToolError as error:
            return False, str(error), 0.0
        if not submit:
            return True, "the submission is valid", 0.0
        raw, public, private = self._contest.score(predictions)
        gain = max(0.0, (public + private) / 2 - self.best)
        self.best += gain
        self.submissions += 1
        return True, f"{self._contest.metric} {raw:.4f}, position {public:.2f}", gain

    async def _predictions(self, code: str) -> list[float]:
        """Return the predictions that a program writes. Raise ToolError if there are none or the program fails."""
        key = (self._contest.name, code) if self._reuse and not self.events else None
        if key is not None and key in _KNOWN:
            self._skipped = code
            return _KNOWN[key]
        if not self._written:
            await self._write_files()
        if self._skipped is not None:
            skipped, self._skipped = self._skipped, None
            try:
                await self._collect(skipped)
            except ToolError as error:
                raise SandboxError(f"the program whose predictions were reused fails when it runs: {error}") from None
        predictions = read_submission(await self._collect(code), range(len(self._contest.test)))
        if key is not None and len(_KNOWN) < _MAX_KNOWN:
            _KNOWN[key] = predictions
        return predictions

    async def _collect(self, code: str) -> str:
        result = await self._sandbox.run(code, timeout=self._seconds)
        collected = await self._sandbox.run(_COLLECT, timeout=10.0)
        if not result.ok:
            raise ToolError(f"the program failed: {(result.error or 'stopped').strip().splitlines()[-1][:300]}")
        status, _, text = collected.stdout.partition("\n")
        if not collected.ok or status != "ok":
            raise ToolError(_REFUSED.get(status, "submission.csv cannot be read"))
        return text

    def _log(self, what: str, ok: bool, text: str, gain: float) -> ToolResult:
        self.events.append(f"{len(self.events) + 1}. {what}: {text}")
        return ToolResult(ok, text, reward=gain if self._shaped else None)

    async def reward(self) -> dict[str, float]:
        """Return the best position, or 0 if `shaped`. A best position of at least `MEDAL` counts as a success.

        Additional metrics: best (position), submissions (number of valid submissions) and programs (number of runs).
        """
        counts = {"submissions": float(self.submissions), "programs": float(len(self.events))}
        reward = 0.0 if self._shaped else self.best
        return {"reward": reward, "success": float(self.best >= MEDAL), "best": self.best} | counts

    async def fork(self, into: Contest) -> None:
        """Copy the state to `into` and run the same programs again there. Raise SandboxError if a result differs."""
        into._contest, into._written, into._skipped = self._contest, self._written, self._skipped
        into.best, into.submissions, into.events = self.best, self.submissions, list(self.events)
        if self._written:
            into._fresh = False
            await self._sandbox.fork(into._sandbox)


# --- tasks ---------------------------------------------------------------------------------------


def rows(n: int, split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Generate tasks of all kinds as rows {"id", "question", "competition", "world"}. The splits are disjoint."""
    for i in range(n):
        kind, world = list(KINDS)[i % len(KINDS)], first_world(split, seed) + i
        metric = KINDS[kind]
        question = (
            f"Competition {generate(kind, world).name}: predict y from x1 and x2, measured by {metric}. "
            "baselines.py has zero, mean, median, linear, quadratic, exponential and knn."
        )
        yield {"id": row_id("competition", split, seed, i), "question": question, "competition": kind, "world": world}


# Maps a kind of competition to the model of baselines.py that fits its data.
BEST = {"slope": "linear()", "tide": "quadratic()", "growth": "exponential()", "ring": "quadratic()"}


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Submit the predictions of the model that fits the data."""
    if tool_outputs(messages):
        return "done"
    return "execute", {"code": f"import baselines\nbaselines.{BEST[task.fields['competition']]}"}


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Randomly run a constant baseline, write a submission without rows, ask for information, or answer."""
    if rng.random() < 0.3:
        return rng.choice(["done", "I don't know"])
    codes = (
        "baselines.zero()",
        "baselines.mean()",
        "baselines.median()",
        "open('submission.csv', 'w').write('id,y')",
    )
    if rng.random() < 0.2:
        return "request_info", {"info": rng.choice(("overview", "metric", "prizes"))}
    return rng.choice(("validate", "execute")), {"code": f"import baselines\n{rng.choice(codes)}"}


family = Family(
    name="competition",
    what="machine-learning competitions with leaderboards; programs run in a sandbox without the labels",
    environment=Contest,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=8,
    max_tokens=256,
    pool_size=8,
    size="256 train and 64 test tasks included; any number can be generated",
    splits={"train": 256, "test": 64},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
