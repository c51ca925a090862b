"""The agent and its chains: sampling trajectories, the rollout that holds them, and the shared budget."""
