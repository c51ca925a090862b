"""The engine that samples with vLLM, and the transfer of new weights to it."""
