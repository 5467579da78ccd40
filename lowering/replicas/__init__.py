"""Functions of several replicas: their primitive, its evaluation on stacked arrays, and which values may differ."""
