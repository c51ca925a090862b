"""Integrations with TRL, Ray, trackers, OpenTelemetry, notebooks, other rollout formats, and remote sandbox pools."""
