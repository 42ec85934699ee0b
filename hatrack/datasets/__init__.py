"""Data sets: the catalogue, downloads, imports and the cache. Benchmarks are made of them."""
