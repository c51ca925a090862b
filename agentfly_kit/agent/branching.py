"""Branching: chains of a group fork after observations, as in ARPO (arXiv 2507.19849, section 3.1)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from agentfly_kit import seeds
from agentfly_kit._display import Displayable
from agentfly_kit.agent.progress import ChainKey
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.errors import AlignmentError, SettingsError, check_settings, check_value, checks_keywords
from agentfly_kit.types import Turn

# Agent settings that cannot be combined with branching, because they change or fork chains themselves.
_REFUSED_HOOKS = ("harness", "before_turn", "after_observation")


@checks_keywords
@dataclass(frozen=True)
class Branch(Displayable):
    """Settings for sampling a group as a tree, as in ARPO: chains fork where the policy becomes less certain.

    A group begins with `initial` chains. When all unfinished chains have sampled an action that follows an observation,
    each chain forks with probability P = clip(base + weight (H - H_0), 0, 1), until the group has `group_size`
    chains. H is the uncertainty of the latest action, and H_0 that of the chain's first action. A fork starts at the
    observation and samples its own action. If the group is still smaller when all chains have ended, new chains start.

    Args:
        initial: Number of initial chains, from 1 to the group size (N in the paper). By default, half the group size.
        base: Fork probability if the uncertainty has not changed (alpha in the paper).
        weight: Weight of the change in uncertainty, H - H_0, in P (beta in the paper).
        threshold: Fork if P > `threshold` (tau in the paper). By default, fork with probability P, as ARPO's code does.
        width: Number of forks created when a chain forks.
        tokens: Number of tokens at the beginning of an action from which its uncertainty is computed.
        measure: "entropy" is the mean exact entropy of the first `tokens` tokens of an action, divided by the logarithm
            of the vocabulary size. "surprisal" uses -logprob in place of the entropy, for engines that report no
            entropies. A function receives the `Turn` of the action and returns a number, preferably between 0 and 1.

    Raises:
        SettingsError: If a value is invalid.
    """

    initial: int | None = None
    base: float = 0.5
    weight: float = 0.2
    threshold: float | None = None
    width: int = 1
    tokens: int = 20
    measure: Literal["entropy", "surprisal"] | Callable[[Turn], float] = "entropy"

    def __post_init__(self) -> None:
        check_settings(self, dict.fromkeys(("initial", "width", "tokens"), "of at least 1"))
        if not callable(self.measure) and self.measure not in ("entropy", "surprisal"):
            raise SettingsError(
                f"measure must be 'entropy', 'surprisal' or a function of a turn, got {self.measure!r}"
            )

    def num_initial(self, group_size: int) -> int:
        """Return the number of initial chains in a group of the given size."""
        return max(1, group_size // 2) if self.initial is None else self.initial

    def uncertainty(self, turn: Turn, vocabulary: int) -> float:
        """Return the uncertainty of the action `turn`, given the vocabulary size.

        Raises:
            AlignmentError: If the turn lacks the required entropies or logprobs.
            SettingsError: If `measure` returns no finite number.
        """
        if callable(self.measure):
            value = self.measure(turn)
            check_value("the result of measure", value)
            return float(value)
        values = turn.entropies if self.measure == "entropy" else turn.logprobs
        if not values:
            kind = "entropies" if self.measure == "entropy" else "logprobs"
            raise AlignmentError(f"branch needs {kind}, but the engine reported none for {turn!r}")
        first = values[: self.tokens]
        return abs(math.fsum(first)) / len(first) / math.log(vocabulary)

    def probability(self, turn: Turn, first: Turn, vocabulary: int) -> float:
        """Return the probability that a chain whose first action was `first` forks before the action `turn`."""
        change = self.uncertainty(turn, vocabulary) - self.uncertainty(first, vocabulary)
        return min(1.0, max(0.0, self.base + self.weight * change))

    def groups_at_once(self, agent: AgentSettings, group_size: int, max_concurrency: int) -> int:
        """Return the number of groups that can run concurrently without any chain waiting for a slot or a sandbox.

        Raises:
            SettingsError: If the agent cannot branch, or if the limits do not allow even one group.
        """
        if self.num_initial(group_size) > group_size:
            raise SettingsError(f"initial must be at most group_size={group_size}, got {self.initial}")
        for name in _REFUSED_HOOKS:
            if getattr(agent, name) is not None:
                raise SettingsError(f"branch cannot be combined with Agent({name}=)")
        engine = agent.engine
        needed = {"entropy": "entropies", "surprisal": "logprobs"}.get(str(self.measure))
        if needed is not None and getattr(engine, needed) == "no":
            raise SettingsError(
                f"branch needs {needed}, which {type(engine).__name__} does not report; set measure to 'surprisal' or "
                "a function of a turn"
            )
        for pool in agent.pools:
            kind = pool.sandbox_type
            if not callable(getattr(kind, "fork", None)) and any(
                issubclass(kind, t) for t in agent.tools.sandbox_types
            ):
                raise SettingsError(f"branch needs sandboxes that can fork, but {kind.__name__} has no method fork")
        limits = {
            "max_concurrency": max_concurrency,
            "the slots of the engine": getattr(engine, "slots", max_concurrency),
            **{f"the pool of {pool.sandbox_type.__name__}": pool.snapshot().size for pool in agent.pools},
        }
        name, room = min(limits.items(), key=lambda item: item[1])
        if room < group_size:
            raise SettingsError(
                f"a group of {group_size} chains runs as a whole, so {name} must be at least {group_size}, got {room}; "
                f"increase it, or reduce group_size"
            )
        return int(room) // group_size


@dataclass
class _Waiting:
    """A chain that is waiting in `BranchGroup.branch`. The future `forks` resolves to the number of granted forks."""

    is_forking: bool
    forks: asyncio.Future[int]


class BranchGroup:
    """Decides which chains of a group fork and when new chains begin, independently of timing.

    Args:
        branch: the settings.
        size: number of chains in the complete group.
        begin: function that starts the chain with the given index in the group.
        fork: function that forks a chain at the given turn, and returns True if it succeeds.
        on_end: function called when all chains have ended and the group is complete.
    """

    def __init__(
        self,
        branch: Branch,
        size: int,
        begin: Callable[[int], None],
        fork: Callable[[Any, Turn], Awaitable[bool]],
        on_end: Callable[[], None],
    ) -> None:
        self._branch, self._size = branch, size
        self._begin, self._fork, self._on_end = begin, fork, on_end
        # `_leaves` is the number of chains begun and forks granted; `_running` is the number of unfinished chains.
        self._leaves = self._running = 0
        self._num_begun = 0
        self._waiting: dict[ChainKey, _Waiting] = {}
        # Turns after which forks have been decided, keyed by id(turn). Python cannot reuse the ids while the turns
        # exist.
        self._decided: dict[int, Turn] = {}

    def begin(self, count: int) -> None:
        self._leaves += count
        self._running += count
        for _ in range(count):
            self._num_begun += 1
            self._begin(self._num_begun - 1)

    def ended(self) -> None:
        """Report that a chain of the group has ended."""
        self._running -= 1
        self._decide()

    async def branch(self, chain: Any, action: Turn) -> None:
        """Wait until all other chains of the group have called this method or ended, then create forks of `chain`.

        The forks begin before `action`, which follows an observation.
        """
        observation = action.parent
        assert observation is not None
        if id(observation) in self._decided:
            return  # this chain is a fork, and all forks at this turn have already been decided
        first = next(turn for turn in chain.turns if turn.kind == "action")
        probability = self._branch.probability(action, first, len(chain.agent.chat.tokenizer))
        if self._branch.threshold is None:
            # The random number is derived from the chain and its action, so it does not depend on other chains.
            is_forking = seeds.derive(chain.trajectory_seed, "branch", chain.actions) < probability * 2**63
        else:
            is_forking = probability > self._branch.threshold
        self._decided[id(observation)] = observation
        future = asyncio.get_running_loop().create_future()
        self._waiting[chain.key] = _Waiting(is_forking, future)
        self._decide()
        made = 0
        try:
            for _ in range(await future):
                if await self._fork(chain, observation):
                    made += 1
                    self._running += 1
        finally:  # also runs if the time limit of the chain is reached
            self._waiting.pop(chain.key, None)
            if future.done() and not future.cancelled():
                self._leaves -= future.result() - made

    def _decide(self) -> None:
        """If all running chains are waiting, grant forks. If no chain is running, begin new chains or end the group."""
        if len(self._waiting) < self._running:
            return
        waiting, self._waiting = self._waiting, {}
        for key in sorted(waiting, key=lambda key: key.position):
            chain = waiting[key]
            if not chain.forks.done():  # not cancelled
                count = min(self._branch.width, self._size - self._leaves) if chain.is_forking else 0
                self._leaves += count
                chain.forks.set_result(count)
        if self._running == 0:
            if self._leaves < self._size:
                self.begin(self._size - self._leaves)
            else:
                self._on_end()
