"""The OpenAI-style HTTP API, over any token service."""
