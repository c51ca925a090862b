"""Programs that run inside a sandbox and import only the standard library. The host sends their source or bytecode.

The host imports only `frames` and `processes`, which both sides use.
"""
