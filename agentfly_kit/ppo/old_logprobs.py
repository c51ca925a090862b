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
"""Rows in which the engine's logprobs are compared with the policy's before the first update."""


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


def resolve_old_logprobs(forward: Forward, batch: Batch, source: str) -> tuple[Tensor, float]:
    """The ratio's denominator (B, T), and the largest measured gap to the engine's logprobs; NaN if none was measured.

    "auto" compares up to eight rows (`_probe_rows`), "recompute" all of them, "engine" none.
    """

    def largest_gap(rows: Tensor, scored: Tensor) -> float:
        mask = batch.mask[rows]
        return float((scored[mask] - batch.logprobs[rows][mask]).abs().max())

    if source == "engine":
        return batch.logprobs, math.nan
    if source == "auto" and bool((batch.versions[batch.mask] == forward.policy.version).all()):
        rows = _probe_rows(batch)
        gap = largest_gap(rows, forward.score(RowSubset(batch, rows), {"logprob"})["logprob"])
        if gap <= EXACT_GAP:
            return batch.logprobs, gap
    scored = forward.score(batch, {"logprob"})["logprob"]
    return scored, largest_gap(torch.arange(len(batch)), scored)


def _probe_rows(batch: Batch) -> Tensor:
    """Rows with sampled tokens: all if there are at most `_PROBE_ROWS`, else so many spread over the batch, the longest
    among them."""
    rows = batch.mask.any(1).nonzero()[:, 0]
    if len(rows) <= _PROBE_ROWS:
        return rows
    probed = rows[torch.linspace(0, len(rows) - 1, _PROBE_ROWS).long()]
    probed[0] = rows[batch.lengths[rows].argmax()]  # a gap grows with what came before
    distinct: Tensor = probed.unique()
    return distinct
