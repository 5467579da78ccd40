"""Reductions: partial results on the tiles of the elements, and their combination."""
