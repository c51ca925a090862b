"""Replays texts or ids: for teaching and for tests of everything around a model."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from agentfly_kit.engines.base import Engine
from agentfly_kit.errors import EngineError
from agentfly_kit.types import Sample, Sampling, Task, TurnRequest

Script = Sequence[str | Sequence[int]] | Callable[[Task, int], Any]


class ScriptedEngine(Engine):
    """Every chain replays the script from its start; or `script(task, turn)` gives each turn's text or ids.

    latency: seconds that each turn takes, for measuring what is around it.
    The tokens have the author "script" and mask 0: they are nobody's policy.
    """

    tokens = "exact"
    logprobs = "no"
    reproducible = True
    author = "script"

    def __init__(self, script: Script, *, latency: float = 0.0) -> None:
        if isinstance(script, str):
            raise EngineError(
                f"a script is a list of texts, one a turn, and got the text {script!r}; write [{script!r}]"
            )
        self.script = script
        self.latency = latency

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        turn = request.turn if request is not None else 0
        if self.latency:
            await asyncio.sleep(self.latency)
        if callable(self.script):
            if request is None:
                raise EngineError("a script that is a function needs to know the task and the turn; use an Agent")
            reply = self.script(request.task, turn)
            if inspect.isawaitable(reply):
                reply = await reply
        elif turn < len(self.script):
            reply = self.script[turn]
        else:
            raise EngineError(
                f"the script has {len(self.script)} turns and turn {turn + 1} was asked for; add one, or set max_turns"
            )
        if isinstance(reply, str):
            return Sample(None, None, None, "stop", None, text=reply)
        return Sample(tuple(int(i) for i in reply), None, None, "stop", None)

    def __repr__(self) -> str:
        what = "a function" if callable(self.script) else f"{len(self.script)} turns"
        return f"ScriptedEngine({what})"
