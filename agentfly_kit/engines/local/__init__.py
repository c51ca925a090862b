"""The engine that samples in this process, with the weights of the policy itself."""
