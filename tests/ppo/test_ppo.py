"""The PPO step against plain loops: values, gradients, invariances, and errors that leave the weights unchanged."""

import asyncio
import dataclasses
import itertools
import math
import re
import threading
from pathlib import Path
from typing import Any

import errors
import numpy as np
import pytest
import torch
from agents import agent, assert_same_gradient, assert_same_update, fresh, random_policy, tasks
from test_ppo_settings import gradient, judged, made
from torch import Tensor
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.batch.batch import join
from agentfly_kit.ppo import step
from agentfly_kit.ppo.inputs import minibatches


def batch_of(policy: af.Policy, *, stale: float = 0.0, values: bool = False) -> af.Batch:
    """Return eight rows whose recorded logprobs differ from the policy's by `stale`, with alternating sign."""
    batch = made(policy, 8, noise=0.0, stale=stale, with_entropies=True, version=policy.version)
    return judged(policy, batch) if values else batch


def example(copies: int = 1, **options: Any) -> tuple[af.Policy, af.Batch]:
    """Return a random policy and a batch for it of so many copies of the rows, with options of `batch_of`."""
    policy = random_policy(0)
    return policy, join([batch_of(policy, **options) for _ in range(copies)])


def weights(policy: af.Policy) -> Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def stepped(
    policy: af.Policy, batch: af.Batch, config: af.PPOConfig | None = None, *, lr: float = 1e-9, detail: bool = False
) -> tuple[af.Policy, af.Stats]:
    """Return a copy of the policy after a step, and the statistics."""
    twin = policy.copy()
    return twin, af.ppo_step(twin, af.adamw(twin, lr), batch, config or af.PPOConfig(), detail=detail)


# --- against plain loops -------------------------------------------------------------------------


def plain(
    policy: af.Policy, batch: af.Batch, clip: float, value_coef: float, kl_coef: float, entropy_coef: float
) -> Any:
    """Compute the step by its definition, token by token, from float64 logits of plain forward passes."""
    total = policy_loss = value_loss = kl_ref = 0.0
    stats = {"kl": 0.0, "clipped": 0.0, "entropy": 0.0, "ratio": 0.0}
    n = int(batch.mask.sum())
    assert batch.ref_logprobs is not None or kl_coef == 0
    for i in range(len(batch)):
        length = int(batch.lengths[i])
        ids = batch.ids[i, :length]
        states = policy.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        logits = policy.model.lm_head(states).double() / float(batch.temperatures[i])
        logp = torch.log_softmax(logits, -1)
        for t in range(1, length):
            if not batch.mask[i, t]:
                continue
            new, old, a = logp[t - 1, ids[t]], float(batch.logprobs[i, t]), float(batch.advantages[i, t])
            ratio = torch.exp(new - old)
            term = torch.maximum(-ratio * a, -ratio.clamp(1 - clip, 1 + clip) * a)
            policy_loss = policy_loss + term / n
            loss = term
            entropy = -(logp[t - 1].exp() * logp[t - 1]).sum()
            loss = loss - entropy_coef * entropy
            if value_coef:
                v = policy.value_head(states[t - 1])[0].double()
                square = 0.5 * (v - float(batch.returns[i, t])) ** 2
                value_loss = value_loss + square / n
                loss = loss + value_coef * square
            if kl_coef:
                d = float(batch.ref_logprobs[i, t]) - new  # type: ignore[index]
                k3 = torch.exp(d) - d - 1
                kl_ref = kl_ref + k3 / n
                loss = loss + kl_coef * k3
            total = total + loss / n
            log_ratio = float(new.detach()) - old
            stats["kl"] += (math.exp(log_ratio) - 1 - log_ratio) / n
            stats["clipped"] += float((a > 0 and ratio > 1 + clip) or (a < 0 and ratio < 1 - clip)) / n
            stats["entropy"] += float(entropy.detach()) / n
            stats["ratio"] = max(stats["ratio"], abs(math.exp(log_ratio) - 1))
    return total, policy_loss, value_loss, kl_ref, stats


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl_coef": 0.3},
        {"entropy_coef": 0.2},
        {"value_coef": 0.7},
        {"value_coef": 0.7, "kl_coef": 0.3, "entropy_coef": 0.2, "clip": 0.05},
    ],
    ids=str,
)
def test_the_step_matches_its_definition(options: dict[str, float]) -> None:
    policy = random_policy(0, value_head=bool(options.get("value_coef")), spread=0.15)
    batch = batch_of(policy, stale=0.12, values=bool(options.get("value_coef")))
    reference = random_policy(1, spread=0.15)
    batch = batch.replace(ref_logprobs=reference.score(batch, {"logprob"})["logprob"])
    coefs = {k: options.get(k, 0.0) for k in ("value_coef", "kl_coef", "entropy_coef")}
    loss, policy_loss, value_loss, kl_ref, wanted = plain(policy, batch, options.get("clip", 0.2), **coefs)
    gradient = torch.autograd.grad(loss, list(policy.parameters()))
    loss, policy_loss, value_loss, kl_ref = (
        x.detach() if isinstance(x, Tensor) else x for x in (loss, policy_loss, value_loss, kl_ref)
    )
    flat = torch.cat([g.flatten() for g in gradient])
    twin = policy.copy()
    sgd = torch.optim.SGD(list(twin.parameters()), lr=1.0)
    stats = af.ppo_step(
        twin,
        sgd,
        batch,
        af.PPOConfig(max_grad_norm=None, old_logprobs="engine", **{"clip": 0.2, "value_coef": 0.0} | options),
    )  # type: ignore[arg-type]
    assert_same_update(weights(twin), weights(policy) - flat, weights(policy))
    assert (stats.loss, stats.policy_loss, stats.entropy, stats.ratio_max) == pytest.approx(
        (float(loss), float(policy_loss), wanted["entropy"], 1 + wanted["ratio"]), abs=1e-5
    )
    assert (stats.approx_kl, stats.clip_fraction) == pytest.approx((wanted["kl"], wanted["clipped"]), abs=1e-6)
    assert stats.grad_norm == pytest.approx(float(flat.norm()), rel=1e-4)
    assert (stats.tokens, stats.updates, twin.version) == (int(batch.mask.sum()), 1, policy.version + 1)
    if options.get("value_coef"):
        assert stats.value_loss == pytest.approx(float(value_loss), abs=1e-5)
    if options.get("kl_coef"):
        assert stats.kl_reference == pytest.approx(float(kl_ref), abs=1e-5)


@pytest.mark.parametrize(
    "how", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "trajectory_mean"]
)
def test_the_result_does_not_depend_on_order_or_padding(how: Any) -> None:
    policy, batch = example(stale=0.1)
    aggregate = {"how": how, "denominator": 9.0} if how == "fixed" else how
    wanted, _ = gradient(policy, batch, aggregate=aggregate)
    assert float(wanted.abs().max()) > 1e-4
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = af.collate([batch.trajectories[i] for i in order]).replace(advantages=batch.advantages[order])
    fills = {"ids": 5, "mask": 0, "attention": 0, "versions": -1}
    fills |= dict.fromkeys(("logprobs", "entropies", "advantages", "token_rewards"), math.nan)
    wide = {n: torch.nn.functional.pad(getattr(batch, n), (0, 40), value=fill) for n, fill in fills.items()}
    for other in (shuffled, dataclasses.replace(batch, **wide)):
        assert_same_gradient(gradient(policy, other, aggregate=aggregate)[0], wanted)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
def test_values_at_masked_positions_are_never_read(junk: float) -> None:
    policy = random_policy(0, value_head=True)
    batch = batch_of(policy, stale=0.1, values=True)
    wanted, _ = gradient(policy, batch)
    names = ("logprobs", "advantages", "token_rewards", "entropies", "values", "returns")
    dirty = dataclasses.replace(batch, **{n: torch.where(batch.mask, getattr(batch, n), junk) for n in names})
    assert torch.equal(gradient(policy, dirty)[0], wanted)


# --- rows without advantage ----------------------------------------------------------------------


def flat_half() -> tuple[af.Policy, af.Batch]:
    policy, batch = example(stale=0.1)
    adv = batch.advantages.clone()
    adv[:4] = torch.where(batch.mask[:4], 0.0, math.nan)
    return policy, batch.replace(advantages=adv)


@pytest.mark.parametrize("options", [{}, {"minibatch": 2, "epochs": 2}], ids=str)
@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean"])
def test_skipping_rows_without_advantage_is_exact(
    options: dict[str, Any], how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batch = flat_half()

    def go() -> tuple[Tensor, Any]:
        twin = policy.copy()
        # Not Adam, which would divide the rounding error of a small gradient by the gradient.
        sgd = torch.optim.SGD(list(twin.parameters()), lr=0.1)
        stats = af.ppo_step(twin, sgd, batch, af.PPOConfig(old_logprobs="engine", aggregate=how, **options))
        return weights(twin), stats

    left_out, some = go()
    monkeypatch.setattr(step, "_only_advantage", lambda *args: False)
    run_all, every = go()
    assert_same_update(left_out, run_all, weights(policy))
    assert (some.updates, some.dropped_groups) == (every.updates, 1)
    assert some.clip_fraction == pytest.approx(every.clip_fraction, abs=1e-6), "a fraction of all action tokens"
    assert some.loss == pytest.approx(every.loss, abs=1e-6)


def test_rows_without_advantage_have_an_entropy_bonus() -> None:
    policy, batch = flat_half()
    quiet = dataclasses.replace(batch, advantages=torch.where(batch.mask, 0.0, math.nan))
    with_both, with_advantages, with_bonus = (
        gradient(policy, given, entropy_coef=coef)[0] for given, coef in ((batch, 0.1), (batch, 0.0), (quiet, 0.1))
    )
    assert_same_gradient(with_both - with_advantages, with_bonus)
    assert float(with_bonus.abs().max()) > 1e-4


def test_target_kl_does_not_depend_on_skipped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = flat_half()

    def updates(target: float) -> int:
        _, stats = stepped(policy, batch, af.PPOConfig(epochs=10, minibatch=4, target_kl=target), lr=3e-3)
        assert stats.stopped_early == (stats.updates < 20)
        return stats.updates

    targets = (1e-3, 1e-2, 2e-2, 3e-2)
    left_out = [updates(t) for t in targets]
    monkeypatch.setattr(step, "_only_advantage", lambda *args: False)
    assert left_out == [updates(t) for t in targets]
    assert 1 < left_out[0] < 20 and len(set(left_out)) > 1


def test_a_minibatch_without_gradient_still_makes_an_update() -> None:
    policy, batch = flat_half()
    optimizer = af.adamw(policy, 1e-3)
    stats = af.ppo_step(policy, optimizer, batch, af.PPOConfig(minibatch=1, epochs=1, old_logprobs="engine"))
    assert (stats.updates, policy.version, {float(s["step"]) for s in optimizer.state.values()}) == (8, 8, {8.0})


def test_a_batch_without_any_advantage() -> None:
    policy, batch = example()
    before = weights(policy)
    stats = af.ppo_step(
        policy,
        af.adamw(policy),
        batch.replace(advantages=torch.zeros_like(batch.advantages)),
        af.PPOConfig(old_logprobs="engine"),
    )
    assert torch.equal(weights(policy), before)
    assert (stats.loss, stats.dropped_groups) == (0, 2)
    assert "approx_kl" not in stats.scalars() or stats.approx_kl == 0


# --- the ratio's denominator ---------------------------------------------------------------------


def test_old_logprobs_of_the_engine_are_used_only_if_they_agree() -> None:
    policy = random_policy(0)
    exact, off = batch_of(policy), batch_of(policy, stale=0.3)
    assert stepped(policy, exact)[1].sampler_gap < 1e-4
    _, stats = stepped(policy, off)
    assert stats.sampler_gap == pytest.approx(0.3, abs=1e-3)
    assert stats.approx_kl == pytest.approx(0, abs=1e-6), "recomputed, so the first ratio is 1"
    assert stepped(policy, off, af.PPOConfig(old_logprobs="engine"))[1].approx_kl > 0.03
    stale = policy.copy()
    stale.version = 1
    stats = af.ppo_step(stale, af.adamw(stale, 1e-9), exact, detail=True)
    assert stats.approx_kl == pytest.approx(0, abs=1e-6)
    errors.check(
        lambda: af.ppo_step(policy, af.adamw(policy), batch_of(stale)),
        af.errors.BatchError,
        re.compile(r"batch must have been sampled at version 0 .*, got version 2"),
    )


# --- details -------------------------------------------------------------------------------------


def test_detail_has_the_logprobs_before_and_after() -> None:
    policy, batch = example()
    before = policy.score(batch, {"logprob"})["logprob"]
    stats = af.ppo_step(policy, af.adamw(policy, 1e-2), batch, detail=True)
    after = policy.score(batch, {"logprob"})["logprob"]
    for name, wanted in (("logprob_before", before), ("logprob_after", after), ("ratio", (after - before).exp())):
        torch.testing.assert_close(torch.as_tensor(stats.detail[name]), wanted, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert stats.batch is batch


# --- failures ------------------------------------------------------------------------------------


async def test_a_batch_of_another_tokenizer_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for: sampled, scripted, saved and loaded chains, and those of older versions, whose vocabulary is unknown.

    The first 64 tokens of one row were compared, and these are often the same in two vocabularies.
    """
    policy = fresh()
    rollout = await agent(policy).rollout(tasks(2), group_size=2)
    loaded = af.Rollout.load(rollout.save(tmp_path / "r.jsonl"))
    lookup, before = af.tiny.policy("lookup"), af.tiny.policy("lookup").fingerprint()
    shown = await af.envs.lookup.expert().rollout(af.envs.lookup.tasks(4, "train"))
    for chains in (rollout, loaded):
        batch = af.collate(chains, [1.0, -1.0, 1.0, -1.0])
        errors.check(
            lambda batch=batch: af.ppo_step(lookup, af.adamw(lookup), batch),
            af.errors.BatchError,
            "another tokenizer",
        )
    await errors.check(lambda: af.imitate(lookup, shown), af.errors.BatchError, "af.envs.lookup.expert(policy)")
    own = await af.envs.lookup.expert(lookup).rollout(af.envs.lookup.tasks(4, "train"))
    assert {(t.vocabulary, t.reward) for t in own.trajectories} == {(lookup.chat.vocabulary, 1.0)}
    assert lookup.fingerprint() == before
    # Without a known vocabulary, the texts of all tokens are compared.
    batch = af.collate([t.replace(vocabulary=None) for t in rollout.trajectories], [1.0, -1.0, 1.0, -1.0])
    other = af.Policy(policy.model, af.Chat(af.tiny.tokenizer()))
    last = int(batch.ids[-1, int(batch.lengths[-1]) - 1])
    assert other.chat.token_texts([last]) == policy.chat.token_texts([last])
    decode = other.chat._token_text
    monkeypatch.setattr(other.chat, "_token_text", lambda token: "<another>" if token == last else decode(token))
    errors.check(
        lambda: af.ppo_step(other, af.adamw(other), batch),
        af.errors.BatchError,
        re.compile(rf"token id {last} had the text '.*' when .* but has '<another>' in this"),
    )


@pytest.mark.parametrize(("wrong", "minibatch"), [(0.01, None), (5e-5, 4)])
def test_a_row_with_wrong_logprobs_is_found_in_the_first_minibatch(wrong: float, minibatch: int | None) -> None:
    """The sampler's logprobs are used unless a row of the first minibatch differs by more than 1e-4."""
    policy, batch = example(copies=3)
    first = minibatches(batch.trajectory_index, minibatch, torch.Generator().manual_seed(0))[0].tolist()
    config = af.PPOConfig(minibatch=minibatch, micro_tokens=32)
    assert len(policy.micro_batches(batch, torch.tensor(first), 32)) > 1
    for row in range(0, len(batch), 3):
        logprobs = batch.logprobs.clone()
        logprobs[row] -= wrong
        given = dataclasses.replace(batch, logprobs=logprobs)
        _, stats = stepped(policy, given, config, detail=True)
        if row not in first:
            assert stats.sampler_gap < 1e-5 and not np.nanmax(abs(stats.detail["sampler_gap"]))
        else:
            assert stats.sampler_gap == pytest.approx(wrong, abs=1e-5)
            assert np.nanmax(abs(stats.detail["sampler_gap"])) == pytest.approx(0.01 if wrong > 1e-4 else 0, abs=1e-4)
        _, stats = stepped(policy, given, config.replace(old_logprobs="recompute"))
        assert stats.sampler_gap == pytest.approx(wrong, abs=1e-5)


def compared_with_recomputation(
    policy: af.Policy, batch: af.Batch, config: af.PPOConfig
) -> tuple[bool, bool, af.Stats]:
    """Return whether "auto" gives the weights and the statistics of "recompute", and the statistics with "auto"."""
    wanted, other = stepped(policy, batch, config.replace(old_logprobs="recompute"), lr=1e-3)
    twin, stats = stepped(policy, batch, config.replace(old_logprobs="auto"), lr=1e-3)
    return torch.equal(weights(twin), weights(wanted)), stats == other, stats


@pytest.mark.parametrize("correction", [None, "token", "sequence"])
def test_a_difference_in_any_micro_batch_gives_the_result_of_recomputation(correction: Any) -> None:
    """Micro-batches that were computed before the difference was found are computed again."""
    policy, batch = example(copies=3)
    smaller = torch.where(batch.mask, batch.logprobs - 9e-5, batch.logprobs)  # not large enough to be found
    last = policy.micro_batches(batch, None, 32)[-1]
    for wrong in ([], last.tolist(), list(range(len(batch)))):
        logprobs = smaller.clone()
        logprobs[wrong] -= 0.3
        given = batch.replace(logprobs=logprobs)
        config = af.PPOConfig(epochs=2, micro_tokens=32, correction=correction)
        equal, same, stats = compared_with_recomputation(policy, given, config)
        assert equal == bool(wrong)
        assert same if wrong else stats.sampler_gap == pytest.approx(9e-5, abs=1e-5)


def test_old_logprobs_are_recomputed_if_the_first_minibatch_is_skipped() -> None:
    policy, batch = example(copies=3, stale=0.3)
    first = minibatches(batch.trajectory_index, 12, torch.Generator().manual_seed(0))[0]
    half = batch.advantages.clone()
    half[first] = 0.0
    config = af.PPOConfig(minibatch=12, epochs=2)
    assert compared_with_recomputation(policy, batch.replace(advantages=half), config)[:2] == (True, True)
    nothing = af.ppo_step(policy, af.adamw(policy), batch.replace(advantages=torch.zeros_like(half)))
    assert math.isnan(nothing.sampler_gap), "all rows are skipped, so nothing was compared"


def test_a_stale_batch_is_rejected_unless_allowed() -> None:
    policy, batch = example()
    policy.version += 64
    af.ppo_step(policy, af.adamw(policy, 1e-9), batch)
    before = weights(policy).clone()
    errors.check(
        lambda: af.ppo_step(policy, af.adamw(policy, 1e-9), batch),
        af.errors.BatchError,
        re.compile(r"the batch is stale: .* version 0, more than max_lag=64 .* version 65; .* max_lag=None"),
    )
    assert torch.equal(weights(policy), before)
    assert (
        af.ppo_step(policy, af.adamw(policy, 1e-9), batch, af.PPOConfig(max_lag=None, correction="token")).updates
        == 1
    )


@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_diverges_keeps_the_weights_of_the_last_update(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = example()
    wanted = policy.copy()
    if at:
        calls, real = itertools.count(), step.clip_and_step

        def stop(*args: Any) -> float:
            if next(calls) >= at:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(step, "clip_and_step", stop)
        errors.check(
            lambda: af.ppo_step(wanted, af.adamw(wanted), batch, af.PPOConfig(minibatch=2)), KeyboardInterrupt
        )
        monkeypatch.undo()
    clips, real_clip = itertools.count(), torch.nn.utils.clip_grad_norm_

    def explode(parameters: Any, *args: Any) -> Any:
        if next(clips) >= at:
            next(iter(parameters)).grad.fill_(math.nan)
        return real_clip(parameters, *args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", explode)
    errors.check(
        lambda: af.ppo_step(policy, af.adamw(policy), batch, af.PPOConfig(minibatch=2)),
        af.errors.TrainingError,
        re.compile(f"got nan at policy version {at}; the weights are those from before this update"),
    )
    assert torch.equal(weights(policy), weights(wanted)) and policy.version == at


async def test_repeated_cancellation_leaves_the_weights_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = example()
    boundaries = {0: policy.fingerprint()}
    twin = policy.copy()
    real = step.clip_and_step

    def noting(p: af.Policy, *args: Any) -> float:
        norm = real(p, *args)
        boundaries[p.version] = p.fingerprint()
        return norm

    third, cancelled = threading.Event(), threading.Event()

    def held(p: af.Policy, *args: Any) -> float:
        norm = real(p, *args)
        if p.version == 3:
            third.set()
            cancelled.wait(GUARD)
        return norm

    config = af.PPOConfig(minibatch=1)
    monkeypatch.setattr(step, "clip_and_step", noting)
    af.ppo_step(twin, af.adamw(twin), batch, config)
    monkeypatch.setattr(step, "clip_and_step", held)
    going = asyncio.create_task(af.ppo_step_async(policy, af.adamw(policy), batch, config))
    await until(third.is_set)
    for _ in range(5):
        going.cancel()
        await asyncio.sleep(0)
    cancelled.set()
    await asyncio.wait([going])
    assert going.cancelled() and policy.fingerprint() == boundaries[3]
    await asyncio.sleep(0.05)
    assert policy.version == 3 < twin.version, "no update after the cancellation"


def test_a_set_cancel_event_prevents_the_first_update() -> None:
    policy = random_policy(0)
    cancel = threading.Event()
    cancel.set()
    errors.check(
        lambda: af.ppo_step(policy, af.adamw(policy), batch_of(policy), cancel=cancel), asyncio.CancelledError
    )
    assert policy.version == 0


async def test_the_async_step_equals_the_synchronous_one() -> None:
    policy, twin = random_policy(0), random_policy(0)
    batch, config = batch_of(policy), af.PPOConfig(minibatch=3, epochs=2)
    stats = af.ppo_step(policy, af.adamw(policy), batch, config, seed=4)
    assert stats == await af.ppo_step_async(twin, af.adamw(twin), batch, config, seed=4)
    assert torch.equal(weights(policy), weights(twin))


def test_the_seed_determines_the_minibatches() -> None:
    policy, batch = example()
    same = [gradient(policy, batch, minibatch=2, seed=s)[0] for s in (1, 1, 2)]
    assert [torch.equal(same[0], other) for other in same] == [True, True, False]


def test_max_grad_norm_scales_the_gradient() -> None:
    policy, batch = example(stale=0.1)
    whole, small = (gradient(policy, batch, max_grad_norm=norm)[0] for norm in (None, 1e-3))
    assert float(small.norm()) == pytest.approx(1e-3, rel=1e-2)
    torch.testing.assert_close(small / small.norm(), whole / whole.norm(), atol=1e-4, rtol=0)
