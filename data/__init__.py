"""Task sets and small policies that are part of the package, installed as `agentfly_kit._data`.

This file makes the folder a package. `agentfly_kit.task_files` and `agentfly_kit.tiny` read the files.
"""
