"""Tools: the `@tool` decorator, JSON schemas, contexts of calls, and the built-in tools of `af.toolbox`."""
