"""Results of training steps (`TrainStep`), records of their metrics, and warnings based on these records."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentfly_kit._display import Displayable
from agentfly_kit.agent.rollout import Rollout, warn_about_success
from agentfly_kit.ppo.stats import Stats
from agentfly_kit.trainer.config import TrainConfig

if TYPE_CHECKING:
    from agentfly_kit.evaluation import Evaluation

# Names of the update statistics that are recorded if they are finite.
_RECORDED_STATS = (
    "loss", "policy_loss", "value_loss", "approx_kl", "clip_fraction", "entropy", "grad_norm", "lr", "updates",
    "explained_variance", "kl_reference", "effective_sample_size", "ratio_max", "sampler_gap", "dropped_groups",
    "advantage_mean", "reward_std",
)  # fmt: skip
# Maximum numbers of drop reasons and metrics in a record. A filter might return a different reason for each chain.
_MAX_REASONS, _MAX_METRICS = 16, 32
# Number of consecutive steps with a low reward that count as a collapse.
_LOW_STEPS = 3


@dataclass(frozen=True)
class TrainStep(Displayable):
    """Result of one iteration.

    Attributes:
        step: Number of the iteration, starting at 1.
        record: Metrics of the iteration, as written to the folder of the run.
        stats: Statistics of the update; None if there was nothing to train on or if the step was replayed.
        rollout: Chains of the iteration; None if the step was replayed.
        evaluation: Evaluation after the iteration, or None.
        replayed: Whether the step was read from the folder of the run instead of being executed.
    """

    step: int
    record: dict[str, float] = field(repr=False)
    stats: Stats | None = field(default=None, repr=False)
    rollout: Rollout | None = field(default=None, repr=False)
    evaluation: Evaluation | None = None
    replayed: bool = False

    @property
    def success(self) -> float:
        """Success rate of the chains of this step; NaN if no chain was scored."""
        return self.record.get("success", math.nan)

    def __repr__(self) -> str:
        shown = ("success", "reward", "approx_kl", "eval_success")
        numbers = ", ".join(f"{k} {self.record[k]:.3f}" for k in shown if k in self.record)
        return f"TrainStep({self.step}: {numbers}{', replayed' if self.replayed else ''})"


def make_record(
    step: int,
    version: int,
    rollout: Rollout,
    stats: Stats | None,
    evaluation: Evaluation | None,
    config: TrainConfig,
) -> dict[str, float]:
    """Create the record of an iteration. Statistics of the update that are not finite are omitted.

    `success_se` is the standard error of the success rate over groups, but at least the standard error for independent
    chains. It is omitted if tasks are sorted by difficulty, because then steps cannot be compared. `equal_groups` is
    the fraction of groups whose chains have equal rewards.
    """
    record: dict[str, float] = {"step": step}
    record |= {k: v for k, v in rollout.summary().items() if k != "seconds"}
    groups = [kept for group in rollout.groups if (kept := [t for t in group if t.reward is not None])]
    if len(groups) > 1 and not config.difficulty:
        rates = [statistics.fmean(bool(t.success) for t in group) for group in groups]
        error = math.sqrt(record["success"] * (1 - record["success"]) / sum(map(len, groups)))
        record["success_se"] = max(error, statistics.stdev(rates) / math.sqrt(len(rates)))
    if compared := [len({t.reward for t in group}) for group in groups if len(group) > 1]:
        record["equal_groups"] = compared.count(1) / len(compared)
    numbers = {"updates": 0} if stats is None else stats.scalars()
    record |= {k: numbers[k] for k in _RECORDED_STATS if k in numbers and math.isfinite(numbers[k])}
    record["version"] = version
    reasons = [t.dropped for t in rollout.trajectories if t.dropped is not None]
    record["dropped"] = len(reasons)
    record |= {f"dropped: {reason}": reasons.count(reason) for reason in sorted(set(reasons))[:_MAX_REASONS]}
    scored = [t.metrics for t in rollout.trajectories if t.reward is not None]
    for name in sorted({name for metrics in scored for name in metrics})[:_MAX_METRICS]:
        record[f"metric_{name}"] = statistics.fmean(metrics[name] for metrics in scored if name in metrics)
    if evaluation is not None:
        metrics = sorted(evaluation.metrics.items())[:_MAX_METRICS]
        record |= {f"eval_metric_{name}": value for name, value in metrics}
        record |= {f"eval_{name}": getattr(evaluation, name) for name in ("success", "low", "high")}
    return record


def warn_about_step(
    record: dict[str, float], rollout: Rollout, earlier: list[dict[str, float]], config: TrainConfig
) -> None:
    """Warn if no chain succeeded in the first five steps, if many are unscored, or if the mean reward collapsed."""
    warn_about_success([*earlier, record])
    if record.get("unscored", 0.0) > 0.05 and config.advantage != "none":
        why = next((str(t.error) for t in rollout.trajectories if t.error), "")
        warnings.warn(
            f"step {record['step']}: {record['unscored']:.0%} of the chains were unscored. {why}", stacklevel=3
        )
    # If the difficulty increases, a decreasing reward does not indicate a collapse.
    if not config.difficulty and (collapse := detect_collapse([*earlier, record], config.tasks_per_step)):
        warnings.warn(
            f"step {record['step']}: {collapse}. Try a smaller lr than {config.lr:g} or a lower max_kl (now "
            f"{config.max_kl}), in a new run that starts from good weights: run.policy(step=...) "
            "loads kept weights",
            stacklevel=3,
        )


def detect_collapse(records: Sequence[dict[str, float]], groups: int) -> str | None:
    """Return a description if the reward collapsed at the last record, otherwise None.

    The reward has collapsed if its mean stays below half of the best value for 3 consecutive steps. The best value is
    the maximum over steps of a lower confidence bound, mean reward - 2 reward_std / sqrt(groups).
    """
    best, threshold, low = "", 0.0, 0
    for record in records:
        if "reward" not in record:
            continue
        reward, std = record["reward"], record.get("reward_std", math.inf)
        if (half := (reward - 2 * std / math.sqrt(groups)) / 2) > threshold:
            best, threshold = f"{reward:.3g} at step {record['step']:.0f}", half
        low = low + 1 if best and reward < threshold else 0
        if low == _LOW_STEPS:
            text = f"the mean reward stayed below half of its best value for {_LOW_STEPS} steps: {reward:.3g},"
            return f"{text} from {best}" if record is records[-1] else None
    return None
