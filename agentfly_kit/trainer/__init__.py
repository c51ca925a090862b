"""Training of policies. `loop` contains the training loop, and the other modules contain its components."""
