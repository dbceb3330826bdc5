"""vLLM's engine as a target: its model, caches and scheduler; our rules, noise and grammars."""
