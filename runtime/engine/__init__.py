"""The engine: a whole program as one JAX function, for one replica or several."""

from ipujax.runtime.engine.engine import engine_function as engine_function
from ipujax.runtime.engine.state_function import StateFunction as StateFunction, remote_memories as remote_memories
