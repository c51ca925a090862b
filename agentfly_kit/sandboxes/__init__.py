"""Sandboxes that run code written by a model. Each kind of sandbox is a class; a pool leases instances to chains."""
