"""Both models in one process, and the backends that join the state machines to the models."""
