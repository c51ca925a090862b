"""One PPO step on a batch. `step` contains the algorithm, the other modules its components."""

from agentfly_kit.ppo.distributed import gather
from agentfly_kit.ppo.kl_reward import shaped_rewards
from agentfly_kit.ppo.objective import Aggregate, LossName, TokenLoss, aggregate_options
from agentfly_kit.ppo.old_logprobs import Correction
from agentfly_kit.ppo.optimizer import adamw
from agentfly_kit.ppo.step import ppo_step, ppo_step_async

__all__ = [
    "Aggregate",
    "Correction",
    "LossName",
    "TokenLoss",
    "adamw",
    "aggregate_options",
    "gather",
    "ppo_step",
    "ppo_step_async",
    "shaped_rewards",
]
