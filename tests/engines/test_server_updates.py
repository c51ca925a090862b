"""Weights sent to servers over HTTP, and what servers can do wrong.

The servers have vLLM's API and sample with LocalEngine, because vLLM does not fail on demand and takes a minute to
start. Fleets of vLLM servers are tested in test_fleet_vllm.py.
"""

import asyncio
import functools
import http.client
import re
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import agents
import errors
import pytest
import torch
from http_server import Server
from test_fleet import nudge, states
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.engines.vllm.weight_transfer import architecture, open_weights, read_weights

PHASES = {
    "/init_weight_transfer_engine": "init",
    "/start_weight_update": "start",
    "/update_weights": "update",
    "/finish_weight_update": "finish",
}


class PolicyServer(Server):
    """Server with the part of vLLM's API that an exact OpenAIEngine uses.

    `fault` is called before each request with its path and body, and may raise or return another response.
    """

    def __init__(self, policy: af.Policy) -> None:
        super().__init__()
        self.initial = policy.copy()  # the policy itself is locked while it sends weights
        self.transports: list[str] = []
        self.fault: Callable[[str, dict[str, Any]], Any] = lambda path, body: None
        self.dtype, self.backend = "float32", "agentfly"
        self.clients: list[af.OpenAIEngine] = []
        self.answer = lambda path, body: self.fault(path, body) or self.respond(path, body)
        self.restart()

    def restart(self) -> None:
        """Load the initial weights, as a new process would."""
        self.policy = self.initial.copy()
        self.engine = af.LocalEngine(self.policy)
        self.label, self.paused, self.updating = "default", False, False

    def respond(self, path: str, body: dict[str, Any]) -> Any:
        path = path.split("?")[0]
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": self.policy.max_length}]}
        if path == "/v1/completions":
            return asyncio.run(self.complete(body))
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path in PHASES:
            return self.transfer(PHASES[path], body)
        elif path == "/weight_info":
            return {"weight_version": self.label}
        elif path == "/collective_rpc":
            return {"results": [getattr(self, body["method"])(*body.get("args", ()))]}
        elif path not in ("/reset_prefix_cache", "/reset_encoder_cache"):
            return 404, {"error": "no such page"}, {}
        return {"success": True}

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, temperature = body["prompt"], body["temperature"]
        sampling = af.Sampling(temperature=temperature, max_tokens=body["max_tokens"])
        found = await self.engine.sample(ids, sampling, len(ids))
        best = await self.engine.distribution(ids, af.Sampling(temperature=temperature or 1.0), top=5)
        top = {f"token_id:{id}": logprob for id, logprob in zip(*best[:2], strict=True)}
        logprobs = {"token_logprobs": found.logprobs, "top_logprobs": [top]}
        choice = {"token_ids": found.ids, "logprobs": logprobs, "finish_reason": found.stop, "stop_reason": None}
        return {"choices": [choice]}

    def agentfly_describe(self) -> dict[str, Any]:
        return architecture(self.policy.model.config) | {"dtype": self.dtype, "backend": self.backend}

    def transfer(self, phase: str, body: dict[str, Any]) -> Any:
        """Carry out a phase of an update; return the error as vLLM does."""
        assert self.paused
        try:
            if phase == "init":
                self._stream = open_weights(body["init_info"]["address"])
                self.transports.append(urlsplit(body["init_info"]["address"]).scheme)
            elif (phase == "start") == self.updating:
                raise ValueError("the phases are out of order")
            if phase == "update":
                state = dict(self.policy.model.state_dict())
                with torch.no_grad(), self._stream as stream:
                    for name, tensor in read_weights(stream, body["update_info"]["tensors"]):
                        state[name].copy_(tensor)
                self.policy.version += 1  # the keys and values of other weights are not used
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.updating = False
            return 500, {"error": {"message": str(error)}}, {}
        if phase in ("start", "finish"):
            self.updating = phase == "start"
        return {}

    def client(self, **settings: Any) -> af.OpenAIEngine:
        settings = {"tokens": "exact", "backoff": 0.01, "timeout": GUARD, "retries": 1} | settings
        engine = af.OpenAIEngine(self.url, "tiny", stop_ids=self.policy.chat.stop_ids, **settings)
        self.clients.append(engine)
        return engine


Pair = tuple[PolicyServer, PolicyServer]


@pytest.fixture
def policy() -> af.Policy:
    return agents.fresh()


@pytest.fixture
async def pair(policy: af.Policy) -> AsyncIterator[Pair]:
    """Two servers with the weights of the policy."""
    servers = PolicyServer(policy), PolicyServer(policy)
    yield servers
    for server in servers:
        for engine in server.clients:
            await engine.close()
        server.stop()


@pytest.fixture
def server(pair: Pair) -> PolicyServer:
    return pair[0]


def gap(server: PolicyServer, policy: af.Policy) -> float:
    weights = policy.model.state_dict()
    return max(
        float((tensor - weights[name]).abs().max()) for name, tensor in server.policy.model.state_dict().items()
    )


# --- transport -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "transport"), [("auto", "file"), ("http", "http"), ("http://localhost", "http")])
async def test_a_server_gets_the_weights(
    server: PolicyServer, policy: af.Policy, weights: str, transport: str
) -> None:
    engine = server.client(weights=weights)
    prompt = policy.chat.prompt(agents.tasks(1)[0].messages)
    assert (await engine.sample(prompt, af.Sampling(max_tokens=2), 0)).versions == (0, 0)
    nudge(policy)
    await engine.update(policy)
    assert gap(server, policy) == 0 and server.transports == [transport]
    assert (engine.version, engine.dtype, engine.vocab_size) == (1, "float32", policy.vocab_size)
    assert server.label.startswith("1-") and not server.paused and not policy.lock.locked()
    assert set((await engine.sample(prompt, af.Sampling(max_tokens=8), 0)).versions or ()) == {1}


async def test_a_fleet_of_servers_gets_the_weights_and_is_checked(pair: Pair, policy: af.Policy) -> None:
    fleet = af.Fleet([pair[0].client(weights="http"), pair[1].client()])
    for _ in range(2):
        nudge(policy)
        await fleet.update(policy)
        assert [gap(server, policy) for server in pair] == [0, 0] and states(fleet) == ["up", "up"]
        assert all(member.gap <= 1e-5 for member in fleet.members)
    assert [set(server.transports) for server in pair] == [{"http"}, {"file"}]
    rollout = await agents.agent(policy, engine=fleet).rollout(agents.tasks(8), group_size=2)
    assert not rollout.failed and {int(v) for t in rollout for v in t.versions[t.action_mask]} == {2}


# --- servers that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["status 500", "reset", "restarted", "stays paused"])
async def test_a_server_that_fails_during_an_update_is_excluded_until_the_next(
    pair: Pair, policy: af.Policy, how: str
) -> None:
    good, bad = pair
    fleet = af.Fleet([good.client(weights="http"), bad.client(weights="http")])

    def fault(path: str, body: dict[str, Any]) -> Any:
        if how == "stays paused" and path == "/resume":
            return 500, {"error": "no"}, {}
        if path == "/update_weights":
            if how == "reset":
                raise ConnectionError
            if how == "status 500":
                return 500, {"error": {"message": "out of memory"}}, {}
            if how == "restarted":
                bad.restart()
                bad.paused = True  # passes the server's own assertion
        return None

    bad.fault = fault
    nudge(policy)
    with pytest.warns(UserWarning, match=f"{urlsplit(bad.url).port}/v1 is not used until the next update"):
        await fleet.update(policy)
    assert states(fleet) == ["up", "down"] and gap(good, policy) == 0
    if how == "status 500":
        assert "out of memory" in fleet.members[1].reason
    if how != "stays paused":
        assert not bad.paused
        await errors.check(
            lambda: fleet.members[1].engine.sample([1], af.Sampling(), 0),
            af.errors.EngineError,
            re.compile(r"weights of the server at http.* are undefined"),
        )
    bad.got.clear()
    assert not (await agents.agent(policy, engine=fleet).rollout(agents.tasks(6))).failed and not bad.got
    bad.fault = lambda path, body: None
    await fleet.update(policy)
    assert states(fleet) == ["up", "up"] and gap(bad, policy) == 0


async def test_a_server_that_is_restarted_does_not_sample_with_its_initial_weights(
    server: PolicyServer, policy: af.Policy
) -> None:
    """The engine retries the request that the restart interrupted, and the new process answers it."""
    engine = server.client(retries=3)
    nudge(policy)
    await engine.update(policy)
    lost = []

    def fault(path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/completions" and not lost:
            lost.append(path)
            raise ConnectionError

    server.fault = fault
    assert (await engine.sample([1, 2], af.Sampling(max_tokens=4), 0)).ids  # a lost connection alone is no restart
    lost.clear()
    server.restart()
    for _ in range(2):
        await errors.check(
            lambda: engine.sample([1, 2], af.Sampling(max_tokens=4), 0),
            af.errors.EngineError,
            re.compile(r"are undefined \(the server was restarted\); call await engine.update"),
        )
    await engine.update(policy)
    assert (await engine.sample([1, 2], af.Sampling(max_tokens=4), 0)).ids and gap(server, policy) == 0


async def test_a_cancelled_update_is_known_to_be_incomplete(server: PolicyServer, policy: af.Policy) -> None:
    engine = server.client()
    reached, go_on = threading.Event(), threading.Event()

    def fault(path: str, body: dict[str, Any]) -> Any:
        if path == "/update_weights":
            reached.set()
            go_on.wait(GUARD)

    server.fault = fault
    nudge(policy)
    update = asyncio.ensure_future(engine.update(policy))
    await until(reached.is_set)
    update.cancel()
    await errors.check(lambda: update, asyncio.CancelledError)
    go_on.set()
    assert not policy.lock.locked()
    await errors.check(lambda: engine.sample([1], af.Sampling(), 0), af.errors.EngineError, "it was interrupted")
    server.fault = lambda path, body: None
    await engine.update(policy)
    assert gap(server, policy) == 0 and (await engine.sample([1], af.Sampling(max_tokens=2), 0)).ids


# --- servers that do not fit ---------------------------------------------------------------------


async def test_weights_that_a_server_cannot_load_are_refused_before_it_is_paused(
    server: PolicyServer, policy: af.Policy
) -> None:
    other = policy.copy()
    other.model.config.vocab_size = 7
    missing = 404, {"error": "Not Found"}, {}
    for weights, settings, answer, words in (
        (other, {}, None, r"the server at http.* has vocab_size=\d+, but the policy has 7"),
        ("weights", {}, None, "update needs a Policy, got a str"),
        (policy, {}, missing, r"cannot be changed \(.*404.*VLLM_SERVER_DEV_MODE=1 python -m vllm"),
        (policy, {"tokens": "none"}, missing, "requires tokens='exact'"),
    ):
        server.fault = lambda path, body, answer=answer: answer if path == "/collective_rpc" else None
        await errors.check(
            lambda: server.client(**settings).update(weights), af.errors.EngineError, re.compile(words)
        )
    assert {path for path, _ in server.got} == {"/collective_rpc"}


async def test_an_address_that_the_server_cannot_reach_is_named(server: PolicyServer, policy: af.Policy) -> None:
    before = gap(server, policy)
    engine = server.client(weights="http://nowhere.invalid:0")
    nudge(policy)
    says = r"cannot read the weights \(.*cannot read http://nowhere\.invalid:.*set weights='http://<address>:<port>'"
    await errors.check(lambda: engine.update(policy), af.errors.EngineError, re.compile(says))
    assert before == 0 < gap(server, policy) and not server.paused
    assert (await engine.sample([1, 2], af.Sampling(max_tokens=2), 0)).versions == (
        0,
        0,
    )  # the server keeps its weights
    server.fault = lambda path, body: (500, {"error": "no file"}, {}) if PHASES.get(path) == "init" else None
    await errors.check(
        lambda: server.client().update(policy),
        af.errors.EngineError,
        re.compile(r"no file.*must run on this machine as this user; use weights='http"),
    )


async def test_a_server_with_another_precision_is_named(pair: Pair, policy: af.Policy) -> None:
    pair[1].dtype = "bfloat16"
    fleet = af.Fleet([server.client() for server in pair])
    transfer = pair[1].transfer

    def rounded(phase: str, body: dict[str, Any]) -> Any:
        got = transfer(phase, body)
        for tensor in pair[1].policy.model.parameters():
            tensor.data.copy_(tensor.data.bfloat16())
        return got

    pair[1].transfer = rounded  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=r"differ by .* nats .* its precision differ .*its dtype is bfloat16"):
        await fleet.update(policy)
    assert states(fleet) == ["up", "stale"] and 1e-3 < fleet.members[1].gap < 0.05
    tolerant = af.Fleet([member.engine for member in fleet.members], tolerance=0.05)
    await tolerant.update(policy)
    assert states(tolerant) == ["up", "up"]


async def test_the_shortest_context_counts(pair: Pair, policy: af.Policy) -> None:
    fleet = af.Fleet([pair[0].client(), pair[1].client(max_length=96)])
    assert fleet.max_length == 96
    await errors.check(
        lambda: fleet.sample([1] * 100, af.Sampling(), 0),
        af.errors.EngineError,
        "100 ids leave no space for an action in a context of 96 tokens",
    )
    assert states(fleet) == ["up", "up"]


async def test_several_processes_do_not_send_weights_to_the_same_servers(pair: Pair, policy: af.Policy) -> None:
    accelerator = SimpleNamespace(num_processes=2, process_index=0)  # the settings are checked before it is used
    agent = agents.agent(policy, engine=af.Fleet([server.client() for server in pair]))
    errors.check(
        lambda: af.train(agent, policy, agents.tasks(2), af.TrainConfig(steps=1), run="run", accelerator=accelerator),
        af.errors.SettingsError,
        "each of the 2 processes must have its own engine",
    )


async def test_a_lost_connection_is_remembered_until_the_weights_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests at once, and a check that fails, must not accept samples of a server that was restarted."""
    engine = af.OpenAIEngine("http://127.0.0.1:1/v1", "policy", tokens="exact", stop_ids=[0], max_length=100)
    engine._probed, engine._label, engine._version = True, "new", 7
    choice = {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
    labels: list[Any] = [af.errors.EngineError("503"), {"weight_version": "old"}, {"weight_version": "old"}]

    async def request(method: str, path: str, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(0)
        if not path.endswith("/weight_info"):
            return {"choices": [choice]}
        if isinstance(found := labels.pop(0), Exception):
            raise found
        return found

    monkeypatch.setattr(engine.http, "request", request)
    engine.http.disconnections = 1
    sample = functools.partial(engine.sample, [1], af.Sampling(max_tokens=1), 0)
    await errors.check(sample, af.errors.EngineError, "503")
    found = await asyncio.gather(sample(), sample(), return_exceptions=True)
    assert all("the server was restarted" in str(error) for error in found), found
