"""Bridges to other programs: TRL, and pools in another process or on another machine."""
