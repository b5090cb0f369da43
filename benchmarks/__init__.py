"""Benchmarks: `pytest benchmarks --benchmark-only`; each op is checked before it is timed."""
