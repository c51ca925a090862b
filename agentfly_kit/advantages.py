"""Advantages: rewards (and values) in, one number a trajectory or a token out.

Pure functions: no model, no config object, no gradient. They do not know what a trajectory, a tool or a tokenizer is,
and not what the loss does with the result. Lists, arrays and tensors of any float type are taken; half precision is
computed and returned in float32.

What all of them keep to: a reward that is NaN (or None in a list) is unscored, is left out of every mean and gets
advantage 0; an infinite one raises. Whatever stands where the mask is 0 is never read, so that inserting observation
tokens anywhere changes no action's advantage. Axis letters: N trajectories (or rows), K rewards, B rows, T tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.errors import AlignmentError, SettingsError

Numbers: TypeAlias = Sequence[Any] | Tensor
Groups: TypeAlias = Sequence[Hashable] | Tensor
Std: TypeAlias = Literal["sample", "population"] | None
Singleton: TypeAlias = Literal["zero", "raw"]
Observations: TypeAlias = Literal["skip", "step"]

__all__ = [
    "dr_grpo",
    "gae",
    "grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "whiten",
]


# --- what comes in -------------------------------------------------------------------------------


def _none_to_nan(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_none_to_nan(v) for v in x]
    return float("nan") if x is None else x


def _tensor(x: Any, name: str, like: Tensor | None = None) -> Tensor:
    """A detached float tensor, float32 or wider: sums in half precision lose whole rewards."""
    if isinstance(x, Tensor):
        out = x.detach()
    else:
        values = x.tolist() if hasattr(x, "tolist") else x  # numpy, pandas; object columns may hold None
        try:
            out = torch.tensor(_none_to_nan(values), dtype=torch.float64)
        except (TypeError, ValueError) as e:
            raise AlignmentError(
                f"{name} cannot become a tensor ({e}); give numbers, in rows of equal length"
            ) from None
        out = out.to(getattr(torch, str(getattr(x, "dtype", "")), torch.float32))
    if not out.dtype.is_floating_point or out.dtype.itemsize < 4:
        out = out.to(torch.float32)
    return out if like is None else out.to(device=like.device, dtype=torch.promote_types(out.dtype, like.dtype))


def _bool(mask: Any, like: Tensor, name: str = "mask") -> Tensor:
    m = mask.detach() if isinstance(mask, Tensor) else torch.as_tensor(mask)
    if m.shape != like.shape:
        raise AlignmentError(f"{name} has shape {tuple(m.shape)}, the rewards {tuple(like.shape)}; give equal shapes")
    return m.to(device=like.device, dtype=torch.bool)


def _no_inf(x: Tensor, name: str) -> None:
    if bool(torch.isinf(x).any()):
        where = torch.isinf(x).nonzero()[0].tolist()
        raise ValueError(f"{name}{where} is infinite; give a finite number, or NaN for unscored")


def _choose(name: str, given: object, wanted: tuple[object, ...]) -> None:
    if given not in wanted:
        raise SettingsError(f"{name}={given!r}; wanted one of {', '.join(map(repr, wanted))}")


def _group_index(groups: Groups, n: int, device: torch.device) -> Tensor:
    """(N,) group of each row as 0, 1, 2, ...; ids may be ints, strings or anything hashable."""
    if isinstance(groups, str):
        raise AlignmentError(f"groups={groups!r} is one string; give a list with a group id for each of {n} rows")
    if isinstance(groups, Tensor):
        groups = groups.tolist()
    seen: dict[Hashable, int] = {}
    index = [seen.setdefault(g, len(seen)) for g in groups]
    if len(index) != n:
        raise AlignmentError(f"{len(index)} group ids for {n} rewards; give one group id for each reward")
    return torch.tensor(index, dtype=torch.long, device=device)


@dataclass(frozen=True)
class _Grouped:
    """Rewards with their groups; every method gives each row a number of its own group's scored members."""

    reward: Tensor  # (N,), 0 where unscored
    scored: Tensor  # (N,) bool
    index: Tensor  # (N,)

    @classmethod
    def of(cls, rewards: Numbers, groups: Groups) -> _Grouped:
        r = _tensor(rewards, "rewards")
        if r.ndim != 1:
            raise AlignmentError(f"rewards has shape {tuple(r.shape)}; wanted (N,), one number a trajectory")
        _no_inf(r, "rewards")
        scored = ~torch.isnan(r)
        return cls(torch.where(scored, r, 0.0), scored, _group_index(groups, len(r), r.device))

    def _slots(self) -> int:
        return int(self.index.max()) + 1 if self.index.numel() else 0

    def total(self, x: Tensor) -> Tensor:
        x = torch.where(self.scored, x, 0.0)
        return x.new_zeros(self._slots()).index_add(0, self.index, x)[self.index]

    @property
    def count(self) -> Tensor:
        return self.total(self.scored.to(self.reward.dtype))

    def mean(self, x: Tensor) -> Tensor:
        return self.total(x) / self.count.clamp(min=1)

    def largest(self, x: Tensor) -> Tensor:
        x = torch.where(self.scored, x, -torch.inf)
        top = x.new_full((self._slots(),), -torch.inf).scatter_reduce(0, self.index, x, "amax")
        return top[self.index]

    def centred(self) -> Tensor:
        """Reward minus group mean; exactly 0 where a group's rewards are all equal.

        Without this rule three rewards of 0.1 leave a residue of 1e-9, and dividing it by a std of the same size makes
        an advantage out of rounding.
        """
        flat = self.largest(self.reward) == -self.largest(-self.reward)
        return torch.where(flat | ~self.scored, 0.0, self.reward - self.mean(self.reward))

    def std(self, kind: Std, eps: float) -> Tensor:
        """Std + eps; 1 for `kind=None`."""
        if kind is None:
            return torch.ones_like(self.reward)
        n = self.count - 1 if kind == "sample" else self.count
        variance = self.total(self.centred().square()) / n.clamp(min=1)
        return torch.sqrt(variance) + eps

    def singleton(self, advantages: Tensor, rule: Singleton) -> Tensor:
        """The advantage of a row alone in its group: 0, or its own reward."""
        alone = (self.count == 1) & self.scored
        return torch.where(alone, self.reward if rule == "raw" else 0.0, advantages)


# --- one advantage a trajectory ------------------------------------------------------------------


def grpo(
    rewards: Numbers, groups: Groups, *, std: Std = "sample", singleton: Singleton = "zero", eps: float = 1e-6
) -> Tensor:
    """Advantage of each trajectory against its own group: (r - mean) / (std + eps).

    Shapes:  rewards (N,), groups (N,) ints or strings -> (N,).
    Units:   reward in; group standard deviations out (reward, with std=None).
    Raises:  ValueError if a reward is infinite. NaN is unscored: left out, advantage 0.
    Source:  DeepSeekMath, arXiv 2402.03300, 4.1.2. It does not say which std: see `std`. Nor what a group of one gets:
             see `singleton`. A group whose rewards are all equal gives exactly 0.
    """
    _choose("std", std, ("sample", "population", None))
    _choose("singleton", singleton, ("zero", "raw"))
    g = _Grouped.of(rewards, groups)
    return g.singleton(g.centred() / g.std(std, eps), singleton)


def dr_grpo(rewards: Numbers, groups: Groups, *, singleton: Singleton = "zero") -> Tensor:
    """Reward minus group mean, not divided by a std, so that easy and hard tasks keep their own weight.

    Shapes:  rewards (N,), groups (N,) -> (N,).
    Units:   reward.
    Raises:  ValueError if a reward is infinite. NaN is unscored.
    Source:  Understanding R1-Zero-Like Training, arXiv 2503.20783, 3.2. Its other half is the aggregation "fixed".
    """
    return grpo(rewards, groups, std=None, singleton=singleton)


def rloo(rewards: Numbers, groups: Groups, *, singleton: Singleton = "zero") -> Tensor:
    """Reward minus the mean reward of the *other* trajectories of its group.

    Shapes:  rewards (N,), groups (N,) -> (N,).
    Units:   reward.
    Raises:  ValueError if a reward is infinite. NaN is unscored.
    Source:  Back to Basics, arXiv 2402.14740, 3.3. A trajectory alone in its group has no others: see `singleton`.
    """
    _choose("singleton", singleton, ("zero", "raw"))
    g = _Grouped.of(rewards, groups)
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1), which keeps a flat group at exactly 0.
    return g.singleton(g.centred() * g.count / (g.count - 1).clamp(min=1), singleton)


# --- one advantage a token -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Tokens:
    """Token rewards with their mask: rewards are 0 and the mask is False on rows that are not scored."""

    reward: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool
    flat: bool  # given as (T,)

    @classmethod
    def of(cls, token_rewards: Numbers, mask: Any) -> _Tokens:
        r = _tensor(token_rewards, "token_rewards")
        if r.ndim not in (1, 2):
            raise AlignmentError(f"token_rewards has shape {tuple(r.shape)}; wanted (B, T), or (T,) for one row")
        m = _bool(mask, r)
        flat = r.ndim == 1
        if flat:
            r, m = r.unsqueeze(0), m.unsqueeze(0)
        r = torch.where(m, r, 0.0)
        _no_inf(r, "token_rewards")
        scored = ~torch.isnan(r).any(1, keepdim=True)
        return cls(torch.where(scored, r, 0.0), m & scored, flat)

    def align(self, x: Any, name: str) -> Tensor:
        given = _tensor(x, name, self.reward)
        if self.flat and given.ndim == 1:
            given = given.unsqueeze(0)
        if given.shape != self.reward.shape:
            raise AlignmentError(f"{name} has shape {tuple(given.shape)}; wanted {tuple(self.reward.shape)}")
        return given

    def out(self, x: Tensor) -> Tensor:
        x = torch.where(self.mask, x, 0.0)
        return x.squeeze(0) if self.flat else x


def _finite(x: Tensor, where: Tensor, name: str, why: str) -> Tensor:
    """x, 0 where it is not needed; an error names the first place that is needed and not finite."""
    bad = where & ~torch.isfinite(x)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{place} is {x[tuple(place)].item()}; wanted a finite number {why}")
    return torch.where(where, x, 0.0)


def _backward(reward: Tensor, value: Tensor, steps: Tensor, discount: Tensor, lam: float, last: Tensor) -> Tensor:
    """The GAE recursion over the positions where `steps` is true; all others are stepped over.

    discount (B, T) is applied between a step and the step after it; last (B,) is the value after the last step.
    """
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
    """gamma, or gamma ** (distance to the next step) when observation tokens are discounted too."""
    if not over_gaps or gamma == 1.0:
        return torch.full_like(like, gamma)
    out = torch.full_like(like, gamma)
    gap = torch.ones_like(like[:, 0])  # after the last step: one step to the end
    for t in range(like.shape[1] - 1, -1, -1):
        out[:, t] = gamma**gap
        gap = torch.where(steps[:, t], 1.0, gap + 1.0)
    # Positions after the last step must not lengthen its gap: they are padding, or nothing is sampled after them.
    after_last = steps.flip(1).cumsum(1).flip(1) == 1
    return torch.where(after_last, gamma, out)


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
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; raw (advantages, returns), 0 where masked, not whitened.

    A step is an action token or, with `turns`, a whole turn: its reward is the sum of its token rewards, its value is
    the one at its first action token, and all its action tokens get its advantage and return.

    observations="skip" (verl) steps over tokens with mask 0: the value after the last token of an action is the value
    of the next *action* token. "step" (TRL PPO, torchtune) makes an ordinary time step, discounted and read by the
    critic, of every token between a row's first and last action token: values must then be finite there too.
    discount_observations=True (slime) keeps skipping, but discounts by the distance in tokens.

    Shapes:  token_rewards, values, mask (B, T) or (T,); turns (B, T) ids, read at action tokens; bootstrap (B,), the
             value of the state in which a row was cut, 0 for a row that ended by itself.
    Units:   reward.
    Raises:  ValueError for an infinite reward, a value that is needed and not finite, a turn id that comes back after
             another. A row with a NaN reward at an action token is unscored: all 0.
    Source:  arXiv 1506.02438, eq. 16; turns: the same recursion with a turn for a step.
    """
    _choose("observations", observations, ("skip", "step"))
    tok = _Tokens.of(token_rewards, mask)
    v = tok.align(values, "values")
    r = tok.reward.to(v.dtype)
    last = torch.zeros_like(v[:, 0]) if v.shape[1] else v.new_zeros(v.shape[0])
    if bootstrap is not None:
        b = _tensor(bootstrap, "bootstrap", v).reshape(-1)
        if b.shape != last.shape:
            raise AlignmentError(f"bootstrap has shape {tuple(b.shape)}; wanted ({len(last)},), one value a row")
        last = _finite(b, tok.mask.any(1), "bootstrap", "(0 for a row that was not cut)")

    if turns is not None:
        if observations == "step" or discount_observations:
            raise SettingsError(
                "a turn is one step: with turns=, leave observations='skip', discount_observations=False"
            )
        return _turn_gae(tok, r, v, turns, gamma, lam, last)

    steps = tok.mask
    if observations == "step":
        # Between the first and the last action token. What comes after is padding or was never acted upon.
        steps = (tok.mask.cumsum(1) > 0) & (tok.mask.flip(1).cumsum(1).flip(1) > 0)
    why = "at every action token" if observations == "skip" else "between the first and last action token"
    v = _finite(v, steps, "values", why)
    adv = _backward(r, v, steps, _discounts(steps, gamma, discount_observations, v), lam, last)
    return tok.out(adv), tok.out(adv + v)


def _turn_gae(
    tok: _Tokens, r: Tensor, v: Tensor, turns: Any, gamma: float, lam: float, last: Tensor
) -> tuple[Tensor, Tensor]:
    ids = turns.detach() if isinstance(turns, Tensor) else torch.as_tensor(turns)
    ids = ids.unsqueeze(0) if tok.flat and ids.ndim == 1 else ids
    if ids.shape != r.shape:
        raise AlignmentError(f"turns has shape {tuple(ids.shape)}; wanted {tuple(r.shape)}")
    start = torch.zeros_like(tok.mask)
    slot = torch.zeros_like(tok.mask, dtype=torch.long)
    for b in range(r.shape[0]):
        seen: list[int] = []
        for t in tok.mask[b].nonzero().flatten().tolist():
            turn = int(ids[b, t])
            if not seen or seen[-1] != turn:
                if turn in seen:
                    raise ValueError(f"turns[{b}] comes back to turn {turn} at token {t}; number turns in order")
                seen.append(turn)
                start[b, t] = True
            slot[b, t] = len(seen) - 1
    width = int(slot.max()) + 1 if slot.numel() else 0
    v = _finite(v, start, "values", "at the first action token of every turn")
    empty = r.new_zeros(r.shape[0], width)
    by_turn_r = empty.scatter_add(1, slot, r)
    by_turn_v = empty.scatter_add(1, slot, v)  # one value a turn: v is 0 off the starts
    exists = empty.scatter_add(1, slot, start.to(r.dtype)) > 0
    adv = _backward(by_turn_r, by_turn_v, exists, torch.full_like(empty, gamma), lam, last)
    return tok.out(adv.gather(1, slot)), tok.out((adv + by_turn_v).gather(1, slot))


def _whiten(x: Tensor, mask: Tensor, std: Std, eps: float, what: str) -> Tensor:
    n = mask.sum()
    if int(n) == 0:
        warnings.warn(
            f"{what}: no scored action token to whiten over; all advantages are 0", RuntimeWarning, stacklevel=3
        )
        return torch.zeros_like(x)
    kept = x[mask]
    if bool((kept == kept[0]).all()):
        return torch.zeros_like(x)  # as in a flat group: do not divide rounding by rounding
    mean = kept.mean()
    scale = 1.0 if std is None else kept.std(unbiased=std == "sample") + eps
    return torch.where(mask, (torch.where(mask, x, 0.0) - mean) / scale, 0.0)


def whiten(advantages: Numbers, mask: Any, *, std: Std = "sample", eps: float = 1e-6) -> Tensor:
    """Shift and scale to mean 0 and std 1 over all action tokens of the batch; 0 where masked.

    Whiten the whole minibatch at once: the result depends on what is in it. std=None only shifts.

    Shapes:  advantages, mask (B, T) -> (B, T).
    Units:   standard deviations over action tokens.
    Raises:  ValueError if an advantage at an action token is not finite. No action token at all: zeros and a warning.
             Equal advantages everywhere: exactly 0.
    Source:  the "advantage normalization" of arXiv 2005.12729, 3, and of most PPO code.
    """
    _choose("std", std, ("sample", "population", None))
    a = _tensor(advantages, "advantages")
    m = _bool(mask, a)
    return _whiten(_finite(a, m, "advantages", "at every action token"), m, std, eps, "whiten")


def reinforce_plus_plus(
    token_rewards: Numbers,
    mask: Any,
    *,
    gamma: float = 1.0,
    whiten: bool = True,
    discount_observations: bool = False,
    std: Std = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """Discounted reward still to come at each action token, whitened over the batch.

    The return is carried *through* observation tokens: a frame that restarts it there punishes the first turn of a
    rollout that succeeded in its second. whiten=False gives the bare reward to come.

    Shapes:  token_rewards, mask (B, T) or (T,) -> the same.
    Units:   reward, or standard deviations over action tokens when whitened.
    Raises:  ValueError if a reward at an action token is infinite. A row with a NaN one is unscored: left out of the
             mean and std, all 0.
    Source:  REINFORCE++, arXiv 2501.03262, 3; its KL penalty belongs in token_rewards.
    """
    _choose("std", std, ("sample", "population", None))
    tok = _Tokens.of(token_rewards, mask)
    zero = torch.zeros_like(tok.reward)
    discount = _discounts(tok.mask, gamma, discount_observations, zero)
    to_come = _backward(tok.reward, zero, tok.mask, discount, 1.0, zero[:, :1].sum(1))
    return tok.out(_whiten(to_come, tok.mask, std, eps, "reinforce_plus_plus") if whiten else to_come)


def reinforce_plus_plus_baseline(
    token_rewards: Numbers,
    mask: Any,
    *,
    groups: Groups,
    whiten: bool = True,
    singleton: Singleton = "zero",
    std: Std = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """Reward of the row minus the mean of its group, on every action token, whitened over the batch.

    Shapes:  token_rewards, mask (B, T), groups (B,) -> (B, T).
    Units:   as in `reinforce_plus_plus`.
    Raises:  ValueError if a reward at an action token is infinite. A row with a NaN one is unscored.
    Source:  REINFORCE++, arXiv 2501.03262, the variant with a group baseline and global normalisation.
    """
    _choose("std", std, ("sample", "population", None))
    _choose("singleton", singleton, ("zero", "raw"))
    tok = _Tokens.of(token_rewards, mask)
    # A row without any scored action token has no say in its group's mean.
    row = torch.where(tok.mask.any(1), tok.reward.sum(1), torch.nan)
    per_token = grpo(row, groups, std=None, singleton=singleton).unsqueeze(1).expand_as(tok.reward)
    return tok.out(_whiten(per_token, tok.mask, std, eps, "reinforce_plus_plus_baseline") if whiten else per_token)
