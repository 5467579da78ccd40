"""Maps over the elements of an index space: fused expressions, rows, iotas, padding."""
