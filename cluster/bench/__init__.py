"""Benchmarks: load on a running service, ways of speculating compared in interleaved rounds."""
