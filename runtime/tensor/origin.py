"""Where in the user's program something comes from: line, scope, layer, part of training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ipujax.runtime.errors import shown_place

OF_CALLER = "@caller"  # in a layer, stands for the layer of whoever calls the function
MOST_CALLERS = 8
MERGED_WITH = "with "  # begins a scope that names the other lines of a merged collective


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in the user's program something comes from.

    Args:
        line: `file:line (function)` of the user's frame, empty when none is known.
        path: the JAX name stack or the Poplar debug path, empty when none is known.
        library: the line inside an installed library that the user's line leads to, empty when there is none.
        file: path of the file of `line`, whose text reports show; empty when none is known.
        layer: names of scopes or functions joined by "/", outermost first, `encoder/block[3]/dense`; inside a function
            that several layers call it begins with `OF_CALLER`, see `compose`.
        part: "forward", "backward" or "recomputed"; empty outside of a differentiated function, see `part_of`.
        callers: the user's lines that called the function of `line`, innermost first, at most `MOST_CALLERS`.
        names: of a call of a function that several layers call, what `named_by_caller` stands for in layers inside.

    Two origins that differ in the last five alone are equal.
    """

    line: str = ""
    path: str = ""
    library: str = ""
    file: str = field(default="", compare=False, repr=False)
    layer: str = field(default="", compare=False, repr=False)
    part: str = field(default="", compare=False, repr=False)
    callers: tuple[str, ...] = field(default=(), compare=False, repr=False)
    names: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def at(cls, place: tuple[str, int, str] | None) -> Origin:
        """That of a running line.

        Args:
            place: file, line and function, as `runtime.errors.user_place` finds them; None for none.
        """
        return cls() if place is None else cls(shown_place(place), file=place[0])

    def __str__(self) -> str:
        return self.line or self.path or "unknown"

    def in_library(self) -> Origin:
        """With the library's line in the place of the user's, which it names too."""
        line = f"{self.library}, from {self.line}" if self.line else self.library
        return replace(self, line=line) if self.library else self


def joined_layers(*layers: str) -> str:
    """Layers one inside the other, as one path."""
    return "/".join(filter(None, layers))


def compose(call: Origin, inner: Origin) -> Origin:
    """Where something inside a function comes from, as seen from one of its calls.

    Args:
        call: of the call; for a call inside of a function that is called, composed already.
        inner: of what the function holds.
    """
    layer = _as_called(inner.layer, call.names)
    names = tuple(_as_called(name, call.names) for name in inner.names)
    first, *rest = layer.split("/")
    layer = joined_layers(call.layer, *rest) if first == OF_CALLER else layer or call.layer
    return replace(inner, layer=layer, part=inner.part or call.part, names=names)


def named_by_caller(number: int) -> str:
    """What stands in a layer for names that each call of a function has others for, see `Origin.names`."""
    return f"{OF_CALLER}{number}"


def _as_called(layer: str, names: Sequence[str]) -> str:
    """A layer with the names of a call."""
    return _NAMED_BY_CALLER.sub(lambda match: names[int(match[1])], layer) if names else layer


def shown_layer(layer: str) -> str:
    """A layer as reports show it, without what stands for names of a caller."""
    return joined_layers(*(name for name in layer.split("/") if not name.startswith(OF_CALLER)))


_NAMED_BY_CALLER = re.compile(rf"{OF_CALLER}(\d+)")
_TRANSFORMS = re.compile(r"((?:(?:transpose|jvp|vmap)\()+)([^()/,]*)\)+/?")
_INTERNAL_SCOPE = re.compile(r"ipu_(stage|phase)_\d+")


def readable_name(name: str) -> str:
    """A debug name without JAX's transformations: `transpose(jvp(mlp))/dot_general` is "backward of mlp/dot_general".

    Args:
        name: of a step or a variable; of merged compute sets the names of several, joined by ", ".

    Returns:
        The first name, and how many more there are.
    """
    first, *others = name.split(", ") if "[" not in name else [name]  # shapes have commas too
    part = "backward of " if "transpose(" in first else "forward of " if "jvp(" in first else ""
    scopes = _TRANSFORMS.sub(lambda found: _scope(found[2]), first).strip("/")
    more = f" and {len(others)} more" if others else ""
    return f"{part if scopes else part.removesuffix(' of ')}{scopes}{more}"


def _scope(inside: str) -> str:
    """What stays of a transformed scope: its name, unless it is one of ours."""
    return "" if not inside or _INTERNAL_SCOPE.fullmatch(inside) else f"{inside}/"


def part_of(origin: Origin, *, has_backward: bool) -> str:
    """The part of a training step that something belongs to: "forward", "backward", "recomputed" or "update".

    Args:
        origin: where it comes from.
        has_backward: whether anything in the program is of part "backward"; if not, nothing has a part.
    """
    return (origin.part or "update") if has_backward else ""
