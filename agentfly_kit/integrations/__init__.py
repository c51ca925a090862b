"""Integrations: TRL, Ray, trackers, traces, rollouts of other projects, notebook display, and remote sandbox pools."""
