"""Gradient checkpointing of the layers of a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint

from agentfly_kit.errors import PolicyError


@contextlib.contextmanager
def checkpointed(models: Sequence[Any]) -> Iterator[None]:
    """Context manager that recomputes activations inside layers in the backward pass instead of storing them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for model in models for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise PolicyError(f"{type(models[0]).__name__} has no layers that support gradient checkpointing")
    # Transformers supports this only in training mode, in which layers that call dropout directly would apply dropout.
    replaced = [vars(layer).get("forward") for layer in layers]  # set on the object by accelerate
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, own in zip(layers, replaced, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own
