"""Training of policies. The training loop is in `loop`, and its components are in the other modules."""
