"""Several IPUs: the IPU of each equation, one IPU seen as a graph of its own, and copies between IPUs."""
