"""CPU inference side by side with other libraries: what `benchmarks/compare_cpu.py` is made of."""
