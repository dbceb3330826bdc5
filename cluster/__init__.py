"""What it takes to run specdec on machines: configuration, launch, the command line, metrics, benchmarks."""
