"""Bytes of tiles by role: weights, gradients, activations, code…, each tile at its own peak.

Input: `Occupancy`, whose graph has the roles of variables, and the bytes of each category. Output: bytes of each tile
by role, which add up to `MemoryReport.tile_bytes`.

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

import numpy as np

from ipujax.runtime.memory.always_live import EXCHANGE_CODE, FIXED
from ipujax.runtime.memory.frames import Owner
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


def bytes_by_role(occupancy: Occupancy, by_category: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the bytes of each tile by role, int64[num_tiles] each; roles without bytes are left out."""
    tiles = occupancy.target.num_tiles
    roles = {role: np.zeros(tiles, np.int64) for role in ROLES}
    _add_variables(occupancy, None, np.ones(tiles, bool), roles)
    for category, values in by_category.items():
        if category != "variable":
            roles[ROLE_OF_CATEGORY[category]] += values
    return {role: values for role, values in roles.items() if values.any()}


def _add_variables(occupancy: Occupancy, owner: Owner, selected: np.ndarray, roles: dict[str, np.ndarray]) -> None:
    """Add the variables of a frame and its inner frames to `roles`, on the selected tiles at the peak of each."""
    frame = occupancy.frames.liveness[owner]
    position = occupancy.peak(owner).position
    for interval in frame.intervals:
        first, values = occupancy.bytes_by_tile(interval.variable)
        window = slice(first, first + len(values))
        peak_step = position[window]
        is_live = (peak_step >= interval.first) & (peak_step <= interval.last) & selected[window]
        roles[role_of_variable(occupancy, interval.variable)][window] += values * is_live
    # Tiles that are fullest during a call have the callee's variables, each at its peak within the callee.
    for number in np.unique(position[selected]).tolist() if frame.steps else ():
        for function in occupancy.frames.functions_during(owner, frame.steps[number]):
            _add_variables(occupancy, function, selected & (position == number), roles)
