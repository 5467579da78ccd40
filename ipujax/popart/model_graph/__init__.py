"""Models as sessions evaluate them: annotated graphs, their placement, and their values."""
