"""What ships with the kit: task sets and the small warm-started policy. Installed as `agentfly_kit._data`.

This file is here so that the folder is a package; it holds no code, and who reads the files is `agentfly_kit.data`.
"""
