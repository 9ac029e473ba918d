"""Benchmarks: this library beside plain Ray, verl and Monarch, in one run. ``python -m benchmarks --help``."""
