"""The engine: a whole program as one JAX function, for one replica or several."""
