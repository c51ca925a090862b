"""Helpers for models on a CPU: torch's number of threads, and a warning about slow bfloat16."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch


@functools.cache
def warn_if_bfloat16_is_slow(device: torch.device) -> None:
    """Warn once if `device` is a CPU that only emulates bfloat16."""
    features: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if device.type == "cpu" and features and not any(on for name, on in features.items() if "bf16" in name):
        warnings.warn(
            "this CPU has no instructions for bfloat16 and emulates it, which can make a step many times slower; use "
            "float32: Policy.load(dtype='float32') and autocast=None",
            RuntimeWarning,
            stacklevel=3,
        )


# State of `single_torch_thread`: the number of active contexts, and torch's number of threads before the first one.
_thread_limit = SimpleNamespace(lock=threading.Lock(), users=0, threads_before=0)


@contextlib.contextmanager
def single_torch_thread(policy: Any) -> Iterator[None]:
    """Limit torch to one thread for a tiny model on a CPU, where more threads are slower.

    Contexts may overlap: the first one saves the number of threads, and the last one restores it.
    """
    if policy.device.type != "cpu" or policy.size >= 5_000_000:
        yield
        return
    limit = _thread_limit
    with limit.lock:
        if limit.users == 0:
            limit.threads_before = torch.get_num_threads()
        limit.users += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with limit.lock:
            limit.users -= 1
            if limit.users == 0:
                torch.set_num_threads(limit.threads_before)
