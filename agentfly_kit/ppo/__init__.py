"""Training steps on a batch: PPO (`step`) and imitation of recorded actions (`imitation`)."""
