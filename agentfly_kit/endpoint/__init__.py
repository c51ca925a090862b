"""OpenAI-compatible endpoint that connects existing agents to the policy, in process or over HTTP."""
