"""Checks of the batch, the update, and the records of all steps."""

from __future__ import annotations

import numpy as np

from agentfly_kit.diagnosis.evidence import OTHER_MODEL, Evidence, Result, centered, correlation


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
    left_out = f"leaves out {missing} of {total} of their tokens"
    text = f"The batch trains {foreign} tokens outside of the actions and {left_out}."
    return (text, share, 0.5 + share) if share > 0.01 else None


def reversed_advantages(e: Evidence) -> Result:
    if e.batch is None or e.batch.advantages[e.batch.mask].isnan().any():
        return None
    advantages = e.batch.advantages.nanmean(1).double().numpy()
    r = correlation(centered(e.batch.rewards.double().numpy(), e.batch.groups.tolist()), advantages)
    text = f"The advantages fall with the reward (correlation {r:+.2f} within groups)."
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
    if worst <= 0.3 and clipped <= 0.5:
        return None
    when = f" at most, by {kl:.2g} in the last step" if worst > kl else ""
    lr = f" at lr {step['lr']:.2g}" if "lr" in step else ""
    moved = f"{worst:.2g} nats per token{lr}{when}"
    text = f"An update moved the policy by {moved}; {clipped:.0%} of the ratios were clipped."
    # Even healthy updates reach estimates of 0.7 nats, because a few tokens dominate the mean.
    return text, worst, max(worst / 2, clipped)


def moved_tokens(e: Evidence) -> Result:
    detail, batch = (e.stats.detail, e.stats.batch) if e.stats else (None, None)
    if detail is None or batch is None:
        return None
    change = np.nan_to_num(np.abs(detail["logprob_after"] - detail["logprob_before"]))
    places = [divmod(int(i), change.shape[1]) for i in np.argsort(change, axis=None)[:-4:-1]]
    texts = ", ".join(f"{batch.rows[i].token_texts[j]!r} ({detail['ratio'][i, j]:.2f})" for i, j in places)
    return f"The tokens that moved most, with their ratios: {texts}.", float(change.max()), 0.05
