"""Engines map token ids to sampled token ids with logprobs, independently of tools and rewards."""
