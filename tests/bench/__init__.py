"""Benchmarks: figures, never assertions. `make bench` measures the speed goals; others are commands of their own."""
