"""agentfly_kit: reinforcement learning for tool-using language-model agents in notebooks.

Importing the package is cheap, because each public name is loaded on first use. The only side effect is that the
environment variable MKL_CBWR gets a default value.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from agentfly_kit import _display

__version__ = "0.3.0"

# `LocalEngine` requires that the rounding of a row of a matrix product does not depend on the number of rows, as in the
# strict mode of MKL. MKL reads the variable when it is first called in the process.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# The module that displays objects in notebooks is imported when the first object is displayed.
_display.load_html = functools.partial(importlib.import_module, "agentfly_kit.integrations.html")

_MODULES = {
    "advantages": "advantages",
    "chat": "chat",
    "envs": "envs",
    "errors": "errors",
    "filters": "batch.filters",
    "hooks": "agent.hooks",
    "losses": "losses",
    "ray": "integrations.ray",
    "tiny": "tiny",
    "toolbox": "tools.builtin",
    "traces": "integrations.traces",
    "trackers": "integrations.trackers",
    "trl": "integrations.trl",
    "widgets": "widgets",
}

# The stub, which is also read by type checkers and editors, states the module of each public name in a line such as
# `from agentfly_kit.types import Task as Task`.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_LINES = re.findall(r"^from agentfly_kit\.(\S+) import (\w+) as \2$", _STUB, re.MULTILINE)
_WHERE = {name: module for module, name in _LINES if name not in _MODULES}

__all__ = sorted([*_WHERE, *_MODULES])

# Removed names and their replacements. A key with a dot is a name in a module whose `__getattr__` raises `_missing`.
_REMOVED = {
    "RemotePool": "af.ray.workers, whose processes start the sandboxes of the agent's pools on their own nodes",
    "errors.RemotePoolError": "af.errors.SandboxError, its base class",
    "serve_pool": "af.ray.workers, whose processes start the sandboxes of the agent's pools on their own nodes",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE and name not in _MODULES:
        raise _missing(name)
    known = "torch" in sys.modules

    def describe() -> str:
        return "loading torch, about 10 s" if "torch" in sys.modules and not known else f"loading agentfly_kit.{name}"

    with _display.show_progress(describe):
        module = importlib.import_module(f"agentfly_kit.{_WHERE.get(name) or _MODULES[name]}")
    value = getattr(module, name) if name in _WHERE else module
    globals()[name] = value
    return value


def _missing(name: str) -> AttributeError:
    """Create the error for a name that does not exist, such as "Agents" or "errors.PoolFull"."""
    if name in _REMOVED:
        return AttributeError(f"agentfly_kit.{name} was removed; use {_REMOVED[name]}")
    module, _, missing = f"agentfly_kit.{name}".rpartition(".")
    return AttributeError(f"{module} has no {missing!r}; dir({module}) lists the available names")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
