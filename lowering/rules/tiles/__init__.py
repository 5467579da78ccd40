"""Primitives and rules of tile-level JAX: arrays with a row a tile, and functions mapped over these rows."""
