"""Variables, tile mappings, and tensors: views of variables that say where each element lies."""
