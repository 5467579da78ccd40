"""Codelets as Python classes, their vertices one by one, and the vertex groups they make."""
