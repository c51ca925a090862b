"""Engines, which map token ids to sampled token ids with logprobs. They are independent of tools and rewards."""
