"""Invalid settings and arguments of engines."""

import math
from typing import Any

import agents
import errors
from test_fleet import servers

import agentfly_kit as af


def local(ids: list[int]) -> Any:
    return af.LocalEngine(agents.shipped()).sample(ids, af.Sampling(), 0)


def vllm(ids: list[int], sampling: af.Sampling) -> Any:
    return af.VLLMEngine(agents.shipped()).sample(ids, sampling, 0)


def openai(url: str = "http://127.0.0.1:8000/v1", **settings: Any) -> af.OpenAIEngine:
    return af.OpenAIEngine(url, "tiny", **settings)


def fleet(*engines: Any, **settings: Any) -> af.Fleet:
    return af.Fleet([engine() if callable(engine) else engine for engine in engines], **settings)


def shipped() -> af.LocalEngine:
    return af.LocalEngine(agents.shipped())


def differing() -> af.Fleet:
    members = servers(agents.shipped())
    members[1].vocab_size = 7
    return af.Fleet(members)


test_errors = errors.rejected(
    (lambda: local([5, 400]), af.errors.EngineError, "ids must be from 0 to 399, got 5 to 400"),
    (lambda: local([-1, 5]), af.errors.EngineError, "got -1 to 5"),
    (
        lambda: af.LocalEngine(agents.shipped(), slots=0),
        af.errors.SettingsError,
        "slots must be an integer of at least 1, got 0",
    ),
    (
        lambda: af.LocalEngine(agents.shipped(), slots=2.5),
        af.errors.SettingsError,
        "slots must be an integer of at least 1, got 2.5",
    ),
    (lambda: af.LocalEngine(agents.shipped().model), af.errors.EngineError, "policy must be a Policy"),
    (lambda: shipped().update(agents.random_policy()), af.errors.EngineError, "LocalEngine(policy)"),
    (lambda: af.ScriptedEngine("5"), af.errors.EngineError, "must be a list with one text per turn"),
    (
        lambda: af.ScriptedEngine(["5"]).distribution([1], af.Sampling()),
        af.errors.EngineError,
        "does not support distribution(); use",
    ),
    (lambda: af.ScriptedEngine(["5"]).update(None), af.errors.EngineError, "has no weights to update"),
    (lambda: openai("localhost:8000"), af.errors.EngineError, "address"),
    (lambda: openai(tokens="maybe"), af.errors.SettingsError, "one of 'exact', 'none', got 'maybe'"),
    (
        lambda: openai(tokens="exact", weights="nccl"),
        af.errors.EngineError,
        "weights must be 'auto', 'shm', 'http' or",
    ),
    (lambda: openai(timeout=0), af.errors.SettingsError, "timeout must be a finite number above 0, got 0"),
    (
        lambda: openai(timeout=math.nan),
        af.errors.SettingsError,
        "timeout must be a finite number above 0, got nan",
    ),
    (
        lambda: openai(timeout="60"),
        af.errors.SettingsError,
        "timeout must be a finite number above 0, got '60'",
    ),
    (lambda: fleet(shipped, af.Fleet([shipped()])), af.errors.EngineError, "other than a Fleet, got Fleet"),
    (
        lambda: fleet(shipped, "http://gpu1:8000/v1"),
        af.errors.EngineError,
        "must be Engine objects other than a Fleet, got '",
    ),
    (lambda: af.Fleet([shipped()] * 2), af.errors.EngineError, "different engines"),
    (lambda: fleet(openai, openai), af.errors.EngineError, "different engines or servers"),
    (lambda: fleet(openai(tokens="exact"), openai("http://b:1/v1")), af.errors.EngineError, "value of tokens"),
    (lambda: fleet(shipped, af.ScriptedEngine(["a"])), af.errors.EngineError, "value of logprobs"),
    (differing, af.errors.EngineError, "value of vocab_size, got"),
    (lambda: vllm([1] * 512, af.Sampling()), af.errors.EngineError, "leave no space"),
    (lambda: vllm([1, 10**6], af.Sampling()), af.errors.EngineError, "ids must be from 0 to"),
    (lambda: vllm([1], af.Sampling(temperature=0.001)), af.errors.EngineError, "got 0.001"),
    (lambda: vllm([1], af.Sampling(temperature=2.5)), af.errors.EngineError, "from 0.01 to 2.0"),
    (lambda: af.VLLMEngine("./nothing-here"), af.errors.EngineError, "no model found at"),
    (lambda: af.VLLMEngine(agents.shipped(), logprobs_mode="raw_logprobs"), af.errors.EngineError, "logprobs_mode"),
    (
        lambda: af.VLLMEngine(agents.shipped()).update(agents.random_policy()),
        af.errors.EngineError,
        "the architecture cannot",
    ),
    (lambda: af.VLLMEngine(agents.shipped()).update("weights"), af.errors.EngineError, "needs a Policy"),
)
