"""Integrations: TRL trainers, and sandbox pools in another process or on another machine."""
