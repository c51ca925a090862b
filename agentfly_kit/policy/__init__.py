"""`Policy`, a causal language model with an optional adapter and value head, and forward passes with prefix sharing."""
