"""Reductions: partial results on the tiles that have the elements, and their combination."""
