"""An engine that replays prepared texts or token ids, for tutorials and for tests that need no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from agentfly_kit._async.pending_call import maybe_await
from agentfly_kit.engines.base import Engine
from agentfly_kit.errors import EngineError
from agentfly_kit.samples import Sample, Sampling, TurnRequest
from agentfly_kit.types import Task

Script = Sequence[str | Sequence[int]] | Callable[[Task, int], Any]


class ScriptedEngine(Engine):
    """Replay a script. Each turn of a chain uses the next entry; every chain starts with the first entry.

    The tokens have the author "script" and mask 0, because no policy sampled them.

    Use a script to check tools, a reward or an environment before there is a policy. The agent then needs the chat of
    any tokenizer, such as that of the tiny policies, which is part of the package::

        script = ['<tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>']
        agent = af.envs.agent(Guess, af.ScriptedEngine(script), chat=af.Chat(af.tiny.tokenizer()))
        (chain,) = await agent.rollout(task)

    Args:
        script: A list with one text or one sequence of token ids per turn, or a function `script(task, turn)`, sync or
            async, that returns the text or the ids.
        latency: Simulated duration of each turn in seconds, for measuring the overhead of the other components.
    """

    tokens = "exact"
    logprobs = "no"
    entropies = "no"
    reproducible = True
    author = "script"

    def __init__(self, script: Script, *, latency: float = 0.0) -> None:
        if isinstance(script, str):
            raise EngineError(
                f"script must be a list with one text per turn, got the string {script!r}; write [{script!r}]"
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
            assert request is not None, "a script function needs the task of a request; use an Agent"
            reply = await maybe_await(self.script(request.task, turn))
        elif turn < len(self.script):
            reply = self.script[turn]
        else:
            raise EngineError(
                f"the script has {len(self.script)} turns, but turn {turn + 1} was requested; add it or set max_turns"
            )
        if isinstance(reply, str):
            return Sample(None, None, None, "stop", None, text=reply)
        return Sample(tuple(int(i) for i in reply), None, None, "stop", None)

    def __repr__(self) -> str:
        return f"ScriptedEngine({'a function' if callable(self.script) else f'{len(self.script)} turns'})"
