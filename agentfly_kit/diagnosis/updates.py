"""Checks of the batch, the update, and the records of all steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from agentfly_kit.diagnosis.evidence import OTHER_MODEL, Evidence, Result, centered, correlation

# Distance from the previous policy, in nats per token, above which an update is checked for harmful effects.
_LARGE_UPDATE = 0.05
# Increase of the entropy, in nats per token, that is still considered noise.
_NOISE = 0.05
# Minimum number of steps in the first and in the last third of a run.
_STEPS = 2


def wrong_mask(e: Evidence) -> Result:
    if e.batch is None:
        return None
    foreign = missing = total = 0
    rows = list(zip(e.batch.trajectories, e.batch.rows, e.batch.mask.numpy(), strict=True))
    trained = {t.turns[i].author for t, row, mask in rows for i in set(row.turn_index[mask[: len(row)]].tolist())}
    for _, row, mask in rows:
        # Do not count tokens of other authors as missing, because `collate(authors=)` intentionally excludes them.
        written = row.written_by if e.batch.imitation else row.sampled_by
        wanted = written(*trained)
        foreign += int((mask[: len(row)] & ~written()).sum())
        missing += int((wanted & ~mask[: len(row)]).sum())
        total += int(wanted.sum())
    share = (foreign + missing) / max(1, total)
    left_out = f"leaves out {missing} of {total} action tokens"
    text = f"The batch trains on {foreign} tokens outside actions and {left_out}."
    return (text, share, 0.5 + share) if share > 0.01 else None


def reversed_advantages(e: Evidence) -> Result:
    if e.batch is None or e.batch.advantages[e.batch.mask].isnan().any():
        return None
    advantages = e.batch.advantages.nanmean(1).double().numpy()
    r = correlation(centered(e.batch.rewards.double().numpy(), e.batch.groups.tolist()), advantages)
    text = f"Chains with higher rewards have lower advantages (correlation {r:+.2f} within groups)."
    return (text, r, 1.0) if r < -0.3 else None


def sampler_gap(e: Evidence) -> Result:
    gap = e.numbers.get("sampler_gap", 0.0)
    text = f"Engine and policy disagree by up to {gap:.2g} nats on the same token."
    return (text, gap, gap) if 0.1 < gap <= OTHER_MODEL else None


def policy_moved(e: Evidence) -> Result:
    kl, clipped = e.numbers.get("approx_kl", 0.0), e.numbers.get("clip_fraction", 0.0)
    if e.stats is not None and e.stats.detail is not None:
        change = e.stats.detail["logprob_after"] - e.stats.detail["logprob_before"]
        kl = max(kl, float(np.nanmean(np.expm1(change) - change)))
    steps = [(kl, e.numbers), *((record.get("approx_kl", 0.0), record) for record in e.records)]
    worst, step = max(steps, key=lambda pair: pair[0])
    if harm := _harmful_update(e.records):
        step, effects = harm
        text = f"An update moved the policy by {step['approx_kl']:.2g} nats per token{_lr(step)}; then {effects}."
        return text, step["approx_kl"], 0.8
    if worst <= 0.3 and clipped <= 0.5:
        return None
    when = f" at most, by {kl:.2g} in the last step" if worst > kl else ""
    moved = f"{worst:.2g} nats per token{_lr(step)}{when}"
    text = f"An update moved the policy by {moved}; {clipped:.0%} of the ratios were clipped."
    # Even healthy updates reach estimates of 0.7 nats, because a few tokens dominate the mean.
    return text, worst, max(worst / 2, clipped)


def _lr(record: Mapping[str, float]) -> str:
    return f" at lr {record['lr']:.2g}" if "lr" in record else ""


def _harmful_update(records: Sequence[Mapping[str, float]]) -> tuple[Mapping[str, float], str] | None:
    """Return the record of the last large update that did harm, and its effects, or None.

    In the next step and in the last one, the success rate is lower by more than two standard errors, or the entropy is
    more than twice as high.
    """
    for before, after in reversed([*itertools.pairwise(records)]):
        effects = []
        if before.get("approx_kl", 0.0) > _LARGE_UPDATE:
            if all(_rise(before, now)[0] < -2 * _rise(before, now)[1] for now in (after, records[-1])):
                effects.append(f"success fell from {before['success']:.2f} to {after['success']:.2f}")
            entropies = [record.get("entropy", math.nan) for record in (before, after, records[-1])]
            if min(entropies[1:]) > 2 * entropies[0] + _NOISE:
                effects.append(f"the entropy rose from {entropies[0]:.2f} to {entropies[1]:.2f} nats")
        if effects:
            return before, " and ".join(effects)
    return None


def _rise(*records: Mapping[str, float]) -> tuple[float, float]:
    """Return the success rate of the last record minus that of the first, and the standard error; NaN if unknown."""
    rates, errors = ([record.get(name, math.nan) for record in records] for name in ("success", "success_se"))
    return rates[1] - rates[0], math.hypot(*errors)


def no_rise(e: Evidence) -> Result:
    """Compare the first third of the steps with the last third, if a rise of 0.2 would be significant."""
    steps = [record for record in e.records if "success_se" in record]
    count = len(steps) // 3
    if count < _STEPS:
        return None
    parts = steps[:count], steps[-count:]
    first, last = (statistics.fmean(record["success"] for record in part) for part in parts)
    error = 1.96 * math.hypot(*(record["success_se"] for part in parts for record in part)) / count
    if last - first > error or error > 0.2 or last > 0.9:
        return None
    spans = [f"(steps {part[0]['step']} to {part[-1]['step']})" for part in parts]
    change = "fell" if first - last > error else "did not rise measurably"
    text = f"Success {change} from {first:.2f} {spans[0]} to {last:.2f} {spans[1]}, {last - first:+.2f} ± {error:.2f}"
    equal, kl = (statistics.fmean(r.get(name, 0.0) for r in parts[1]) for name in ("equal_groups", "approx_kl"))
    text += f"; in the last, {equal:.0%} of the groups had equal rewards, approx_kl {kl:.1g}."
    return text, last - first, 0.6 if last - first + error < 0.1 else 0.4


def moved_tokens(e: Evidence) -> Result:
    detail, batch = (e.stats.detail, e.stats.batch) if e.stats else (None, None)
    if detail is None or batch is None:
        return None
    change = np.nan_to_num(np.abs(detail["logprob_after"] - detail["logprob_before"]))
    places = [divmod(int(i), change.shape[1]) for i in np.argsort(change, axis=None)[:-4:-1]]
    texts = ", ".join(f"{batch.rows[i].token_texts[j]!r} ({detail['ratio'][i, j]:.2f})" for i, j in places)
    return f"The tokens that moved most, with their ratios: {texts}.", float(change.max()), 0.05
