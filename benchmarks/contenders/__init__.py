"""One adapter per contender. Each runs in its own process and environment; see `benchmarks.protocol`."""
