"""Benchmarks: figures, never assertions. `make bench`."""
