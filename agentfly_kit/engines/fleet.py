"""An engine that distributes requests over several engines, such as vLLM servers on several machines."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentfly_kit._async.pending_call import run_in_thread
from agentfly_kit._display import Displayable, short_repr
from agentfly_kit.engines.base import Engine
from agentfly_kit.engines.openai import OpenAIEngine
from agentfly_kit.errors import EngineError
from agentfly_kit.policy.cpu import single_torch_thread
from agentfly_kit.samples import Sample, Sampling, TurnRequest

# Number of prompt tokens and of sampled tokens in a check of an engine's weights. The prompt is longer than a block of
# vLLM's prefix cache, so that the check also detects outdated blocks.
_PROMPT, _SAMPLED = 48, 8
# Token ids that an engine sampled in a check, and their logprobs.
_Answer = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(eq=False, repr=False)
class FleetMember(Displayable):
    """An engine of a `Fleet` and its state.

    Attributes:
        name: Address of the server, or class and index of an engine without one.
        engine: The engine.
        state: "up"; "down" after a failed update or check, or if another engine had to take over a request; "stale"
            if the engine's logprobs differ from those of the policy. Only engines that are up receive requests.
        running: Number of requests in progress.
        sessions: Unfinished chains that are assigned to this engine.
        gap: Largest difference in nats between the engine's and the policy's logprobs in the last check.
        reason: The reason why the engine is not up.
    """

    name: str
    engine: Engine
    state: Literal["up", "down", "stale"] = "up"
    running: int = 0
    sessions: set[str] = field(default_factory=set, repr=False)
    gap: float = math.nan
    reason: str = ""
    # Tokens and logprobs that the engine returned in the last check, and the policy's logprobs of these tokens.
    answer: _Answer | None = field(default=None, repr=False)
    expected: tuple[float, ...] = field(default=(), repr=False)
    # True after a failed request, until the engine has passed a check.
    suspect: bool = field(default=False, repr=False)


class Fleet(Engine):
    """Sample on several engines, such as vLLM servers on several machines: `af.Fleet([af.OpenAIEngine(...), ...])`.

    All requests of a chain are sent to one engine, which keeps the chain's KV cache; a new chain is assigned to the
    engine with the fewest unfinished chains. If an engine fails, its requests are sent to another one, so that no chain
    is lost.

    `update` sends the weights of the policy to all engines, then compares a few logprobs of each engine with those of
    the policy. An engine that fails or has different weights is excluded with a warning until the next update.
    `members` shows the state of each engine.

    Args:
        engines: At least one engine. Either all engines must return token ids, or all must return text.
        tolerance: Largest difference in nats between the logprobs of an engine and the policy; by default 1e-3 for a
            policy in float32 and 0.05 in 16 bits. Set 0.05 if the dtype of the servers differs from that of the policy.

    Raises:
        EngineError: If the engines have different vocabularies, authors or kinds of results, or one of them is a Fleet.
    """

    remote = True

    def __init__(self, engines: Iterable[Engine], *, tolerance: float | None = None) -> None:
        found = list(engines)
        if not found:
            raise EngineError("engines must contain at least one engine, got none")
        for engine in found:
            if not isinstance(engine, Engine) or isinstance(engine, Fleet):
                raise EngineError(f"engines must be Engine objects other than a Fleet, got {short_repr(engine)}")
        names = [getattr(engine, "base_url", f"{type(engine).__name__} {i}") for i, engine in enumerate(found)]
        if len(set(names)) < len(names) or len(set(map(id, found))) < len(found):
            raise EngineError(f"engines must be different engines or servers, got {', '.join(names)}")
        for name in ("tokens", "logprobs", "entropies", "author", "vocab_size"):
            values = {str(value) for engine in found if (value := getattr(engine, name)) is not None}
            if len(values) > 1:
                raise EngineError(f"engines must have the same value of {name}, got {' and '.join(sorted(values))}")
        self.members = tuple(FleetMember(name, engine) for name, engine in zip(names, found, strict=True))
        self.tolerance = tolerance
        # Only engines that return token ids with logprobs can be compared.
        self._checks = self.tokens == "exact" and self.logprobs == "yes"
        self._checked = not self._checks
        # Tokens and logprobs that are expected from every engine with the current weights; None before the first check.
        self._reference: _Answer | None = None
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        members = tuple(dataclasses.replace(member, running=0, sessions=set()) for member in self.members)
        return {name: value for name, value in self.__dict__.items() if name != "_locks"} | {"members": members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _locks=weakref.WeakKeyDictionary())

    # --- capabilities ---

    @property
    def _first(self) -> Engine:
        return self.members[0].engine

    @property
    def tokens(self) -> Literal["exact", "none"]:  # type: ignore[override]
        return self._first.tokens

    @property
    def logprobs(self) -> Literal["yes", "no"]:  # type: ignore[override]
        return self._first.logprobs

    @property
    def entropies(self) -> Literal["yes", "no"]:  # type: ignore[override]
        return self._first.entropies

    @property
    def author(self) -> str:  # type: ignore[override]
        return self._first.author

    @property
    def reproducible(self) -> bool:  # type: ignore[override]
        """True if all engines are reproducible."""
        return all(member.engine.reproducible for member in self.members)

    @property
    def images(self) -> int:  # type: ignore[override]
        return min(member.engine.images for member in self.members)

    @property
    def image_obstacle(self) -> str:  # type: ignore[override]
        return next((m.engine.image_obstacle for m in self.members if not m.engine.images), "")

    @property
    def max_length(self) -> int:
        """Shortest context length of all engines, in tokens."""
        return min(member.engine.max_length for member in self.members)

    @property
    def vocab_size(self) -> int | None:  # type: ignore[override]
        return next((size for member in self.members if (size := member.engine.vocab_size)), None)

    @property
    def policy(self) -> Any:
        """Policy of the first engine that has one, such as a LocalEngine. Raises AttributeError if none has one."""
        for member in self.members:
            if hasattr(member.engine, "policy"):
                return member.engine.policy
        raise AttributeError("no engine of this Fleet shares the weights of a policy")

    def __repr__(self) -> str:
        states = [member.state for member in self.members]
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("up", "down", "stale") if state in states)
        return f"Fleet({len(states)} engines: {counts})"

    # --- sampling ---

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        session = request.session if request is not None else None
        sample: Sample = await self._run(ids, session, lambda e: e.sample(ids, sampling, seed, request=request))
        return sample

    async def distribution(self, ids: Sequence[int], sampling: Sampling, **options: Any) -> tuple[Any, Any, float]:
        found: tuple[Any, Any, float] = await self._run(ids, None, lambda e: e.distribution(ids, sampling, **options))
        return found

    def release(self, session: str) -> None:
        for member in self.members:
            if session in member.sessions:
                member.sessions.discard(session)
                member.engine.release(session)

    async def _run(self, ids: Sequence[int], session: str | None, call: Callable[[Engine], Awaitable[Any]]) -> Any:
        if not self._checked:
            async with self._lock():
                if not self._checked:
                    await self._check([m for m in self.members if m.state == "up"])
        self._check_ids(ids)
        failed: dict[FleetMember, EngineError] = {}
        while (member := await self._choose(session, failed)) is not None:
            member.running += 1
            try:
                got = await call(member.engine)
            except EngineError as error:
                failed[member] = error
                member.suspect = True
                continue
            finally:
                member.running -= 1
            for other, reason in failed.items():
                self._exclude(other, "down", str(reason))
            return got
        reasons = {m.name: str(failed.get(m, m.reason)) for m in self.members}
        raise EngineError(f"no engine of the Fleet could sample: {_list_reasons(reasons)}")

    async def _choose(self, session: str | None, failed: dict[FleetMember, EngineError]) -> FleetMember | None:
        """Return the engine for a request, or None if all have failed. Engines that failed are checked before reuse."""
        left = [m for m in self.members if m.state == "up" and m not in failed]
        usable = [m for m in left if not m.suspect]
        if left and not usable:
            async with self._lock():
                await self._check([m for m in left if m.suspect])
            usable = [m for m in left if m.state == "up"]
        if not usable:
            return None
        kept = next((m for m in usable if session in m.sessions), None)
        chosen = kept or min(usable, key=lambda m: (len(m.sessions), m.running))
        if session is not None and kept is None:
            self.release(session)  # the session's engine has failed
            chosen.sessions.add(session)
        return chosen

    def _lock(self) -> asyncio.Lock:
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    def _exclude(self, member: FleetMember, state: Literal["down", "stale"], reason: str) -> None:
        news = member.state == "up"
        member.state, member.reason = state, reason
        if news:
            warnings.warn(f"{member.name} is not used until the next update, because {reason}", stacklevel=2)

    # --- weights ---

    async def update(self, policy: Any) -> None:
        """Send the policy's weights to all engines concurrently, and check each of them.

        Raises:
            EngineError: If no engine has the weights of the policy.
        """
        from agentfly_kit.engines.vllm.remote import update_servers

        async with self._lock():
            # If this call is cancelled, the engines are compared with each other before the next sample.
            self._checked, self._reference = not self._checks, None
            servers = {m: m.engine for m in self.members if isinstance(m.engine, OpenAIEngine)}
            others = [m for m in self.members if m not in servers]
            errors: list[BaseException | None] = [*await update_servers(policy, list(servers.values()))]
            errors += await asyncio.gather(*(m.engine.update(policy) for m in others), return_exceptions=True)
            updated = []
            for member, error in zip([*servers, *others], errors, strict=True):
                if error is None:
                    updated.append(member)
                elif isinstance(error, EngineError):
                    self._exclude(member, "down", str(error))
                else:
                    raise error
            await self._check(updated, policy)
        if not any(m.state == "up" for m in self.members):
            raise EngineError(f"no engine was updated: {_list_reasons({m.name: m.reason for m in self.members})}")

    async def probe(self, policy: Any = None) -> Fleet:
        """Check the weights of all engines, including those excluded earlier. Engines that pass are used again.

        Args:
            policy: Policy whose weights the engines should have; by default that of an engine such as LocalEngine.
                Without a policy, the logprobs are compared with those of the last check or of the first engine.

        Returns:
            This fleet.
        """
        async with self._lock():
            await self._check(list(self.members), policy)
        return self

    async def _check(self, members: list[FleetMember], policy: Any = None) -> None:
        """Sample a few tokens from each engine, compare their logprobs, and set `state` and `gap` of each engine."""
        if not self._checks:
            for member in members:
                member.state, member.reason, member.suspect = "up", "", False
            return
        answers = await asyncio.gather(*(self._ask(member) for member in members))
        if policy is None:
            policy = getattr(self, "policy", None)
        scores: dict[Any, tuple[float, ...]] = {}
        if policy is not None:
            scores = await run_in_thread(
                _score, policy, self._prompt(), {a[0] for a in answers if isinstance(a, tuple)}
            )
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, EngineError):
                self._exclude(member, "down", str(answer))
                continue
            # Without a policy, compare with the results of the last check, or with those of the first engine.
            expected = (answer[0], scores[answer[0]]) if scores else self._reference or answer
            member.gap = _gap(answer, expected)
            if reason := self._why_stale(member, answer, expected[1], policy):
                self._exclude(member, "stale", reason)
            else:
                member.state, member.reason, member.suspect = "up", "", False
                member.answer, member.expected = answer, expected[1]
                self._reference = expected
        self._checked = True

    def _why_stale(self, member: FleetMember, answer: _Answer, expected: tuple[float, ...], policy: Any) -> str:
        """Return the reason why the engine does not have the expected weights, or "" if it has them."""
        limit = self.tolerance or (1e-3 if policy is None or policy.model.dtype.itemsize >= 4 else 0.05)
        if not member.gap <= limit:
            dtype = getattr(member.engine, "dtype", None)
            return (
                f"its logprobs differ by {member.gap:.2g} nats from the expected ones, more than {limit:g}: its "
                f"weights or its precision differ from those of the policy{f' (its dtype is {dtype})' if dtype else ''}"
            )
        # If an engine missed a small update, its logprobs are within the tolerance, but have not changed at all.
        moved = max((abs(a - b) for a, b in zip(member.expected, expected, strict=False)), default=0.0)
        if answer == member.answer and moved > limit / 10:
            return f"its logprobs are the same as before the update, which changed those of the policy by {moved:.2g}"
        return ""

    def _prompt(self) -> list[int]:
        size = min(self.vocab_size or 256, 256)
        length = max(1, min(_PROMPT, self.max_length - _SAMPLED - 1))
        return [(7 * i * i + 3 * i + 5) % size for i in range(length)]

    async def _ask(self, member: FleetMember) -> _Answer | EngineError:
        try:
            got = await member.engine.sample(self._prompt(), Sampling(temperature=0.0, max_tokens=_SAMPLED), 0)
        except EngineError as error:
            return error
        assert got.ids is not None and got.logprobs is not None
        return got.ids, got.logprobs

    async def close(self) -> None:
        """Close all engines."""
        await asyncio.gather(*(member.engine.close() for member in self.members))


def _score(
    policy: Any, prompt: list[int], answers: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[float, ...]]:
    """Return the policy's logprobs of the tokens of each answer, given the prompt."""
    import torch

    scores = {}
    for ids in answers:
        row = torch.tensor([[*prompt, *ids]], device=policy.device)
        mask = torch.arange(row.shape[1], device=policy.device)[None] >= len(prompt)
        with policy.lock, torch.no_grad(), single_torch_thread(policy):
            found = policy.forward(row, mask, torch.ones(1, device=policy.device)).logprob
        scores[ids] = tuple(found.float().tolist())
    return scores


def _gap(answer: _Answer, expected: _Answer) -> float:
    """Return the largest logprob difference before the first mismatched token; inf if the first tokens differ."""
    same = itertools.takewhile(
        lambda pair: pair[0][0] == pair[1][0],
        zip(zip(*answer, strict=True), zip(*expected, strict=True), strict=False),
    )
    return max((abs(a - b) for (_, a), (_, b) in same), default=math.inf)


def _list_reasons(reasons: dict[str, str]) -> str:
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
