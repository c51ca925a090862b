"""Old logprobs (the denominator of the probability ratio), and importance weights that correct for the sampler."""

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

# Largest difference, in nats, between the engine's logprobs and the policy's at which the engine's are used.
EXACT_GAP = 1e-4
# Number of rows in which the engine's logprobs are compared with the policy's before the first update.
_PROBE_ROWS = 8


def sampler_weights(batch: Batch, old_logprobs: Tensor, correction: Any) -> tuple[Tensor | None, float]:
    """Compute importance weights that correct for the difference between the old policy and the sampler.

    Args:
        batch: The batch.
        old_logprobs: Logprobs of the policy before the update, (B, T).
        correction: "token", "sequence", a dict of options of `losses.importance_weights`, or None.

    Returns:
        The weights (B, T) and the effective sample size, as a fraction; None and NaN without a correction.

    Raises:
        SettingsError: If an option is unknown.
    """
    if correction is None:
        return None, math.nan
    options: dict[str, Any] = {"level": correction} if isinstance(correction, str) else dict(correction)
    sampler = batch.logprobs
    if batch.kept_mass is not None:  # recorded logprobs precede truncation, but tokens were drawn from the kept mass
        sampler = sampler - torch.where(batch.mask, batch.kept_mass, 1.0).log()
    try:
        weights = losses.importance_weights(old_logprobs, sampler, batch.mask, **options)
    except TypeError as error:
        raise SettingsError(f"correction={correction!r}: {error}") from error
    level = options.get("level", "token")
    return weights, float(losses.effective_sample_size(weights, batch.mask, level=level))


def resolve_old_logprobs(forward: Forward, batch: Batch, source: str) -> tuple[Tensor, float]:
    """Choose the denominator of the probability ratio.

    Args:
        forward: Runs the policy.
        batch: The batch.
        source: "engine" uses the engine's logprobs without a comparison. "recompute" uses the policy's and compares all
            rows. "auto" compares up to eight rows (`_probe_rows`) and uses the engine's logprobs if they come from the
            current policy version and differ by at most `EXACT_GAP`; otherwise it is "recompute".

    Returns:
        The old logprobs (B, T), and the largest difference between the engine's logprobs and the policy's over the
        compared rows, in nats; NaN for "engine".
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
    """Return up to `_PROBE_ROWS` rows with sampled tokens, spread over the batch and including the longest."""
    rows = batch.mask.any(1).nonzero()[:, 0]
    if len(rows) <= _PROBE_ROWS:
        return rows
    probed = rows[torch.linspace(0, len(rows) - 1, _PROBE_ROWS).long()]
    probed[0] = rows[batch.lengths[rows].argmax()]  # differences grow with the length of the context
    distinct: Tensor = probed.unique()
    return distinct
