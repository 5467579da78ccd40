"""One thing in the memory of a tile, as profiles and errors name it: a variable, or a buffer of a step."""

from __future__ import annotations

from dataclasses import dataclass

from ipujax.runtime.analysis import Step
from ipujax.runtime.graph import Call, Decision, WriteUndef
from ipujax.runtime.memory.role_bytes import ROLE_OF_CATEGORY
from ipujax.runtime.tensor import Origin, Variable, readable_name, visible_layer
from ipujax.runtime.tensor.roles import UNKNOWN


@dataclass(frozen=True, slots=True)
class LiveItem:
    """Something in the memory of one tile.

    Args:
        name: debug name, with dtype and shape for a variable.
        num_bytes: its bytes on that tile.
        category: one of `memory.CATEGORIES`.
        origin: where it comes from.
        variable: what it is, if it is a variable.
        role: what it is for, one of `memory.ROLES`; empty when it was saved by a version that knew no roles.
        whole_bytes: bytes of a variable on all tiles together; 0 for others, and where that was not saved.
    """

    name: str
    num_bytes: int
    category: str
    origin: Origin = Origin()
    variable: Variable | None = None
    role: str = ""
    whole_bytes: int = 0

    @classmethod
    def of(cls, variable: Variable, num_bytes: int, category: str, role: str = "") -> LiveItem:
        """A variable; `role` is empty where nobody asks for it."""
        return cls(repr(variable), num_bytes, category, variable.origin, variable, role, variable.num_bytes)

    @classmethod
    def buffer(cls, step: Step, num_bytes: int, category: str) -> LiveItem:
        """A buffer of a step."""
        name, origin = step_name(step)
        return cls(f"<{category}:{name}>", num_bytes, category, origin, role=ROLE_OF_CATEGORY[category])

    @classmethod
    def always(cls, num_bytes: int, category: str) -> LiveItem:
        """What is there all the time and is no variable."""
        return cls(category, num_bytes, category, role=ROLE_OF_CATEGORY[category])

    @property
    def readable(self) -> str:
        """Its name without JAX's transformations."""
        if not self.name.startswith("<"):
            return readable_name(self.name)
        kind, _, step = self.name.strip("<>").partition(":")
        return f"<{kind}: {readable_name(step)}>"

    @property
    def layer(self) -> str:
        """The layer it is in, empty when none is known."""
        return visible_layer(self.origin.layer)

    def __str__(self) -> str:
        place = f", {self.origin}" if self.origin != Origin() else ""
        is_known = self.category in ("variable", "constant") and self.role not in ("", UNKNOWN)
        return f"{self.num_bytes:>12,} B  {self.readable} ({self.role if is_known else self.category}){place}"


def step_name(step: Step | None) -> tuple[str, Origin]:
    """The name of a step, and where it comes from."""
    match step:
        case None:
            return "nothing", Origin()
        case Decision():
            return "a decision", step.origin
        case WriteUndef():
            return "a write of undefined values", Origin()
        case Call(function):
            return function.name, Origin()
    return step.label, step.shown_origin
