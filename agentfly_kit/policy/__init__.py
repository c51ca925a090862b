"""The policy: a causal language model with optional adapter and value head, and forward passes with prefix sharing."""
