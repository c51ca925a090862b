"""Programs that run inside a sandbox and import only the standard library. The host sends their source or bytecode.

Of these modules, the host imports only `frames`, `processes` and `values`.
"""
