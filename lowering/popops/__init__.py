"""Operations on tensors: elementwise, reductions, slices, windows, sorting."""
