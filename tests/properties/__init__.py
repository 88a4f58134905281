"""What must hold for every input, stated once: the test suite draws a few cases, `benchmarks/fuzz.py` draws for hours.

A case is a small frozen dataclass of sizes, kinds and one seed, so that hypothesis can shrink it and print it.
"""
