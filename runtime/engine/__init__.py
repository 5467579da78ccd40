"""The engine: a whole program as one JAX function, for one replica or several."""

from ipujax.runtime.engine.decision_log import DecisionLog as DecisionLog
from ipujax.runtime.engine.engine import (
    StateFunction as StateFunction,
    engine_function as engine_function,
    remote_memories as remote_memories,
)
