"""Signatures of sandbox classes that forward their settings to another class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

K = TypeVar("K")


def forward_signature(
    sandbox_type: type, *, omit: Sequence[str] = (), **defaults: Any
) -> Callable[[type[K]], type[K]]:
    """Add the parameters of `sandbox_type.__init__`, as keywords, to the signature of the decorated `__init__`.

    The class must define `__init__` and forward `**settings` from it to `sandbox_type`. `help()` then shows the actual
    parameters, and pools can reject unknown options when they are created. Parameters in `omit` are left out, and
    `defaults` maps parameters to new defaults.
    """

    def decorate(cls: type[K]) -> type[K]:
        own = inspect.signature(cls.__init__)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            parameter.replace(kind=parameter.KEYWORD_ONLY, default=defaults.get(name, parameter.default))
            for name, parameter in inspect.signature(sandbox_type).parameters.items()
            if name not in own.parameters and name not in omit
        ]
        # Subclasses that define their own `__init__` would inherit a signature that is set on the class itself.
        cls.__init__.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return cls

    return decorate
