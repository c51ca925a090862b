"""Training: the loop and what it is made of, a noun a file. `loop` is where to begin."""

from agentfly_kit.trainer.config import TrainConfig
from agentfly_kit.trainer.identity import fingerprint
from agentfly_kit.trainer.loop import TrainRun, TrainStep, train

__all__ = ["TrainConfig", "TrainRun", "TrainStep", "fingerprint", "train"]
