"""Environments. `af.envs.agent` creates an agent for your own class; `af.envs.list()` lists ready-made task families.

Each family is a module of this package and is imported on first use.
"""

from __future__ import annotations

import builtins
import importlib
from typing import Any

# Names of the task families; each is a module of this package. Register a new family here.
FAMILIES: tuple[str, ...] = (
    "alfworld",
    "calculator",
    "chess",
    "code",
    "competition",
    "desk",
    "judge",
    "lookup",
    "math",
    "reasoning_gym",
    "repo",
    "scienceworld",
    "search",
    "shapes",
    "sql",
    "webshop",
)

_WHERE = {
    "EnvironmentTool": "base",
    "Family": "family",
    "agent": "base",
    "from_env": "gym",
    "reward": "base",
    "tools": "base",
}

# Maps names that existed in version 0.2 to their replacements.
_REMOVED = {
    "maze": "use another family, such as af.envs.alfworld, or a maze of Gymnasium with af.envs.from_env",
    "to_gymnasium": "use af.envs.tools and af.envs.reward, or write a gymnasium.Env that calls the class",
}

__all__ = sorted([*_WHERE, *FAMILIES, "harbor", "list"])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"agentfly_kit.envs.{_WHERE[name]}"), name)
    if name in (*FAMILIES, "harbor"):
        return importlib.import_module(f"agentfly_kit.envs.{name}")
    if name in _REMOVED:
        raise AttributeError(f"agentfly_kit.envs.{name} was removed in 0.3; {_REMOVED[name]}")
    raise AttributeError(f"agentfly_kit.envs has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> builtins.list[str]:
    return __all__


def list() -> Any:
    """Return a DataFrame with one row per task family: description, tools, requirements, number of tasks, licence, and
    the install command if requirements are missing."""
    import pandas

    rows = []
    for name in FAMILIES:
        family = importlib.import_module(f"agentfly_kit.envs.{name}").family
        lacks = family.missing
        rows.append(
            {
                "name": name,
                "what": family.what,
                "tools": ", ".join(tool.name for tool in family.tools),
                "size": family.size,
                "needs": ", ".join((*family.needs, *family.programs)) or "nothing",
                "licence": family.licence,
                "installed": family.install if lacks else "yes",
            }
        )
    columns = ["name", "what", "tools", "needs", "size", "licence", "installed"]
    return pandas.DataFrame(rows, columns=columns).set_index("name")
