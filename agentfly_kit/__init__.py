"""agentfly_kit: reinforcement learning of tool-using language-model agents in a notebook.

The import is cheap and has no side effects: each public name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

# Module that defines each public name. `__init__.pyi` repeats this for editors; a test checks that the two agree.
_WHERE = {
    "Agent": "agent.agent",
    "Batch": "batch.batch",
    "Budget": "agent.budget",
    "Chat": "chat.chat",
    "Container": "sandboxes.host.container",
    "Context": "tools.context",
    "Failure": "types",
    "FileSandbox": "sandboxes.files",
    "FromPool": "tools.injection",
    "FromTask": "tools.injection",
    "Grader": "sandboxes.grader",
    "Group": "types",
    "LocalEngine": "engines.local.engine",
    "OpenAIEngine": "engines.openai",
    "PPOConfig": "ppo",
    "Policy": "policy.policy",
    "Pool": "pool.pool",
    "PythonSandbox": "sandboxes.python",
    "RemotePool": "integrations.remote_pool.client",
    "Rollout": "agent.rollout",
    "Row": "types",
    "Run": "trainer.run_dir",
    "RunMismatch": "errors",
    "SQLSandbox": "sandboxes.sql",
    "Sample": "types",
    "Sampling": "types",
    "ScriptedEngine": "engines.scripted",
    "ShellSandbox": "sandboxes.shell",
    "Stats": "ppo.stats",
    "Task": "types",
    "Tasks": "tasks",
    "ToolCall": "types",
    "ToolError": "errors",
    "ToolResult": "types",
    "ToolSet": "tools.tool",
    "TrainConfig": "trainer.config",
    "Trajectory": "types",
    "Turn": "types",
    "VLLMEngine": "engines.vllm.engine",
    "adamw": "ppo",
    "collate": "batch.collate",
    "turn_data": "batch.turn_data",
    "doctor": "_doctor",
    "evaluate": "evaluation",
    "load_tasks": "tasks",
    "pools": "pool.base",
    "ppo_step": "ppo",
    "ppo_step_async": "ppo",
    "reward": "rewards",
    "sandbox_report": "sandboxes",
    "serve_pool": "integrations.remote_pool.server",
    "shaped_rewards": "ppo",
    "tasks_from": "tasks",
    "tool": "tools.tool",
    "train": "trainer.loop",
}
_MODULES = {
    "advantages": "advantages",
    "chat": "chat",
    "envs": "envs",
    "errors": "errors",
    "filters": "batch.filters",
    "losses": "losses",
    "tiny": "tiny",
    "toolbox": "tools.builtin",
    "trl": "integrations.trl",
    "widgets": "widgets",
}

__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"agentfly_kit.{_WHERE[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"agentfly_kit.{_MODULES[name]}")
    else:
        raise AttributeError(f"agentfly_kit has no {name!r}; dir(agentfly_kit) lists the available names")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
