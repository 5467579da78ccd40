"""Graphs as Poplar programs see them: variables, mapping, virtual graphs, and replicated graphs."""
