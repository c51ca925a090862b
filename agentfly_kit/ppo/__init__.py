"""Training steps on a batch: PPO (`step`) and imitation of recorded actions (`imitation`)."""

from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.ppo.distributed import gather
from agentfly_kit.ppo.imitation import imitate, imitation_step
from agentfly_kit.ppo.scoring import shaped_rewards
from agentfly_kit.ppo.step import adamw, ppo_step, ppo_step_async

__all__ = ["PPOConfig", "adamw", "gather", "imitate", "imitation_step", "ppo_step", "ppo_step_async", "shaped_rewards"]
