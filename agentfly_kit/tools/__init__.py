"""The `@tool` decorator, JSON schemas of tools, the `Context` of tool calls, and built-in tools (`af.toolbox`)."""
