"""How a tool call is written in text and parsed back. A format knows text only: no tokens, no tools, no models."""
