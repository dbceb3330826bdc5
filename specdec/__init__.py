"""The engine library: models, caches, sampling and the protocol's state machines. No Ray in it."""
