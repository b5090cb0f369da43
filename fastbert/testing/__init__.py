"""Shipped helpers of the tests and benchmarks: inputs, tolerances, comparison, poison."""
