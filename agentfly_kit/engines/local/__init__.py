"""The engine that samples in this process with the policy's own weights."""
