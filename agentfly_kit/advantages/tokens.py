"""Token-level estimators, which compute one advantage per token, usually from the reward-to-go and a baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentfly_kit.advantages.inputs import (
    GroupedRewards,
    Groups,
    Numbers,
    Observations,
    Singleton,
    Std,
    TokenRewards,
    as_bool_mask,
    as_floats,
    group_index,
    require_finite,
    whitened,
)
from agentfly_kit.advantages.outcomes import grpo
from agentfly_kit.errors import SettingsError, check_choice, check_shape


def _gae_recursion(
    reward: Tensor, value: Tensor, steps: Tensor, discount: Tensor, lam: float, last: Tensor
) -> Tensor:
    """Compute GAE at the tokens in the mask `steps`. `last` is the value after the last step."""
    adv = torch.zeros_like(reward)
    next_value, carry = last, torch.zeros_like(last)
    for t in range(reward.shape[1] - 1, -1, -1):
        d = discount[:, t]
        a = reward[:, t] + d * next_value - value[:, t] + d * lam * carry
        adv[:, t] = a
        carry = torch.where(steps[:, t], a, carry)
        next_value = torch.where(steps[:, t], value[:, t], next_value)
    return torch.where(steps, adv, 0.0)


def _discounts(steps: Tensor, gamma: float, over_gaps: bool, like: Tensor) -> Tensor:
    """Return the discount from each token to the next step: gamma, or gamma ** (distance in tokens) if `over_gaps`."""
    if not over_gaps:
        return torch.full_like(like, gamma)
    width = steps.shape[1]
    columns = torch.arange(width, device=steps.device)
    at_or_after = torch.where(steps, columns, width).flip(1).cummin(1).values.flip(1)
    after = torch.nn.functional.pad(at_or_after[:, 1:], (0, 1), value=width)
    # After the last step of a row, the next row or the bootstrap value counts as one token away.
    return like.new_tensor(gamma) ** torch.where(after < width, after - columns, 1)


def gae(
    token_rewards: Numbers,
    values: Numbers,
    mask: Any,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    turns: Any = None,
    bootstrap: Numbers | None = None,
    observations: Observations = "skip",
    discount_observations: bool = False,
    trajectory_index: Groups | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation. Return advantages (not whitened) and returns, both 0 where the mask is 0.

    Steps are action tokens or, with `turns`, whole turns. The reward of a turn is the sum of its token rewards, its
    value is the value at its first action token, and all its action tokens have the same advantage and return.

    observations="skip", as in verl, skips tokens with mask 0: the value after the last token of an action is the value
    at the next *action* token. "step", as in SkyRL, TRL PPO and torchtune, treats every token between the first and
    last action token of a row as a step, so the values of these tokens must be finite. discount_observations=True, as
    in slime, also skips tokens with mask 0, but discounts by gamma ** (distance in tokens).

    With `trajectory_index`, the rows of a trajectory, in the given order, form one episode: the value after the last
    action token of a row is the value at the first action token of the next row, even with observations="step". By
    default, every row is an episode of its own, with value 0 after the last action token unless `bootstrap` is set.

    Shapes:  token_rewards, values, mask (B rows, T tokens) or (T,); turns (B, T), turn ids, used only at action tokens;
             bootstrap (B,), the value of the state in which a row was truncated, or 0 for a row that ended (with
             trajectory_index, only the entry for a trajectory's last row is used); trajectory_index (B,).
    Units:   reward.
    Raises:  ValueError if a reward is infinite, a required value is not finite, or a turn id reappears after another
             turn. A NaN reward at an action token makes the trajectory unscored, with advantages of 0.
    Source:  arXiv 1506.02438, eq. 16; with `turns`, the same recursion over turns.
    """
    check_choice("observations", observations, Observations)
    if turns is not None and (observations == "step" or discount_observations):
        raise SettingsError(
            "with turns, observations must be 'skip' and discount_observations must be False, got "
            f"{observations!r} and {discount_observations!r}"
        )
    tok = TokenRewards.from_arrays(token_rewards, mask, trajectory_index)
    v = tok.align(values, "values")
    r = tok.reward.to(v.dtype)
    last = v.new_zeros(len(v))
    if bootstrap is not None:
        b = as_floats(bootstrap, v).reshape(-1)
        check_shape("bootstrap", b, last.shape)
        last = require_finite(b, tok.mask.any(1), "bootstrap", "(0 for a row that was not cut)")

    # Select the tokens that are steps of the recursion. By default, these are all action tokens.
    steps, why = tok.mask, "at every action token"
    if turns is not None:
        # Each turn is one step at its first action token. `first` maps all tokens of a turn to this token.
        steps, first = _turn_starts(tok, turns)
        r = torch.zeros_like(r).scatter_add(1, first, r)
        why = "at the first action token of every turn"
    elif observations == "step":
        # The steps are all tokens from the first to the last action token. Later tokens cannot affect any action.
        steps = (tok.mask.cumsum(1) > 0) & (tok.mask.flip(1).cumsum(1).flip(1) > 0)
        why = "between the first and last action token"
    v = require_finite(v, steps, "values", why)

    discount = _discounts(steps, gamma, discount_observations, v)  # the next row counts as one step away
    concat, last = tok.rows.concat, last[tok.rows.last_rows]
    adv = tok.rows.split(_gae_recursion(concat(r), concat(v), concat(steps), concat(discount), lam, last))
    returns = adv + v
    if turns is not None:
        adv, returns = adv.gather(1, first), returns.gather(1, first)
    return tok.out(adv), tok.out(returns)


def _turn_starts(tok: TokenRewards, turns: Any) -> tuple[Tensor, Tensor]:
    """Return a mask of the first action token of each turn, and the column at which the turn of each token starts."""
    ids = torch.atleast_2d(torch.as_tensor(turns)).to(tok.mask.device)
    check_shape("turns", ids, tok.mask.shape)
    # A turn starts at each action token whose turn id differs from that of the previous action token.
    columns = torch.arange(ids.shape[1], device=ids.device)
    actions = torch.where(tok.mask, columns, -1)
    before = torch.cat([torch.full_like(actions[:, :1], -1), actions[:, :-1]], 1).cummax(1).values
    start = tok.mask & ((before < 0) | (ids != ids.gather(1, before.clamp(min=0))))
    row, at = start.nonzero(as_tuple=True)
    seen: set[tuple[int, int]] = set()
    for b, t, turn in zip(row.tolist(), at.tolist(), ids[row, at].tolist(), strict=True):
        if (b, turn) in seen:
            raise ValueError(f"turns[{b}] must number turns in order, but turn {turn} reappears at token {t}")
        seen.add((b, turn))
    return start, torch.where(start, columns, 0).cummax(1).values


def _rewards_to_go(reward: Tensor, steps: Tensor, discount: Tensor) -> Tensor:
    zero = torch.zeros_like(reward)
    return _gae_recursion(reward, zero, steps, discount, 1.0, reward.new_zeros(len(reward)))


def reinforce_plus_plus(
    token_rewards: Numbers,
    mask: Any,
    *,
    gamma: float = 1.0,
    whiten: bool = True,
    discount_observations: bool = False,
    std: Std = "sample",
    eps: float = 1e-6,
    trajectory_index: Groups | None = None,
) -> Tensor:
    """Compute the discounted reward-to-go at each action token, whitened over the batch unless whiten=False.

    The reward-to-go includes rewards *after* observation tokens and, with `trajectory_index`, rewards in later rows of
    the trajectory. In verl and SkyRL, the sum ends at the next observation or at the end of the row, which penalizes
    the first turn of a trajectory that succeeds in its second turn.

    Shapes:  token_rewards, mask (B rows, T tokens) or (T,), trajectory_index (B,) -> shape of token_rewards.
    Units:   reward, or standard deviations over action tokens when whitened.
    Raises:  ValueError if a reward is infinite. A NaN reward at an action token makes the trajectory unscored: it is
             excluded from the mean and std, and its advantages are 0.
    Source:  REINFORCE++, arXiv 2501.03262; for its KL penalty, subtract the penalty from token_rewards.
    """
    tok = TokenRewards.from_arrays(token_rewards, mask, trajectory_index)
    concat = tok.rows.concat
    discount = _discounts(tok.mask, gamma, discount_observations, tok.reward)
    to_come = tok.rows.split(_rewards_to_go(concat(tok.reward), concat(tok.mask), concat(discount)))
    return tok.out(whitened(to_come, tok.mask, std, eps, "reinforce_plus_plus") if whiten else to_come)


def reinforce_plus_plus_baseline(
    token_rewards: Numbers,
    mask: Any,
    *,
    groups: Groups,
    whiten: bool = True,
    singleton: Singleton = "zero",
    std: Std = "sample",
    eps: float = 1e-6,
    trajectory_index: Groups | None = None,
) -> Tensor:
    """Subtract the group mean from each row's reward, assign the result to all action tokens, and whiten the batch.

    With `trajectory_index`, rewards are summed over all rows of a trajectory, which then counts once in the mean.

    Shapes:  token_rewards, mask (B rows, T tokens), groups, trajectory_index (B,) -> (B, T).
    Units:   reward, or standard deviations over action tokens when whitened.
    Raises:  ValueError if a reward is infinite. A NaN reward at an action token makes the trajectory unscored.
    Source:  REINFORCE++, arXiv 2501.03262, the variant with a group baseline and global normalization.
    """
    tok = TokenRewards.from_arrays(token_rewards, mask, trajectory_index)
    last_rows = tok.rows.last_rows
    total = tok.reward.new_zeros(len(last_rows)).index_add(0, tok.rows.index, tok.reward.sum(1))
    # A trajectory without scored action tokens does not count in the mean of its group.
    total = torch.where(tok.rows.any_in_trajectory(tok.mask.any(1))[last_rows], total, torch.nan)
    group = group_index(groups, len(tok.mask), tok.mask.device)[last_rows]
    per_trajectory = grpo(total, group, std=None, singleton=singleton)
    per_token = per_trajectory[tok.rows.index].unsqueeze(1).expand_as(tok.reward)
    return tok.out(whitened(per_token, tok.mask, std, eps, "reinforce_plus_plus_baseline") if whiten else per_token)


def optimal_token_baseline(
    token_rewards: Numbers,
    mask: Any,
    *,
    groups: Groups,
    logprobs: Numbers,
    sum_squared_probs: Numbers,
    singleton: Singleton = "zero",
    trajectory_index: Groups | None = None,
) -> Tensor:
    """Subtract a separate baseline for each token position from the reward-to-go.

    The baseline at a position is the weighted mean of the rewards-to-go of the group's trajectories at that position.
    The weight is the squared norm of the gradient with respect to all logits up to the position: the running sum over
    action tokens of 1 - 2 p(token) + sum p^2. Positions are counted in action tokens over all rows of a trajectory.
    Where only one trajectory reaches a position, the result is 0 or, with singleton="raw" as in verl, the reward-to-go.

    Shapes:  token_rewards, mask, logprobs, sum_squared_probs (B rows, T tokens), groups, trajectory_index (B,) ->
             (B, T).
    Units:   reward.
    Raises:  ValueError if a reward is infinite, or if another input is not finite at an action token.
    Source:  Optimal Token Baseline, arXiv 2602.07078, with its logit-gradient proxy.
    """
    tok = TokenRewards.from_arrays(token_rewards, mask, trajectory_index)
    lp = require_finite(tok.align(logprobs, "logprobs"), tok.mask, "logprobs", "at every action token")
    squares = tok.align(sum_squared_probs, "sum_squared_probs")
    squares = require_finite(squares, tok.mask, "sum_squared_probs", "at every action token")
    concat = tok.rows.concat
    steps = concat(tok.mask)
    energy = torch.where(steps, concat(1 - 2 * lp.exp() + squares), 0.0).clamp(min=0).cumsum(1)
    to_come = _rewards_to_go(concat(tok.reward.to(energy.dtype)), steps, torch.ones_like(energy))
    row, at = steps.nonzero(as_tuple=True)
    position = steps.cumsum(1)[row, at]
    group = group_index(groups, len(tok.mask), energy.device)[tok.rows.last_rows][row]
    # Treat each combination of group and position as a separate group, so that every position has its own baseline.
    key = torch.unique(torch.stack([group, position], 1), dim=0, return_inverse=True)[1]
    g = GroupedRewards(to_come[row, at], torch.ones_like(row, dtype=torch.bool), key)
    out = torch.zeros_like(energy)
    out[row, at] = g.singleton(g.minus_weighted_mean(energy[row, at]), singleton)
    return tok.out(tok.rows.split(out))


def distillation(teacher_logprobs: Numbers, logprobs: Numbers, mask: Any) -> Tensor:
    """Compute advantages for on-policy distillation: teacher_logprobs - logprobs for each sampled token.

    In expectation over the token, this advantage is minus the reverse KL, KL(policy || teacher), and the gradient of
    the `reinforce` loss is the gradient of that KL. The KL at later tokens is not credited to earlier ones (discount
    0). Add the result to other advantages, or use it alone.

    Shapes:  teacher_logprobs, logprobs, mask (B rows, T tokens) or (T,) -> (B, T) or (T,), 0 where the mask is 0.
    Units:   nats.
    Raises:  ValueError if a logprob at an action token is not finite.
    Source:  On-Policy Distillation of Language Models, arXiv 2306.13649, with the reverse KL; the per-token policy
             gradient is that of MiniLLM, arXiv 2306.08543, without its terms for later tokens.
    """
    lp = as_floats(logprobs)
    m = as_bool_mask(mask, lp)
    teacher = as_floats(teacher_logprobs, lp)
    check_shape("teacher_logprobs", teacher, lp.shape)
    teacher = require_finite(teacher, m, "teacher_logprobs", "at every action token")
    return teacher - require_finite(lp, m, "logprobs", "at every action token")


def whiten(advantages: Numbers, mask: Any, *, std: Std = "sample", eps: float = 1e-6) -> Tensor:
    """Shift and scale advantages to mean 0 and std 1 over all action tokens. The result is 0 where the mask is 0.

    Whiten a whole minibatch in one call, as the result depends on all of its tokens. std=None only subtracts the mean.

    Shapes:  advantages, mask (B rows, T tokens) -> (B, T).
    Units:   standard deviations over action tokens.
    Raises:  ValueError if an advantage at an action token is not finite. Without action tokens, warns and returns
             zeros; if all advantages are equal, returns exact zeros.
    Source:  common in PPO code; studied in arXiv 2006.05990 ("per minibatch advantage normalization").
    """
    a = as_floats(advantages)
    m = as_bool_mask(mask, a)
    return whitened(require_finite(a, m, "advantages", "at every action token"), m, std, eps, "whiten")
