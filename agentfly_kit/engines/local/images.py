"""Images in the prompts of a `LocalEngine`. This module is imported with the first such prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentfly_kit.engines.local.slots import Request
from agentfly_kit.policy.vision import Features, row_images

# Number of images whose features are kept.
_CACHE_SIZE = 256


class PromptImages:
    """Images in the prompts of requests that are prefilled together.

    Args:
        policy: The policy.
        chosen: Request, slot and number of tokens already in the slot, for each prompt.
        cache: Features of images, keyed by digest, under the number of the weights.
        weights: Number of the current weights.
    """

    def __init__(
        self,
        policy: Any,
        chosen: Sequence[tuple[Request, int, int]],
        cache: dict[int, dict[str, Features]],
        weights: int,
    ) -> None:
        for number in [number for number in cache if number != weights]:
            del cache[number]
        known = cache.setdefault(weights, {})
        requests = [request for request, _, _ in chosen]
        self._width = max(len(request.ids) for request in requests)
        ids = torch.zeros((len(requests), self._width), dtype=torch.int64)
        for row, request in enumerate(requests):
            ids[row, : len(request.ids)] = torch.from_numpy(request.ids)
        spans = [request.images for request in requests]
        self._decoder = policy.decoder
        self._rows = row_images(policy, ids.to(policy.device), spans, known)
        while len(known) > _CACHE_SIZE:
            del known[next(iter(known))]
        # Index of the prompt in each slot.
        self._numbers = torch.zeros(max(slot for _, slot, _ in chosen) + 1, dtype=torch.int64, device=policy.device)
        for row, (request, slot, _) in enumerate(chosen):
            self._numbers[slot] = row
            if self._rows.positions is not None:
                last = int(self._rows.positions[:, row, : len(request.ids)].max())
                request.shift = last + 1 - len(request.ids)

    def options(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> dict[str, Any]:
        """Return the arguments of the decoder for tokens, (R, C), at positions, (R, C), of the slots, (R,)."""
        source = self._numbers[slots][:, None] * self._width + positions.clamp(max=self._width - 1)
        return self._rows.options(self._decoder, tokens, source)
