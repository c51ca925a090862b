"""Training: the loop and what it is made of, a noun a file. `loop` is where to begin."""
