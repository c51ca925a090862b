"""Programs that run inside a sandbox, on the standard library alone. They are sent in as source or bytecode.

The host imports only `frames` and `processes`, which both sides use.
"""
