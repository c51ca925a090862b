"""agentfly_kit: reinforcement learning of tool-using language-model agents in a notebook.

The import is cheap, because each public name is loaded on first use. Its only side effect is the default of MKL_CBWR.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from pathlib import Path
from typing import Any

from agentfly_kit import _display

__version__ = "0.2.0"

# In MKL's strict mode, the rounding of a row of a matrix product does not depend on the number of rows. `LocalEngine`
# needs this. MKL reads the variable at its first call in the process.
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

# The stub, which type checkers and editors also read, states the module of each public name in a line such as
# `from agentfly_kit.types import Task as Task`.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_LINES = re.findall(r"^from agentfly_kit\.(\S+) import (\w+) as \2$", _STUB, re.MULTILINE)
_WHERE = {name: module for module, name in _LINES if name not in _MODULES}

__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name not in _WHERE and name not in _MODULES:
        raise AttributeError(f"agentfly_kit has no {name!r}; dir(agentfly_kit) lists the available names")
    with _display.loading(f"agentfly_kit.{name}"):
        module = importlib.import_module(f"agentfly_kit.{_WHERE.get(name) or _MODULES[name]}")
    value = getattr(module, name) if name in _WHERE else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
