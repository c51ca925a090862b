"""One PPO step on a batch. `step` contains the algorithm, `config` its settings, `inputs` the values computed first."""

from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.ppo.distributed import gather
from agentfly_kit.ppo.inputs import shaped_rewards
from agentfly_kit.ppo.step import adamw, ppo_step, ppo_step_async

__all__ = ["PPOConfig", "adamw", "gather", "ppo_step", "ppo_step_async", "shaped_rewards"]
