"""Items in the memory of a tile, as profiles and errors name them, and their roles: weights, gradients, activations…

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
from dataclasses import dataclass, field
from typing import NamedTuple

from ipujax.runtime.analysis import Step
from ipujax.runtime.files.figure_kinds import Bytes, Large
from ipujax.runtime.files.figure_records import NOT_SAVED
from ipujax.runtime.graph import Call, Decision, WriteUndef
from ipujax.runtime.memory.always_live import EXCHANGE_CODE, FIXED
from ipujax.runtime.memory.live import LIVE, Occupancy
from ipujax.runtime.tensor import Origin, Variable, readable_name, visible_layer
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


@dataclass(frozen=True, slots=True)
class LiveItem:
    """An item in the memory of one tile.

    Args:
        name: debug name, with dtype and shape for a variable.
        num_bytes: its bytes on that tile.
        category: one of `memory.CATEGORIES`.
        origin: origin of the variable or step.
        variable: the variable, None for other items.
        role: one of `memory.ROLES`; empty where it is not used.
        whole_bytes: size of a variable; 0 for others.
        total_bytes: its bytes on all tiles at the peak of each, in a `MemoryBreakdown`; 0 elsewhere.
    """

    name: str
    num_bytes: Bytes
    category: str
    origin: Origin = Origin()
    variable: Variable | None = field(default=None, metadata=NOT_SAVED)
    role: str = ""
    whole_bytes: int = 0
    total_bytes: Large = 0

    @classmethod
    def of(cls, variable: Variable, num_bytes: int, category: str, role: str = "") -> LiveItem:
        """Return the item of a variable; `role` may be empty where it is not used."""
        return cls(repr(variable), num_bytes, category, variable.origin, variable, role, variable.num_bytes)

    @classmethod
    def buffer(cls, step: Step, num_bytes: int, category: str) -> LiveItem:
        """Return the item of a buffer of a step."""
        name, origin = step_name(step)
        return cls(f"<{category}:{name}>", num_bytes, category, origin, role=ROLE_OF_CATEGORY[category])

    @classmethod
    def without_variable(cls, num_bytes: int, category: str, name: str = "") -> LiveItem:
        """Return the item of a category without variables, of which it may be the part `name`."""
        return cls(name or category, num_bytes, category, role=ROLE_OF_CATEGORY[category])

    @property
    def readable(self) -> str:
        """The name without JAX's transformations."""
        return readable_item(self.name)

    @property
    def layer(self) -> str:
        """The layer of the origin, empty without one."""
        return visible_layer(self.origin.layer)

    def __str__(self) -> str:
        place = f", {self.origin}" if self.origin != Origin() else ""
        # A role tells more than "variable" or "constant"; the other categories tell more than their roles.
        has_role = self.category in ("variable", "constant") and self.role not in ("", UNKNOWN)
        return f"{self.num_bytes:>12,} B  {self.readable} ({self.role if has_role else self.category}){place}"


class TilePeak(NamedTuple):
    """The step at which a tile is fullest, its origin, and the items of the tile at that step, largest first."""

    step: str
    origin: Origin
    items: tuple[LiveItem, ...]


def readable_item(name: str) -> str:
    """Return the name of an item without JAX's transformations."""
    if not name.startswith("<"):
        return readable_name(name)
    kind, _, step = name.strip("<>").partition(":")  # as `LiveItem.buffer` composes it
    return f"<{kind}: {readable_name(step)}>"


class StepName(NamedTuple):
    """The name of a step in reports of memory, and its origin."""

    name: str
    origin: Origin


def step_name(step: Step | None) -> StepName:
    """Return the name of a step; None is no step."""
    match step:
        case None:
            return StepName("nothing", Origin())
        case Decision():
            return StepName("a decision", step.origin)
        case WriteUndef():
            return StepName("a write of undefined values", Origin())
        case Call(function):
            return StepName(function.name, Origin())
    return StepName(step.label, step.shown_origin)


def role_of_variable(occupancy: Occupancy, variable: Variable) -> str:
    """Return the role of a variable that has a live range."""
    return occupancy.graph.notes.roles.get(variable, UNKNOWN)
