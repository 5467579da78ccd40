"""Codelets of elementwise and reducing vertices, their cycle costs, and their addition to a graph."""
