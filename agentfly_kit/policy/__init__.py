"""The policy: a causal language model, its adapters and value head, and forward passes over shared prefixes."""
