"""Steps of sessions as JAX functions, compiled for a device."""
