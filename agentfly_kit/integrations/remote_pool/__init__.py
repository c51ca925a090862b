"""Sandbox pools in other processes or on other machines. `serve_pool` serves a pool over HTTP to a `RemotePool`."""
