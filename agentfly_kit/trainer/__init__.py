"""Training. `loop` contains the training loop, the other modules its components."""
