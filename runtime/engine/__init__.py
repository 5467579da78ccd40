"""The engine: a whole program as one JAX function, for one replica or several."""

from ipujax.runtime.engine.engine import (
    StateFunction as StateFunction,
    engine_function as engine_function,
    remote_memories as remote_memories,
)
from ipujax.runtime.engine.values import DecisionLog as DecisionLog
