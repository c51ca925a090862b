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
    "Chain": "agent.chain_editing",
    "Chat": "chat.chat",
    "Container": "sandboxes.host.container",
    "Context": "tools.context",
    "Endpoint": "endpoint.endpoint",
    "Engine": "engines.base",
    "Evaluation": "evaluation",
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
    "Reward": "rewards",
    "Rollout": "agent.rollout",
    "RolloutDiff": "agent.rollout",
    "RolloutHandle": "agent.runner",
    "Row": "types",
    "Run": "trainer.run_dir",
    "RunMismatch": "errors",
    "SQLResult": "sandboxes.sql",
    "SQLSandbox": "sandboxes.sql",
    "Sample": "types",
    "Sampling": "types",
    "SandboxResult": "sandboxes.result",
    "Score": "rewards",
    "ScriptedEngine": "engines.scripted",
    "ShellSandbox": "sandboxes.shell",
    "Stats": "ppo.stats",
    "Task": "types",
    "Tasks": "tasks",
    "Tool": "tools.tool",
    "ToolCall": "types",
    "ToolError": "errors",
    "ToolResult": "types",
    "ToolSet": "tools.tool",
    "TrainConfig": "trainer.config",
    "TrainRun": "trainer.loop",
    "TrainStep": "trainer.loop",
    "Trajectory": "types",
    "Turn": "types",
    "VLLMEngine": "engines.vllm.engine",
    "adamw": "ppo",
    "captured": "agent.captured",
    "collate": "batch.collate",
    "turn_data": "batch.turn_data",
    "doctor": "_doctor",
    "evaluate": "evaluation",
    "from_tokens": "agent.captured",
    "imitate": "ppo",
    "imitation_step": "ppo",
    "load_tasks": "tasks",
    "pools": "pool.base",
    "ppo_step": "ppo",
    "ppo_step_async": "ppo",
    "reward": "rewards",
    "runs": "trainer.runs",
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
    "hooks": "agent.hooks",
    "losses": "losses",
    "tiny": "tiny",
    "toolbox": "tools.builtin",
    "trl": "integrations.trl",
    "widgets": "widgets",
}

__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name not in _WHERE and name not in _MODULES:
        raise AttributeError(f"agentfly_kit has no {name!r}; dir(agentfly_kit) lists the available names")
    from agentfly_kit._display import loading

    with loading(f"agentfly_kit.{name}"):
        module = importlib.import_module(f"agentfly_kit.{_WHERE.get(name) or _MODULES[name]}")
    value = getattr(module, name) if name in _WHERE else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
