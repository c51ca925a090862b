"""Every estimator, loss, aggregation and KL on a bandit of two arms, pulled twice, an observation between: it learns.

The policy is four logits. A row is a prompt, an arm, an observation, an arm; what was only read holds NaN. The reward
is 1 if both arms were the second, which happens to a quarter of the rows at first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentfly_kit import advantages, losses

GROUPS = torch.arange(32) // 8
MASK = torch.tensor([False, True, False, True]).expand(32, 4)
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rewards (N,), arms (N, 2), logprobs (N, 4)) -> (N,) or (N, 4)."""
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def token_rewards(rewards: Tensor) -> Tensor:
    out = torch.where(MASK, 0.0, torch.nan)
    out[:, 3] = rewards
    return out


def in_turns(turn_data: Tensor) -> Tensor:
    """(N, 2) -> (N, 4)"""
    return torch.stack([turn_data[:, 0]] * 2 + [turn_data[:, 1]] * 2, dim=1)


def gigpo(rewards: Tensor, arms: Tensor, _: Tensor) -> Tensor:
    states = [["begin", int(first)] for first in arms[:, 0]]
    earned = [[0.0, float(r)] for r in rewards]
    return in_turns(advantages.gigpo(rewards, GROUPS, turn_rewards=earned, states=states))


def arpo(rewards: Tensor, arms: Tensor, _: Tensor) -> Tensor:
    return in_turns(
        advantages.arpo(rewards, GROUPS, turn_ids=[[(i, 0), (i, 1)] for i in range(32)], attribution="hard")
    )


def otb(rewards: Tensor, arms: Tensor, logprobs: Tensor) -> Tensor:
    p = logprobs.exp()
    return advantages.optimal_token_baseline(
        token_rewards(rewards), MASK, groups=GROUPS, logprobs=logprobs, sum_squared_probs=p**2 + (1 - p) ** 2
    )


ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda r, *_: advantages.grpo(r, GROUPS),
    "dr_grpo": lambda r, *_: advantages.dr_grpo(r, GROUPS),
    "rloo": lambda r, *_: advantages.rloo(r, GROUPS),
    "gpg": lambda r, *_: advantages.gpg(r, GROUPS),
    "grpo_passk": lambda r, *_: advantages.grpo_passk(r, GROUPS, k=2),
    "maxrl": lambda r, *_: advantages.maxrl(r, GROUPS),
    "opo": lambda r, *_: advantages.opo(r, GROUPS, lengths=torch.full((32,), 2)),
    "remax": lambda r, *_: advantages.remax(r, baselines=torch.full((32,), 0.25)),
    "gdpo": lambda r, arms, _: advantages.gdpo(torch.stack([r, arms[:, 0].float()], dim=1), GROUPS),
    "trajectory_level": lambda r, *_: advantages.trajectory_level(r, GROUPS, trajectory_index=torch.arange(32)),
    "gigpo": gigpo,
    "arpo": arpo,
    "gae": lambda r, *_: advantages.gae(token_rewards(r), torch.full((32, 4), 0.25), MASK)[0],
    "reinforce_plus_plus": lambda r, *_: advantages.reinforce_plus_plus(token_rewards(r), MASK),
    "reinforce_plus_plus_baseline": lambda r, *_: advantages.reinforce_plus_plus_baseline(
        token_rewards(r), MASK, groups=GROUPS
    ),
    "optimal_token_baseline": otb,
}
LOSSES: dict[str, Loss] = {
    "ppo": losses.ppo,
    "clip-higher": lambda *x: losses.ppo(*x, clip_high=0.28),
    "dual clip": lambda *x: losses.ppo(*x, dual_clip=3.0),
    "reinforce": losses.reinforce,
    "gpg": losses.gpg,
    "gspo": losses.gspo,
    "gmpo": losses.gmpo,
    "sapo": losses.sapo,
    "cispo": losses.cispo,
    "cispo upper": lambda *x: losses.cispo(*x, bounds="upper"),
    "dppo tv": losses.dppo,
    "dppo kl": lambda *x: losses.dppo(*x, divergence="kl"),
    "clip_cov": losses.clip_cov,
    "kl_cov": losses.kl_cov,
}
AGGREGATES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "seq_mean_token_mean": {},
    "seq_mean_token_sum": {},
    "fixed": {"denominator": 2.0},
    "trajectory_mean": {"trajectory_index": torch.arange(32)},
}


def pull(
    estimator: Estimator = ESTIMATORS["grpo"],
    loss: Loss = losses.ppo,
    how: Any = "token_mean",
    *,
    kl: Any = None,
    coef: float = 0.01,
    steps: int = 60,
    **more: Any,
) -> float:
    """How probable the two good arms are after so many steps of two updates each."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.zeros(2, 2, requires_grad=True)
    reference = torch.log_softmax(theta.detach(), -1)
    optimizer = torch.optim.Adam([theta], lr=0.1)

    def chosen(logp: Tensor, arms: Tensor) -> Tensor:
        at = torch.full((32, 4), torch.nan)
        at[:, 1], at[:, 3] = logp[0][arms[:, 0]], logp[1][arms[:, 1]]
        return at

    for _ in range(steps):
        p = theta.detach().softmax(-1)
        arms = torch.multinomial(p, 32, replacement=True, generator=generator).T
        old = chosen(torch.log_softmax(theta.detach(), -1), arms)
        adv = estimator(arms.prod(1).float(), arms, old)
        adv = adv if adv.ndim == 2 else adv[:, None].expand(32, 4)
        for _ in range(2):
            now = chosen(torch.log_softmax(theta, -1), arms)
            per_token = loss(now, old, adv, MASK)
            if kl is not None:
                per_token = per_token + coef * losses.kl(now, chosen(reference, arms), kl, MASK)
            optimizer.zero_grad()
            losses.aggregate(per_token, MASK, how, **more).backward()
            optimizer.step()
    assert bool(theta.isfinite().all())
    return float(theta.detach().softmax(-1)[:, 1].prod())


def test_every_one_of_them_is_here() -> None:
    others = {"branch_weights", "whiten"}
    assert set(ESTIMATORS) == set(advantages.__all__) - others


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_learns(name: str) -> None:
    assert pull(ESTIMATORS[name]) > 0.9


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_learns(name: str) -> None:
    assert pull(loss=LOSSES[name]) > 0.9


@pytest.mark.parametrize("how", AGGREGATES)
def test_an_aggregation_learns(how: str) -> None:
    assert pull(how=how, **AGGREGATES[how]) > 0.9


@pytest.mark.parametrize("kind", ["abs", "k2", "k3", "k3+"])  # k1 belongs into the reward
def test_it_learns_under_a_kl_and_stays_under_a_strong_one(kind: str) -> None:
    assert pull(kl=kind) > 0.9
    assert pull(kl=kind, coef=10.0) < 0.4


def test_it_learns_with_a_kl_in_the_reward_and_stays_with_a_strong_one() -> None:
    def taxed(coef: float) -> Estimator:
        uniform = torch.full((32, 4), 0.5).log()
        return lambda r, _, logprobs: advantages.rloo(
            r - coef * losses.kl(logprobs, uniform, "k1", MASK).sum(1), GROUPS
        )

    assert pull(taxed(0.01)) > 0.9
    assert pull(taxed(10.0)) < 0.4


def test_the_other_way_round_it_unlearns() -> None:
    assert pull(lambda r, *_: -advantages.grpo(r, GROUPS)) < 0.1


def test_without_a_signal_nothing_moves() -> None:
    assert pull(lambda r, *_: advantages.grpo(torch.ones(32), GROUPS)) == pytest.approx(0.25)
