"""Images in the prompts of a `LocalEngine`. This module is imported when the first such prompt arrives."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agentfly_kit.engines.local.decoder import _modules_forward
from agentfly_kit.engines.local.kv_cache import KVCache
from agentfly_kit.engines.local.slots import Request
from agentfly_kit.policy.attention import agree
from agentfly_kit.policy.vision import Features, row_images, trial_rows

# Maximum size of the cached features of images in bytes. In a large model, the features of a large image take up tens
# of megabytes.
_CACHE_BYTES = 2**29


class PromptImages:
    """Images in the prompts of requests that are prefilled together.

    Args:
        policy: The policy.
        chosen: Request, slot and number of tokens already in the slot, for each prompt.
        cache: Features of images, keyed by the number of the weights and then by digest.
        weights: Number that identifies the current weights.
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
        size = sum(_nbytes(features) for features in known.values())
        while size > _CACHE_BYTES:
            size -= _nbytes(known.pop(next(iter(known))))
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


def _nbytes(features: Features) -> int:
    return sum(part.nbytes for part in features)


@torch.inference_mode()
def find_obstacle(policy: Any) -> str:
    """Return the reason why prompts with images cannot be run with a KV cache, or "" if a trial gives equal states."""
    ids, span = trial_rows(policy)[0]
    count = ids.shape[1]
    request: Any = SimpleNamespace(ids=ids[0].cpu().numpy(), images=[span], shift=0)
    try:
        expected = policy.hidden(ids, images=[[span]])
        shown = PromptImages(policy, [(request, 0, 0)], {}, 0)
        cache, slots, parts = KVCache(1, count), torch.zeros(1, dtype=torch.int64, device=ids.device), []
        # The first chunk ends inside the image, and the last two tokens are decoded one by one.
        half = span.start + span.length // 2
        for start, stop in ((0, half), (half, count - 2), (count - 2, count - 1), (count - 1, count)):
            positions = torch.arange(start, stop, device=ids.device)[None]
            given = ids[:, start:stop], positions
            decoded = {"position_ids": positions + request.shift}
            options = shown.options(*given, slots) if stop < count - 1 else decoded
            parts.append(_modules_forward(policy.decoder)(cache, slots, *given, "trial", options))
    except Exception as error:  # a model may not accept these arguments
        return f"a trial with a KV cache raised {type(error).__name__}: {error}"
    same = agree(expected, torch.cat(parts, 1))
    return "" if same else "a trial gave different hidden states with and without a KV cache"
