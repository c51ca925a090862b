"""Rules that determine whether a chain succeeds, and statistics of success rates."""

from __future__ import annotations

import bisect
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from agentfly_kit.errors import RewardError, SettingsError
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Failure

# A minimum reward, the name of a metric, or a function of the scored trajectory; see `Agent(success=)`.
SuccessRule: TypeAlias = float | str | Callable[[Trajectory], bool] | None


def check_success_rule(rule: SuccessRule) -> None:
    """Raise SettingsError if `rule` is not a valid success rule."""
    finite = isinstance(rule, int | float) and not isinstance(rule, bool) and math.isfinite(rule)
    function = callable(rule) and not inspect.isclass(rule) and not inspect.iscoroutinefunction(rule)
    if not (rule is None or finite or function or (isinstance(rule, str) and rule)):
        raise SettingsError(
            "success must be a finite number (threshold of the reward), the name of a reward or metric, a synchronous "
            f"function of the trajectory, or None, got {rule!r}"
        )


def record_success(trajectory: Trajectory, rule: SuccessRule) -> Trajectory:
    """Record in `metrics["success"]` whether a scored trajectory succeeded. If `rule` is None, return the trajectory
    unchanged.

    If the rule cannot be applied, the trajectory becomes unscored and its `error` is set.
    """
    if rule is None or trajectory.reward is None:
        return trajectory
    try:
        success = _succeeded(trajectory, rule)
    except Exception as error:
        return trajectory.replace(reward=None, error=trajectory.error or Failure.from_exception("success", error))
    return trajectory.replace(metrics={**trajectory.metrics, "success": float(success)})


def _succeeded(trajectory: Trajectory, rule: float | str | Callable[[Trajectory], bool]) -> bool:
    assert trajectory.reward is not None
    if isinstance(rule, str):
        if rule not in trajectory.metrics:
            raise RewardError(
                f"success={rule!r} must name a metric that the rewards return for every chain, got "
                f"{', '.join(trajectory.metrics) or 'no metrics'}"
            )
        return trajectory.metrics[rule] >= 1
    if not callable(rule):
        return trajectory.reward >= rule
    value = rule(trajectory)
    if not isinstance(value, bool | np.bool_):
        raise RewardError(f"success must return True or False, got {value!r}, a {type(value).__qualname__}")
    return bool(value)


# --- statistics ----------------------------------------------------------------------------------


def success_interval(outcomes: Sequence[Sequence[bool]], level: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval for the success rate over tasks.

    With one sample per task, this is the Clopper-Pearson interval. With several samples per task, the interval is
    computed for an effective sample size: the number of samples divided by the design effect (estimated from the
    variance between tasks) and corrected for the degrees of freedom. It is at least the number of tasks and at most the
    number of samples, so the interval has a positive width even if all chains agree.

    Args:
        outcomes: success of each scored chain, for each task. There must be at least one task, and at least one chain
            per task.
        level: confidence level.

    Returns:
        The lower and upper bound, in [0, 1].

    Source:  Clopper and Pearson, Biometrika 26 (1934); Korn and Graubard, Survey Methodology 24 (1998).
    """
    rates = [sum(of_task) / len(of_task) for of_task in outcomes]
    tasks, samples = len(rates), sum(map(len, outcomes))
    rate = math.fsum(rates) / tasks
    size = float(tasks)
    if samples > tasks > 1 and 0 < rate < 1:
        variance = math.fsum((r - rate) ** 2 for r in rates) / (tasks - 1)
        size = samples
        if variance > 0:
            size = rate * (1 - rate) / (samples - 1) * samples * tasks / variance
            size *= (_t_quantile(level, samples - 1) / _t_quantile(level, tasks - 1)) ** 2
        size = min(max(size, tasks), samples)
    successes, tail = rate * size, (1 - level) / 2
    low = _beta_quantile(tail, successes, size - successes + 1) if rate > 0 else 0.0
    return low, _beta_quantile(1 - tail, successes + 1, size - successes) if rate < 1 else 1.0


def sign_flip_test(differences: Sequence[int]) -> float:
    """Return the exact two-sided p-value for the null hypothesis that each difference is as likely as its negative.

    If all differences are -1, 0 or 1, this is McNemar's exact test.

    Args:
        differences: number of successes in one rollout minus the number in the other, for each task.

    Source:  Fisher, The Design of Experiments (1935).
    """
    total = abs(sum(differences))
    # probability[i] is the probability that the differences, with random signs, sum to i - reach.
    probability, reach = np.ones(1), 0
    for size in (abs(d) for d in differences if d):
        gap = np.zeros(2 * size)
        probability = (np.concatenate([probability, gap]) + np.concatenate([gap, probability])) / 2
        reach += size
    return float(min(1.0, probability[np.abs(np.arange(-reach, reach + 1)) >= total].sum()))


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k chains of a task succeeds.

    Source:  Chen et al., arXiv 2107.03374.
    """
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def _beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), using the continued fraction DLMF 8.17.22."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the continued fraction converges quickly below this point
        return 1 - _beta_cdf(1 - x, b, a)
    fraction = 1.0
    for m in range(20 + 2 * math.isqrt(int(a + b)), 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + even / (1 + odd / fraction)
    fraction = 1 - (a + b) * x / ((a + 1) * fraction)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / (a * fraction)


def _beta_quantile(probability: float, a: float, b: float) -> float:
    steps = 2**45
    return bisect.bisect_left(range(steps), probability, key=lambda i: _beta_cdf(i / steps, a, b)) / steps


def _t_quantile(level: float, degrees: int) -> float:
    """Return t such that P(|T| < t) = level for Student's t distribution."""
    x = _beta_quantile(1 - level, degrees / 2, 0.5)
    return math.sqrt(degrees * (1 - x) / x)
