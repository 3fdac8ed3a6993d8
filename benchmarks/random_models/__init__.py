"""Small random models, each a page of source text that a seed determines: see `benchmarks/soak.py`."""
