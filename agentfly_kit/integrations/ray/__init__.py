"""Rollouts and updates on a Ray cluster: `af.ray.workers` and `af.ray.learner`."""

from agentfly_kit.integrations.ray.learner import Learner, learner
from agentfly_kit.integrations.ray.workers import Workers, workers

__all__ = ["Learner", "Workers", "learner", "workers"]
