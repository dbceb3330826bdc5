"""Speculation modes compared on the same work: ``python -m benchmarks.modes``."""
