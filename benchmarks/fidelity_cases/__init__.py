"""Published measurements of IPUs, each written as a program for the simulated machine; see `benchmarks/fidelity.py`."""
