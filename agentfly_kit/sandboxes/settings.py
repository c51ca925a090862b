"""Signatures of sandbox classes that forward their settings to another class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

K = TypeVar("K")


def forward_signature(
    sandbox_type: type, *, omit: Sequence[str] = (), **defaults: Any
) -> Callable[[type[K]], type[K]]:
    """Copy the keyword parameters of `sandbox_type.__init__` onto the decorated class's signature.

    The class must forward `**settings` from its `__init__` to `sandbox_type`. `help()` then shows the actual
    parameters, and pools can reject unknown options when they are created. Parameters in `omit` are left out, and
    `defaults` maps parameters to new defaults.
    """

    def decorate(cls: type[K]) -> type[K]:
        own = inspect.signature(cls)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            parameter.replace(default=defaults.get(name, parameter.default))
            for name, parameter in inspect.signature(sandbox_type).parameters.items()
            if name not in own.parameters and name not in omit
        ]
        cls.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return cls

    return decorate
