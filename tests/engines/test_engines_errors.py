"""Invalid settings and arguments of engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import agents
import errors
import torch
from test_fleet import servers

from agentfly_kit import Fleet, VLLMEngine
from agentfly_kit.engines.local.engine import LocalEngine
from agentfly_kit.engines.openai import OpenAIEngine
from agentfly_kit.engines.scripted import ScriptedEngine
from agentfly_kit.engines.vllm.buffers import open_buffer
from agentfly_kit.engines.vllm.weight_transfer import ChunkReader, layout
from agentfly_kit.errors import EngineError, SettingsError
from agentfly_kit.types import Sampling

SLICE_FAULTS = {
    "the first half is missing": [["a", "float32", [32], 64, 0, 64]],
    "twice": [["a", "float32", [32], 0, 0, 64], ["a", "float32", [32], 0, 0, 64]],
    "exceeds the buffer": [["a", "float32", [4], 0, 60, 16]],
    "exceeds the tensor": [["a", "float32", [4], 0, 0, 32]],
}


def local(ids: list[int]) -> Any:
    return LocalEngine(agents.shipped()).sample(ids, Sampling(), 0)


def vllm(ids: list[int], sampling: Sampling) -> Any:
    return VLLMEngine(agents.shipped()).sample(ids, sampling, 0)


def openai(url: str = "http://127.0.0.1:8000/v1", **settings: Any) -> OpenAIEngine:
    return OpenAIEngine(url, "tiny", **settings)


def fleet(*engines: Any, **settings: Any) -> Fleet:
    return Fleet([engine() if callable(engine) else engine for engine in engines], **settings)


def shipped() -> LocalEngine:
    return LocalEngine(agents.shipped())


def differing() -> Fleet:
    members = servers(agents.shipped())
    members[1].vocab_size = 7
    return Fleet(members)


def read(slices: list[Any]) -> list[Any]:
    return list(ChunkReader().read(slices, torch.zeros(64, dtype=torch.uint8)))


@errors.table(
    (lambda: local([]), EngineError, "must not be empty"),
    (lambda: local([5, 400]), EngineError, "exceed the vocabulary of 400"),
    (lambda: local([-1, 5]), EngineError, "from -1 to 5"),
    (lambda: LocalEngine(agents.shipped(), slots=0), EngineError, "slots must be an integer of at least 1, got 0"),
    (lambda: LocalEngine(agents.shipped(), slots=2.5), EngineError, "slots must be an integer of at least 1, got 2.5"),
    (lambda: LocalEngine(agents.shipped(), slots="8"), EngineError, "slots must be an integer of at least 1, got '8'"),
    (lambda: LocalEngine(agents.shipped().model), EngineError, "policy must be a Policy"),
    (lambda: shipped().update(agents.random_policy()), EngineError, "LocalEngine(policy)"),
    (lambda: ScriptedEngine("5"), EngineError, "must be a list with one text per turn"),
    (lambda: ScriptedEngine(["5"]).distribution([1], Sampling()), EngineError, "does not support distribution(); use"),
    (lambda: ScriptedEngine(["5"]).update(None), EngineError, "has no weights to update"),
    (lambda: openai("localhost:8000"), EngineError, "address"),
    (lambda: openai(tokens="maybe"), EngineError, "'exact' or 'none'"),
    (lambda: openai(tokens="exact", weights="nccl"), EngineError, "weights must be 'auto', 'shm', 'http' or"),
    (lambda: openai(timeout=0), SettingsError, "timeout must be a positive finite number of seconds, got 0"),
    (lambda: openai(timeout=math.nan), SettingsError, "timeout must be a positive finite number of seconds, got nan"),
    (lambda: openai(timeout="60"), SettingsError, "timeout must be a positive finite number of seconds, got '60'"),
    (lambda: openai(retries=-1), SettingsError, "retries must be an integer of at least 0, got -1"),
    (lambda: openai(retries=1.5), SettingsError, "retries must be an integer of at least 0, got 1.5"),
    (lambda: openai(backoff=-0.5), SettingsError, "backoff must be a finite number of seconds of at least 0, got -0.5"),
    (lambda: openai(max_length=0), SettingsError, "max_length must be an integer of at least 1, or None for no limit"),
    (lambda: fleet(), EngineError, "at least one engine, got none"),
    (lambda: fleet(shipped, Fleet([shipped()])), EngineError, "other than a Fleet, got Fleet"),
    (
        lambda: fleet(shipped, "http://gpu1:8000/v1"),
        EngineError,
        "must be Engine objects other than a Fleet, got '",
    ),
    (lambda: Fleet([shipped()] * 2), EngineError, "different engines"),
    (lambda: fleet(openai, openai), EngineError, "different engines or servers"),
    (lambda: fleet(openai(tokens="exact"), openai("http://b:1/v1")), EngineError, "value of tokens"),
    (lambda: fleet(shipped, ScriptedEngine(["a"])), EngineError, "value of logprobs"),
    (differing, EngineError, "value of vocab_size, got"),
    (lambda: fleet(shipped, tolerance=0), EngineError, "tolerance must be a finite number above 0, "),
    (lambda: fleet(shipped, tolerance=math.nan), EngineError, "got nan"),
    (lambda: fleet(shipped, tolerance="0.05"), EngineError, "got '0.05'"),
    (lambda: layout([], 32), ValueError, "limit must be at least 64 bytes, got 32"),
    *((lambda slices=slices: read(slices), ValueError, "the next slice covers") for slices in SLICE_FAULTS.values()),
    (
        lambda: open_buffer({"transport": "ipc", "gpu_uuid": "GPU-1"}, torch.device("cpu")),
        ValueError,
        "is on GPU GPU-1, but this process uses no GPU",
    ),
    (lambda: vllm([], Sampling()), EngineError, "must not be empty"),
    (lambda: vllm([1] * 512, Sampling()), EngineError, "leave no space"),
    (lambda: vllm([1, 10**6], Sampling()), EngineError, "exceed the vocabulary"),
    (lambda: vllm([1], Sampling(temperature=0.001)), EngineError, "temperature=0.001"),
    (lambda: vllm([1], Sampling(temperature=2.5)), EngineError, "0.01 and 2.0"),
    (lambda: VLLMEngine("./nothing-here"), EngineError, "no model found at"),
    (lambda: VLLMEngine(agents.shipped(), weights="nccl"), EngineError, 'must be "ipc", "shm" or "auto", got \'nccl\''),
    (lambda: VLLMEngine(agents.shipped(), logprobs_mode="raw_logprobs"), EngineError, "logprobs_mode"),
    (lambda: VLLMEngine(agents.shipped()).update(agents.random_policy()), EngineError, "the architecture cannot"),
    (lambda: VLLMEngine(agents.shipped()).update("weights"), EngineError, "needs a Policy"),
)
async def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    await errors.check(call, error, text)
