"""Engines, which sample: token ids in, token ids and logprobs out. They know nothing of text, tools or rewards."""
