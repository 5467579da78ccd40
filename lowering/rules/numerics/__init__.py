"""Rules of primitives that compute: elementwise, reductions, products, windows, random numbers."""
