"""Foundations of rules: their context, composition of other primitives, and the fallback to one tile."""
