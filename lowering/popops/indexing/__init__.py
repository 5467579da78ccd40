"""Access by index: gather and scatter, dynamic slices, windows, and the buffers of loops."""
