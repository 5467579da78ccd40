"""Rules of primitives that move elements: views, padding, gather and scatter, slices, sorting."""
