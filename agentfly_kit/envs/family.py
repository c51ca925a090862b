"""A task family: an environment with tasks, an expert, a random player, and what it needs. Knows no particular one.

A family is a module of this folder with `family = Family(...)` and the four names of `faces(family)`; nothing heavy is
imported before it is used.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentfly_kit import tasks as task_sets
from agentfly_kit.agent.agent import Agent
from agentfly_kit.chat.chat import Chat
from agentfly_kit.engines.base import Engine
from agentfly_kit.envs import base
from agentfly_kit.errors import SettingsError, TaskError
from agentfly_kit.tasks import Tasks
from agentfly_kit.types import Message, Sample, Sampling, Task, ToolCall, TurnRequest

Move: TypeAlias = "str | tuple[str, Mapping[str, Any]]"
"""What a player does: an answer, or the name of a tool and its arguments."""
ScriptedPlayer: TypeAlias = Callable[[Task, Sequence[Message], random.Random], Move]
"""(task, the conversation so far, noise) -> a move."""
Rows: TypeAlias = Callable[[int, str, int], list[dict[str, Any]]]
"""(how many, "train" or "test", seed) -> rows as `af.tasks_from` reads them; the first of more are those of fewer."""


class PlayerEngine(Engine):
    """Writes what a player does. Its tokens have the author "script" and mask 0, so that nothing trains on them."""

    tokens = "exact"
    logprobs = "no"
    reproducible = True
    author = "script"

    def __init__(self, play: ScriptedPlayer, chat: Chat) -> None:
        self.play = play
        self.chat = chat

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        if request is None:
            raise SettingsError("a player needs to know the task; use an Agent")
        move = self.play(request.task, request.messages, random.Random(seed))
        if not isinstance(move, str):
            name, arguments = move
            move = self.chat.format.render_call(ToolCall("call-0", name, dict(arguments)))
        return Sample(None, None, None, "stop", None, text=move)

    def __repr__(self) -> str:
        return f"PlayerEngine({getattr(self.play, '__name__', self.play)})"


@functools.cache
def small_chat() -> Chat:
    """That of the policy that ships, for players: they need a tokenizer and no model."""
    from importlib.resources import as_file

    from transformers import AutoTokenizer

    with as_file(task_sets._data().joinpath("policies", "calculator")) as folder:
        return Chat(AutoTokenizer.from_pretrained(folder))


@dataclass(frozen=True)
class Family:
    """What a family is made of. `tasks`, `agent`, `expert` and `random_agent` are what a cell uses."""

    name: str
    what: str
    """One sentence."""
    environment: type
    rows: Rows
    expert_player: ScriptedPlayer
    random_player: ScriptedPlayer
    max_turns: int = 8
    max_tokens: int = 64
    """Of one action."""
    size: str = "made when asked for"
    """How many tasks there are."""
    licence: str = "that of the project"
    needs: tuple[str, ...] = ()
    """Modules that must be importable."""
    programs: tuple[str, ...] = ()
    """Programs that must be on the path."""
    install: str = ""
    """What to type for them."""
    splits: Mapping[str, int] = field(default_factory=lambda: {"train": 512, "test": 128})
    """Tasks that `tasks()` makes of each split."""
    pool_size: int = 64
    """Environments that the pool of an agent holds; more chains wait."""

    @property
    def missing(self) -> tuple[str, ...]:
        modules = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return (*modules, *(name for name in self.programs if shutil.which(name) is None))

    def require_installed(self) -> None:
        """Raises SettingsError naming what is not installed, and what to type."""
        if self.missing:
            raise SettingsError(f"af.envs.{self.name} needs {', '.join(self.missing)}; type: {self.install}")

    def tasks(self, n: int | None = None, split: str | None = None, *, seed: int = 0) -> Tasks:
        """`n` tasks of a split, "train" or "test"; without a split, both. The same ones for the same seed."""
        self.require_installed()
        if split is not None and split not in self.splits:
            raise SettingsError(f"split={split!r}: want {' or '.join(map(repr, self.splits))}, or None for all")
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise SettingsError(f"n={n!r}: want at least 1, or None for {dict(self.splits)}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise SettingsError(f"seed={seed!r}: want a whole number, 0 or more")
        wanted = self.splits if split is None else {split: self.splits[split]}
        if n is not None:
            wanted = dict.fromkeys(wanted, n)
        rows = [{**row, "split": name} for name, count in wanted.items() for row in self.rows(count, name, seed)]
        return task_sets.tasks_from(rows, name=self.name)

    @property
    def tools(self) -> tuple[base.EnvironmentTool, ...]:
        return base.tools(self.environment)

    def agent(self, engine: Any, *, chat: Any = None, **settings: Any) -> Agent:
        """An agent in this environment. `engine` may be a policy, which then samples on a LocalEngine.

        settings: as of `af.envs.agent`; max_turns and sampling have the family's own defaults.
        """
        self.require_installed()
        if not isinstance(engine, Engine):
            from agentfly_kit.engines.local.engine import LocalEngine
            from agentfly_kit.policy.policy import Policy

            if not isinstance(engine, Policy):
                raise SettingsError(f"{engine!r}: give an engine, or a policy such as af.tiny.policy()")
            chat = engine.chat if chat is None else chat
            engine = LocalEngine(engine)
        if chat is None:
            raise SettingsError("give the chat of the engine's model: chat=policy.chat, or af.Chat(tokenizer)")
        settings.setdefault("max_turns", self.max_turns)
        settings.setdefault("size", self.pool_size)
        settings.setdefault("sampling", Sampling(max_tokens=self.max_tokens))
        return base.agent(self.environment, engine, chat=chat, **settings)

    def expert(self, **settings: Any) -> Agent:
        """An agent without a model that solves the tasks: what the environment can give at most."""
        return self._played(self.expert_player, settings)

    def random_agent(self, **settings: Any) -> Agent:
        """An agent without a model that draws its calls and answers: what luck gives."""
        return self._played(self.random_player, settings)

    def _played(self, player: ScriptedPlayer, settings: dict[str, Any]) -> Agent:
        chat = settings.pop("chat", None) or small_chat()
        return self.agent(PlayerEngine(player, chat), chat=chat, **settings)

    def __repr__(self) -> str:
        lacks = f", needs {', '.join(self.missing)}" if self.missing else ""
        return f"<Family {self.name}: {self.what}{lacks}>"


def int_field(task: Task, name: str, minimum: int = 0, family: str = "") -> int:
    """A field of a task that is to be a whole number.

    Raises:  TaskError naming the task, the field and what it holds.
    """
    given = task.fields.get(name)
    if isinstance(given, bool) or not isinstance(given, int) or given < minimum:
        has = f"is {given!r}" if name in task.fields else "is not there"
        where = f"; take af.envs.{family}.tasks()" if family else ""
        raise TaskError(f"task {task.id!r}: its field {name!r} {has}; want a whole number, {minimum} or more{where}")
    return given


def tool_outputs(messages: Sequence[Message]) -> list[str]:
    """For players: what the tools have answered so far, oldest first."""
    return [str(m["content"]) for m in messages if m["role"] == "tool"]
