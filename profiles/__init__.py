"""Benchmarks and their results."""
