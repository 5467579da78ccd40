"""Codelets of elementwise and reducing vertices, what they cost, and how they are added to a graph."""
