"""Tools: the decorator, JSON schemas, calls with their context, and the ready-made tools of `af.toolbox`."""
