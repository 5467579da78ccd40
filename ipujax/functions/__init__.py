"""Functions of `ipu.jit`: their settings, which it makes at once, and their compilers, imported at the first call."""
