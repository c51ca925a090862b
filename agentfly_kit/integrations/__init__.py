"""Integrations with TRL, Ray, trackers, OpenTelemetry, notebooks, and other rollout formats."""
