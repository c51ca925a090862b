"""agentfly_kit: reinforcement learning of language-model agents that use tools, inside the notebook.

Importing it is light and changes nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that holds it. `__init__.pyi` says the same to editors; a test keeps the two in step.
_WHERE = {
    "Agent": "rollout",
    "Batch": "batch",
    "Budget": "budget",
    "Chat": "chat",
    "Container": "sandboxes.container",
    "Context": "context",
    "Capacity": "capacity",
    "Failure": "types",
    "FileSandbox": "sandboxes.files",
    "FromPool": "context",
    "FromTask": "context",
    "Grader": "sandboxes.grader",
    "Group": "types",
    "LocalEngine": "engines.local",
    "OpenAIEngine": "engines.openai",
    "Policy": "policy",
    "Pool": "pool",
    "PythonSandbox": "sandboxes.python",
    "RemotePool": "remote.client",
    "Rollout": "record",
    "Row": "types",
    "Run": "runs",
    "RunMismatch": "errors",
    "SQLSandbox": "sandboxes.sql",
    "Sample": "types",
    "Sampling": "types",
    "ScriptedEngine": "engines.scripted",
    "ShellSandbox": "sandboxes.shell",
    "Stats": "types",
    "Task": "types",
    "Tasks": "data",
    "ToolCall": "types",
    "ToolError": "errors",
    "ToolResult": "types",
    "ToolSet": "tools",
    "TrainConfig": "trainer",
    "Trajectory": "types",
    "Turn": "types",
    "VLLMEngine": "engines.vllm",
    "adamw": "ppo",
    "collate": "batch",
    "turn_data": "turnwise",
    "doctor": "diagnosis",
    "evaluate": "evaluation",
    "load_tasks": "data",
    "pools": "pool",
    "ppo_step": "ppo",
    "ppo_step_async": "ppo",
    "reward": "rewards",
    "sandbox_report": "sandboxes",
    "serve_pool": "remote.server",
    "shaped_rewards": "ppo",
    "tasks_from": "data",
    "tool": "tools",
    "train": "trainer",
}
_MODULES = ("advantages", "chat", "envs", "errors", "filters", "losses", "tiny", "toolbox", "trl", "widgets")

__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"agentfly_kit.{_WHERE[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"agentfly_kit.{name}")
    else:
        raise AttributeError(f"agentfly_kit has no {name!r}; dir(agentfly_kit) lists what there is")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
