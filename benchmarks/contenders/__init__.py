"""One adapter per contender. Each runs in a process and an environment of its own; see `benchmarks.protocol`."""
