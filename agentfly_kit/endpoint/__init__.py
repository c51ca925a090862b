"""OpenAI-compatible endpoint through which existing agents use the policy, in process or over HTTP."""
