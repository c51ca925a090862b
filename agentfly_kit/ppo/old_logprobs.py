"""The ratio's denominator: the sampler's own logprobs or the policy's, and the weight of a token where they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import SettingsError
from agentfly_kit.ppo.micro_batch import Forward, RowSubset

Correction = Literal["token", "sequence"] | Mapping[str, Any]

EXACT_GAP = 1e-4
"""nats: an engine whose logprobs are closer than this to a full forward is taken at its word."""


_PROBE_ROWS = 8
"""Rows."""


def sampler_weights(batch: Batch, old_logprobs: Tensor, correction: Any) -> tuple[Tensor | None, float]:
    """Importance weights (B, T) of the sampled tokens, and the effective sample size they leave."""
    if correction is None:
        return None, math.nan
    options: dict[str, Any] = {"level": correction} if isinstance(correction, str) else dict(correction)
    sampler = batch.logprobs
    if batch.kept_mass is not None:  # what is recorded is from before the cut; the token was drawn from what was kept
        sampler = sampler - torch.where(batch.mask, batch.kept_mass, 1.0).log()
    try:
        weights = losses.importance_weights(old_logprobs, sampler, batch.mask, **options)
    except TypeError as error:
        raise SettingsError(f"correction={correction!r}: {error}") from error
    level = options.get("level", "token")
    return weights, float(losses.effective_sample_size(weights, batch.mask, level=level))


def resolve_old_logprobs(
    forward: Forward, batch: Batch, source: str, *, defer: bool = False
) -> tuple[Tensor, float | None]:
    """The ratio's denominator (B, T), and the largest gap to the engine's logprobs where it was measured.

    defer: the first update runs every row that matters, so that it can measure the gap by the way: the gap is None.
    """

    def gap(rows: Tensor, scored: Tensor) -> float:
        mask = batch.mask[rows]
        return float((scored[mask] - batch.logprobs[rows][mask]).abs().max())

    if source == "recompute":
        scored = forward.score(batch, {"logprob"})["logprob"]
        return scored, gap(torch.arange(len(batch)), scored)
    if source == "auto":
        measured = math.inf
        if bool((batch.versions[batch.mask] == forward.policy.version).all()):
            if defer:
                return batch.logprobs, None
            some = torch.linspace(0, len(batch) - 1, min(_PROBE_ROWS, len(batch))).long()
            some[0] = batch.lengths.argmax()  # a gap grows with what came before
            some = some.unique()
            measured = gap(some, forward.score(RowSubset(batch, some), {"logprob"})["logprob"])
        if measured > EXACT_GAP:
            return resolve_old_logprobs(forward, batch, "recompute")
        return batch.logprobs, measured
    return batch.logprobs, math.nan
