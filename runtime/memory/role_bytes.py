"""Roles of the bytes of tiles: weights, gradients, activations, code…

roles of variables    see `runtime.tensor.roles`; constants are a role of their own
buffers of operations received, rearranged and sent operands and results of one step, and borrowed memory
vertex state          instances of vertices
vertex code           code of codelets
control code          code of steps
exchange code         code that sends and receives, inside an IPU, between IPUs and with the host
stacks and headers    stacks of supervisor and workers, headers of packets of the host
gaps                  lost to packing and alignment
"""

from __future__ import annotations

from collections.abc import Mapping

from ipujax.runtime.memory.always_live import EXCHANGE_CODE, FIXED
from ipujax.runtime.memory.live import LIVE, Occupancy
from ipujax.runtime.tensor import Variable
from ipujax.runtime.tensor.roles import CONSTANTS, UNKNOWN, VARIABLE_ROLES

BUFFERS = "buffers of operations"
GAPS = "gaps"
# Role of each category but "variable", whose bytes are divided by the roles of variables.
ROLE_OF_CATEGORY: Mapping[str, str] = {
    **{name: BUFFERS for name in LIVE if name != "variable"},
    "constant": CONSTANTS,
    "vertexInstanceState": "vertex state",
    "vertexCode": "vertex code",
    "controlCode": "control code",
    **dict.fromkeys(EXCHANGE_CODE, "exchange code"),
    "stack": "stacks and headers",
    "hostExchangePacketHeader": "stacks and headers",
    "gap": GAPS,
}
ROLES = tuple(dict.fromkeys((*VARIABLE_ROLES, *ROLE_OF_CATEGORY.values())))
ALWAYS_ROLES = frozenset(role for name, role in ROLE_OF_CATEGORY.items() if name in FIXED)  # in use at every step


def role_of_variable(occupancy: Occupancy, variable: Variable) -> str:
    """Return the role of a variable that has a live range."""
    return occupancy.graph.notes.roles.get(variable, UNKNOWN)
