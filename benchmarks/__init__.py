"""Scripts that measure, each run as ``python -m benchmarks.NAME``; what they found is in docs/measurements.md."""
