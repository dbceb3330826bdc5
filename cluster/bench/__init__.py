"""Benchmarks: load on a running service, modes compared in interleaved rounds."""
