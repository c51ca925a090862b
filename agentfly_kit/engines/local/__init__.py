"""The engine that samples with the policy's own weights in this process."""
