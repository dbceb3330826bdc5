"""Ways of speculating compared on the same work: ``python -m benchmarks.modes``."""
