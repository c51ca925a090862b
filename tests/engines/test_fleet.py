"""Fleet: distribution of chains, failover, and detection of engines with other weights.

The engines run in this process; fleets of vLLM servers are tested in test_fleet_vllm.py.
"""

import asyncio
import collections
import warnings
from collections.abc import Sequence
from typing import Any

import agents
import errors
import pytest
import torch
from waiting import until

import agentfly_kit as af
from agentfly_kit.samples import TurnRequest


class Server(af.Engine):
    """Engine with its own copy of the weights, like a server; it can be stopped, and can ignore updates."""

    def __init__(self, policy: af.Policy) -> None:
        self.copy = policy.copy()
        self.local = af.LocalEngine(self.copy)
        self.vocab_size = policy.vocab_size
        self.sessions: list[str] = []
        self.requests = 0
        self.stopped = self.ignores_updates = False
        # Number of requests after which the server stops.
        self.limit = 10**9

    @property
    def max_length(self) -> int:
        return self.copy.max_length

    async def sample(
        self, ids: Sequence[int], sampling: af.Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> af.Sample:
        self.requests += request is not None
        if request is not None:
            self.sessions.append(request.session)
        sample = await self.local.sample(ids, sampling, seed, request=request)
        self.stopped = self.stopped or self.requests > self.limit
        if self.stopped:
            raise af.errors.EngineError("connection refused")
        return sample

    async def update(self, policy: Any) -> None:
        if self.stopped:
            raise af.errors.EngineError("connection refused")
        if not self.ignores_updates:
            self.copy.load_state(policy.state())
            self.copy.version = policy.version


@pytest.fixture
def policy() -> af.Policy:
    return agents.fresh()


def servers(policy: af.Policy, count: int = 2) -> list[Server]:
    return [Server(policy) for _ in range(count)]


def fleet_of(policy: af.Policy, count: int = 2) -> tuple[af.Fleet, list[Server]]:
    members = servers(policy, count)
    return af.Fleet(members), members


def nudge(policy: af.Policy, scale: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(policy.version)
    with torch.no_grad():
        for tensor in policy.model.parameters():
            tensor.add_(scale * torch.randn(tensor.shape, generator=generator))
    policy.version += 1


def states(fleet: af.Fleet) -> list[str]:
    return [member.state for member in fleet.members]


# --- distribution --------------------------------------------------------------------------------


async def test_chains_stay_with_their_engine_and_are_balanced() -> None:
    fleet, members = fleet_of(agents.shipped(), 3)
    rollout = await agents.agent(engine=fleet).rollout(agents.tasks(32), group_size=3, max_concurrency=96)
    assert not rollout.failed and any(len(t.actions) > 1 for t in rollout)
    seen = [set(member.sessions) for member in members]
    assert sum(len(sessions) for sessions in seen) == len(set.union(*seen)) == 96
    assert [len(sessions) for sessions in seen] == [32, 32, 32]
    assert all(not m.sessions and not m.running for m in fleet.members)  # released with the chains


async def test_a_fleet_samples_what_one_engine_samples() -> None:
    policy = agents.shipped()
    fleet = af.Fleet([af.LocalEngine(policy), af.LocalEngine(policy)])
    assert fleet.reproducible and fleet.policy is policy and fleet.max_length == policy.max_length
    alone = await agents.agent(policy).rollout(agents.tasks(8), group_size=2)
    together = await agents.agent(policy, engine=fleet).rollout(agents.tasks(8), group_size=2)
    assert [t.ids.tolist() for t in alone] == [t.ids.tolist() for t in together]
    task = agents.tasks(1)[0]
    distributions = [
        await agents.agent(engine=e).chain(task).distribution(top=4) for e in (fleet, af.LocalEngine(policy))
    ]
    assert distributions[0] == distributions[1]


async def test_a_slow_engine_gets_fewer_chains() -> None:
    fast, slow = servers(agents.shipped())
    fleet = await af.Fleet([fast, slow]).probe()
    hold = asyncio.Event()
    original = slow.local.sample

    async def wait(*args: Any, **more: Any) -> af.Sample:
        await hold.wait()
        return await original(*args, **more)

    slow.local.sample = wait  # type: ignore[method-assign]
    agent = agents.agent(engine=fleet, max_turns=1)
    running = asyncio.ensure_future(agent.rollout(agents.tasks(24), max_concurrency=4))
    await until(lambda: fast.requests >= 20)
    assert slow.requests == fleet.members[1].running <= 4
    hold.set()
    assert not (await running).failed


# --- failures ------------------------------------------------------------------------------------


async def test_an_engine_that_fails_loses_no_chain() -> None:
    members = servers(agents.shipped(), 3)
    members[1].limit = 9
    fleet = af.Fleet(members)
    alone = await agents.agent().rollout(agents.tasks(16), group_size=3)
    with pytest.warns(UserWarning, match="Server 1 is not used until the next update, because connection refused"):
        rollout = await agents.agent(engine=fleet).rollout(agents.tasks(16), group_size=3)
    assert not rollout.failed and states(fleet) == ["up", "down", "up"]
    assert [t.ids.tolist() for t in rollout] == [t.ids.tolist() for t in alone]
    assert repr(fleet) == "Fleet(3 engines: 2 up, 1 down)"
    members[1].stopped, members[1].limit = False, 10**9
    await fleet.update(agents.shipped())
    assert states(fleet) == ["up"] * 3


async def test_if_all_engines_fail_the_error_lists_them_and_they_are_used_again_once_they_answer() -> None:
    fleet, members = fleet_of(agents.shipped())
    for member in members:
        member.limit = 0
    agent = agents.agent(engine=fleet)
    trajectory = (await agent.rollout(agents.tasks(1))).trajectories[0]
    assert trajectory.stop == "error" and trajectory.error is not None
    assert "no engine of the Fleet could sample: connection refused" in trajectory.error.message
    for member in members:
        member.stopped, member.limit = False, 10**9
    assert (await agent.rollout(agents.tasks(1))).trajectories[0].error is None
    assert states(fleet) == ["up", "up"]


async def test_an_engine_that_returns_with_other_weights_is_not_used(policy: af.Policy) -> None:
    """A server that is restarted has its initial weights."""
    fleet, members = fleet_of(policy)
    nudge(policy)
    await fleet.update(policy)
    for member in members:
        member.limit = 0
    agent = agents.agent(policy, engine=fleet)
    assert (await agent.rollout(agents.tasks(1))).failed
    for member in members:
        member.stopped, member.limit = False, 10**9
    members[0].copy.load_state(agents.shipped().state())
    with pytest.warns(UserWarning, match="Server 0 is not used.*its weights"):
        assert not (await agent.rollout(agents.tasks(2))).failed
    assert states(fleet) == ["stale", "up"] and not members[0].sessions[1:]


async def test_a_request_that_no_engine_accepts_excludes_no_engine() -> None:
    policy = agents.shipped()
    fleet = af.Fleet([af.LocalEngine(policy), af.LocalEngine(policy)])
    for ids, words in (([10**6], "ids must be from 0 to"), ([1] * policy.max_length, "leave no space")):
        await errors.check(lambda: fleet.sample(ids, af.Sampling(), 0), af.errors.EngineError, words)
    assert (await fleet.sample([1], af.Sampling(max_tokens=2), 0)).ids and states(fleet) == ["up", "up"]


async def test_all_engines_fail_an_update() -> None:
    fleet, members = fleet_of(agents.shipped())
    members[0].stopped = members[1].stopped = True
    excluded = pytest.warns(UserWarning, match="because connection refused")
    with excluded, pytest.raises(af.errors.EngineError, match="no engine was updated: connection refused"):
        await fleet.update(agents.shipped())
    await errors.check(
        lambda: fleet.sample([1], af.Sampling(), 0),
        af.errors.EngineError,
        "no engine of the Fleet could sample: connection refused",
    )


async def test_cancelled_requests_are_not_counted() -> None:
    members = servers(agents.shipped())
    fleet = await af.Fleet(members).probe()

    async def wait(*args: Any, **more: Any) -> None:
        await asyncio.Event().wait()

    for member in members:
        member.local.sample = wait  # type: ignore[assignment]
    task = asyncio.ensure_future(fleet.sample([1, 2], af.Sampling(), 0))
    await until(lambda: any(m.running for m in fleet.members))
    task.cancel()
    await errors.check(lambda: task, asyncio.CancelledError)
    assert not any(m.running for m in fleet.members) and states(fleet) == ["up", "up"]


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.02, 2e-5])
async def test_an_engine_with_old_weights_is_found_after_one_update(scale: float, policy: af.Policy) -> None:
    """A change below the tolerance is noticed because the engine's logprobs did not change at all."""
    fleet, members = fleet_of(policy, 3)
    await fleet.update(policy)
    assert states(fleet) == ["up"] * 3 and all(m.gap <= 1e-5 for m in fleet.members)
    members[2].ignores_updates = True
    nudge(policy, scale)
    with pytest.warns(UserWarning, match="Server 2 is not used until the next update, because its logprobs"):
        await fleet.update(policy)
    assert states(fleet) == ["up", "up", "stale"]
    await fleet.probe()  # compares with an engine that passed
    assert states(fleet) == ["up", "up", "stale"]
    assert "2 up, 1 stale" in repr(fleet) and "stale" in fleet._repr_html_()
    members[2].sessions.clear()
    rollout = await agents.agent(policy, engine=fleet).rollout(agents.tasks(8))
    assert not rollout.failed and not members[2].sessions
    assert {int(v) for t in rollout for v in t.versions[t.action_mask]} == {policy.version}
    members[2].ignores_updates = False
    nudge(policy, scale)
    await fleet.update(policy)
    assert states(fleet) == ["up"] * 3


async def test_an_update_that_changes_nothing_excludes_no_engine(policy: af.Policy) -> None:
    fleet = af.Fleet(servers(policy))
    for _ in range(2):
        await fleet.update(policy)
        policy.version += 1
    assert states(fleet) == ["up", "up"]


async def test_weights_changed_by_someone_else_are_found_by_a_probe(policy: af.Policy) -> None:
    fleet, members = fleet_of(policy)
    await fleet.update(policy)
    nudge(members[0].copy)
    with pytest.warns(UserWarning, match="Server 0.*its weights"):
        await fleet.probe()
    assert states(fleet) == ["stale", "up"]


async def test_engines_of_different_models_are_found_before_the_first_request() -> None:
    policy, other = agents.fresh(), agents.fresh()
    nudge(other)
    members = [Server(policy), Server(other)]
    fleet = af.Fleet(members)
    with pytest.warns(UserWarning, match="Server 1.*its weights"):
        rollout = await agents.agent(policy, engine=fleet).rollout(agents.tasks(4))
    assert not rollout.failed and states(fleet) == ["up", "stale"] and not members[1].sessions


async def test_a_policy_in_16_bits_has_another_tolerance(policy: af.Policy) -> None:
    fleet = af.Fleet(servers(policy))
    policy.model.to(torch.bfloat16)
    await fleet.update(policy)  # the engines keep float32, with weights rounded to 16 bits
    assert states(fleet) == ["up", "up"] and max(m.gap for m in fleet.members) > 1e-4
    strict = af.Fleet(servers(agents.fresh()), tolerance=1e-6)
    with (
        pytest.warns(UserWarning, match="more than 1e-06"),
        pytest.raises(af.errors.EngineError, match="no engine was updated"),
    ):
        await strict.update(policy)


async def test_training_on_a_fleet_is_training_on_one_engine() -> None:
    async def curve(count: int) -> list[list[float]]:
        policy = agents.fresh()
        agent = agents.agent(policy, engine=af.Fleet(servers(policy, count)))
        config = af.TrainConfig(steps=2, tasks_per_step=4, group_size=4)
        run = await af.train(agent, policy, agents.tasks(16), config)
        return [[r[key] for key in ("reward", "loss", "sampler_gap")] for r in run.records]

    assert await curve(1) == await curve(3)


async def test_chains_of_several_iterations_continue_with_new_weights(policy: af.Policy) -> None:
    """With overlap=2, chains of a fleet may have tokens of three versions. The oldest is two iterations old."""
    agent = agents.agent(policy, engine=af.Fleet(servers(policy)))
    config = af.TrainConfig(steps=5, tasks_per_step=4, group_size=4, overlap=2)
    before = [0]
    async for step in af.train(agent, policy, agents.tasks(16), config):
        oldest = min(int(v) for t in step.rollout for v in t.versions[t.action_mask])
        assert step.record["lag"] == before[-1] - oldest and oldest >= before[max(0, step.step - 3)]
        before.append(policy.version)


async def test_a_fleet_samples_ahead_with_a_lag_of_one_step(policy: af.Policy) -> None:
    fleet = af.Fleet(servers(policy))
    config = af.TrainConfig(steps=4, tasks_per_step=4, group_size=4, overlap=1)
    steps = [step async for step in af.train(agents.agent(policy, engine=fleet), policy, agents.tasks(16), config)]
    version = 0
    for step in steps:
        ages = collections.Counter(version - int(v) for t in step.rollout for v in t.versions[t.action_mask])
        # The chains of a step were sampled with the weights before the previous update.
        previous = steps[step.step - 2].stats.updates if step.step > 1 else 0  # type: ignore[union-attr]
        assert set(ages) == {previous} and step.record["lag"] == previous
        version += step.stats.updates
    assert states(fleet) == ["up", "up"]


async def test_engines_that_share_the_policy_cannot_sample_ahead(policy: af.Policy) -> None:
    agent = agents.agent(policy, engine=af.Fleet([af.LocalEngine(policy)]))
    config = af.TrainConfig(steps=2, tasks_per_step=2, group_size=2, overlap=1)
    await errors.check(
        lambda: af.train(agent, policy, agents.tasks(4), config),
        af.errors.SettingsError,
        "overlap needs LocalEngine or an engine",
    )


# --- settings ------------------------------------------------------------------------------------


async def test_engines_without_logprobs_are_not_compared() -> None:
    fleet = af.Fleet([af.ScriptedEngine(["a"]), af.ScriptedEngine(["b"])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (fleet.author, fleet.logprobs, (await fleet.probe()).reproducible) == ("script", "no", True)
        rollout = await agents.agent(engine=fleet, chat=agents.chat(), max_turns=1).rollout(agents.tasks(4))
    assert sorted(t.final for t in rollout) == ["a", "a", "b", "b"]
    await fleet.close()


async def test_a_cancelled_update_excludes_no_engine_with_new_weights(
    monkeypatch: pytest.MonkeyPatch, policy: af.Policy
) -> None:
    fleet, members = fleet_of(policy)
    request = agents.tasks(1)
    agent = agents.agent(policy).replace(engine=fleet)
    await agent.rollout(request)
    nudge(policy, 0.5)
    policy.version += 1
    checking = asyncio.Event()

    async def check(*_: Any) -> None:
        checking.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(fleet, "_check", check)
        updating = asyncio.ensure_future(fleet.update(policy))
        await checking.wait()
        updating.cancel()
        await asyncio.wait([updating])
    for member in members:
        member.stopped = True
    assert (await agent.rollout(request)).failed
    for member in members:
        member.stopped = False
    assert not (await agent.rollout(request)).failed, fleet
