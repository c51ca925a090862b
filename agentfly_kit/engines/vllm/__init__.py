"""The engine that samples with vLLM, and the transfer of weights to vLLM."""
