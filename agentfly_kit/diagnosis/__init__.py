"""Reasons why training does not learn: `diagnose` and its checks."""
