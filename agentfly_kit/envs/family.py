"""Task families. A family combines an environment with tasks, two scripted players and a list of requirements.

A family is a module of this package that defines `family = Family(...)` and exports `tasks`, `agent`, `expert` and
`random_agent`. Heavy packages are imported only when they are used.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from agentfly_kit import task_files
from agentfly_kit import tasks as task_sets
from agentfly_kit._display import Displayable
from agentfly_kit.agent.agent import Agent
from agentfly_kit.chat.chat import Chat
from agentfly_kit.engines.base import Engine
from agentfly_kit.envs import base
from agentfly_kit.errors import SettingsError, TaskError, check_count, check_instance, check_value
from agentfly_kit.samples import Sample, Sampling, TurnRequest
from agentfly_kit.tasks import Tasks
from agentfly_kit.types import Message, Task, ToolCall, text_of

if TYPE_CHECKING:
    from agentfly_kit.policy.policy import Policy

# Action of a scripted player: an answer, or the name of a tool and its arguments.
Move: TypeAlias = "str | tuple[str, Mapping[str, Any]]"
# Function that takes a task, the messages so far and a random generator, and returns the next move.
ScriptedPlayer: TypeAlias = Callable[[Task, Sequence[Message], random.Random], Move]
# Function (n, split, seed, **options) that generates n rows for `af.tasks_from`, or all rows if there are fewer than n.
# `split` is "train" or "test". The first rows do not depend on n.
Rows: TypeAlias = Callable[..., Iterable[dict[str, Any]]]


class PlayerEngine(Engine):
    """Engine that returns the moves of a scripted player. The tokens have the author "script" and mask 0, so that
    scripted moves are never trained on."""

    logprobs = "no"
    reproducible = True
    author = "script"
    images = 16

    def __init__(self, play: ScriptedPlayer, chat: Chat) -> None:
        self.play = play
        self.chat = chat
        self.tokens = "none" if chat.tokenizer is None else "exact"

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        if request is None:
            raise SettingsError("a scripted player needs a request with a task; use the engine only through an Agent")
        move = self.play(request.task, request.messages, random.Random(seed))
        if not isinstance(move, str):
            name, arguments = move
            move = self.chat.format.render_call(ToolCall("call-0", name, dict(arguments)))
        return Sample(None, None, None, "stop", None, text=move)

    def __repr__(self) -> str:
        return f"PlayerEngine({getattr(self.play, '__name__', self.play)})"


@functools.cache
def small_chat() -> Chat:
    """Return the chat of the shipped calculator policy, for scripted players, which need a tokenizer but no model."""
    from importlib.resources import as_file

    from transformers import AutoTokenizer

    with as_file(task_files.bundled_folder().joinpath("policies", "calculator")) as folder:
        return Chat(AutoTokenizer.from_pretrained(folder))


@dataclass(frozen=True)
class Family(Displayable):
    """Definition of a task family. Users call `tasks`, `agent`, `expert` and `random_agent`.

    Args:
        what: Description of the family in one sentence.
        max_tokens: Maximum number of tokens per action.
        size: Description of the number of tasks.
        needs: Modules that must be importable.
        programs: Programs that must be on PATH.
        install: Command that installs `needs` and `programs`.
        splits: Default number of tasks per split.
        chance: Upper bound on the success rate of the random player.
        pool_size: Size of an agent's environment pool; chains wait while all instances are leased.
        acquire_timeout: Maximum time in seconds for which a chain waits for an environment.
        images: Whether tasks contain images. Chains of scripted players then have token ids only if a policy is given.
    """

    name: str
    what: str
    environment: type
    rows: Rows
    expert_player: ScriptedPlayer
    random_player: ScriptedPlayer
    max_turns: int = 8
    max_tokens: int = 64
    size: str = "generated on request"
    licence: str = "that of the project"
    needs: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    install: str = ""
    splits: Mapping[str, int] = field(default_factory=lambda: {"train": 512, "test": 128})
    chance: float = 0.05
    pool_size: int = 64
    acquire_timeout: float = 120.0
    images: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        modules = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return (*modules, *(name for name in self.programs if shutil.which(name) is None))

    def require_installed(self) -> None:
        """Raise SettingsError, with the install command, if a module or program is missing."""
        if self.missing:
            raise SettingsError(f"af.envs.{self.name} needs {', '.join(self.missing)}; type: {self.install}")

    def tasks(self, n: int | None = None, split: str | None = None, *, seed: int = 0, **options: Any) -> Tasks:
        """Return the tasks of one split, or of both. The same seed gives the same tasks.

        Args:
            n: number of tasks per split, at most a million; by default the number in `splits`, or all tasks if there
                are fewer.
            split: "train" or "test"; by default both.
            seed: selects the tasks.
            **options: further arguments of the family's function `rows`.

        Raises:  SettingsError if an argument is invalid, if there are fewer than n tasks, or if a requirement is not
                 installed.
        """
        self.require_installed()
        if split is not None and split not in self.splits:
            raise SettingsError(
                f"split must be {' or '.join(map(repr, self.splits))}, or None for both, got {split!r}"
            )
        check_value("n", n, "int | None", "of at least 1 and at most 1000000")  # see `first_world`
        check_count("seed", seed, 0)
        rows: list[dict[str, Any]] = []
        for name, count in self.splits.items():
            if split in (None, name):
                found = list(self.rows(count if n is None else n, name, seed, **options))
                if n is not None and len(found) < n:
                    raise SettingsError(f"n must be at most {len(found)}, the number of {name} tasks, got {n}")
                rows += [{**row, "split": name} for row in found]
        return task_sets.tasks_from(rows, name=self.name)

    @property
    def tools(self) -> tuple[base.EnvironmentTool, ...]:
        return base.tools(self.environment)

    def agent(self, engine: Any, *, chat: Any = None, **settings: Any) -> Agent:
        """Create an agent for the environment of this family.

        Args:
            engine: an engine, or a policy, which is then sampled with a `LocalEngine`.
            chat: the `af.Chat` of the engine's model; not needed if `engine` is a policy.
            **settings: as for `af.envs.agent`; max_turns, size, acquire_timeout and sampling default to the family's
                values.

        Raises:  SettingsError if a requirement is not installed, `engine` is invalid, or `chat` is missing.
        """
        self.require_installed()
        if not isinstance(engine, Engine):
            from agentfly_kit.engines.local.engine import LocalEngine
            from agentfly_kit.policy.policy import Policy

            check_instance("engine", engine, Policy, "an engine or a policy such as af.tiny.policy()")
            chat = engine.chat if chat is None else chat
            engine = LocalEngine(engine)
        settings.setdefault("max_turns", self.max_turns)
        settings.setdefault("size", self.pool_size)
        settings.setdefault("acquire_timeout", self.acquire_timeout)
        settings.setdefault("sampling", Sampling(max_tokens=self.max_tokens))
        return base.agent(self.environment, engine, chat=chat, **settings)

    def expert(self, policy: Policy | None = None, **settings: Any) -> Agent:
        """Create an agent whose scripted player solves the tasks, to get an upper bound on the reward.

        Args:
            policy: a policy that will imitate the expert; the agent then uses its tokenizer and chat template.
            **settings: as for `agent`.
        """
        return self._played(self.expert_player, policy, settings)

    def random_agent(self, policy: Policy | None = None, **settings: Any) -> Agent:
        """Create an agent whose scripted player makes random calls and answers, to measure a baseline.

        The arguments are those of `expert`.
        """
        return self._played(self.random_player, policy, settings)

    @property
    def chat(self) -> Chat:
        """Chat that scripted players use if no policy is given."""
        from agentfly_kit.chat.text_chat import TextChat

        return TextChat() if self.images else small_chat()

    def _played(self, player: ScriptedPlayer, policy: Policy | None, settings: dict[str, Any]) -> Agent:
        chat = settings.pop("chat", None) or (self.chat if policy is None else policy.chat)
        return self.agent(PlayerEngine(player, chat), chat=chat, **settings)

    def __repr__(self) -> str:
        lacks = f", needs {', '.join(self.missing)}" if self.missing else ""
        return f"<Family {self.name}: {self.what}{lacks}>"


# --- generating rows -----------------------------------------------------------------------------


def check_kinds(kinds: Sequence[str], known: Sequence[str]) -> None:
    """Raise SettingsError unless `kinds` is a list with some of the known kinds of tasks."""
    listed = isinstance(kinds, Collection) and not isinstance(kinds, str)
    if not listed or not kinds or any(kind not in known for kind in kinds):
        raise SettingsError(f"kinds must be a list with some of {', '.join(map(repr, known))}, got {kinds!r}")


def row_id(prefix: str, split: str, seed: int, number: int) -> str:
    """Return the id of a row, such as "math-test-0003", or "math-test-7-0003" for seed 7."""
    return f"{prefix}-{split}-{'' if seed == 0 else f'{seed}-'}{number:04}"


def first_world(split: str, seed: int) -> int:
    """Return the first of the numbers from which a split's tasks are generated. No two splits or seeds share a
    number."""
    return 2_000_000 * seed + (1_000_000 if split == "test" else 0)


def hash_split(key: str, share: float = 0.2) -> str:
    """Derive a split from the hash of a text: "test" for a fraction `share` of all texts, "train" for the others."""
    return "test" if random.Random(key).random() < share else "train"


def shipped_rows(name: str, n: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Return n tasks of an included task set as rows: the first n if seed is 0, otherwise a random sample."""
    shipped = task_sets.load_tasks(name).split(split)
    chosen = shipped[:n] if seed == 0 else shipped.sample(min(n, len(shipped)), seed)
    return [{"id": t.id, "messages": [dict(m) for m in t.messages], **t.fields} for t in chosen]


def existing_file(path: str | os.PathLike[str], hint: str) -> Path:
    """Return the path of a file that the user must provide, or raise TaskError with the hint if it does not exist."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise TaskError(f"{file}: no such file; {hint}. Nothing is downloaded automatically")
    return file


# --- helpers of environments and players ---------------------------------------------------------


def int_field(task: Task, name: str, minimum: int = 0) -> int:
    """Return an integer field of a task. Raise TaskError if there is no such integer of at least `minimum`."""
    given = task.fields.get(name)
    if isinstance(given, bool) or not isinstance(given, int) or given < minimum:
        has = f"is {given!r}" if name in task.fields else "is missing"
        raise TaskError(f"field {name!r} {has}; it must be an integer of at least {minimum}")
    return given


def check_answer(answer: object, types: Any, expected: str) -> None:
    """Raise TaskError if the answer of a task is not an instance of `types`, which the message calls `expected`."""
    if not isinstance(answer, types) or isinstance(answer, bool):
        raise TaskError(f"answer must be {expected}, got {answer!r} ({type(answer).__name__})")


def follow(start: str, keys: Sequence[str], facts: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """Follow keys from one entry to the next. Return (entry, key, value) for each step."""
    steps = []
    for key in keys:
        steps.append((start, key, facts[start][key]))
        start = facts[start][key]
    return steps


def tool_outputs(messages: Sequence[Message]) -> list[str]:
    """Return the tool observations in `messages`, oldest first. Useful for writing scripted players."""
    return [text_of(m) for m in messages if m["role"] == "tool"]
