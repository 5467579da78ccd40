"""Checks of the arguments of operations with windows, with PopART's sentences: programs compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipujax.popart.exceptions import popart_exception

_PER_AXIS = ("dilations", "inDilations", "strides")
_PER_SIDE = ("pads", "outPads")


def check_windows(op_type: str, attributes: Mapping[str, Any]) -> None:
    """Refuse paddings that do not fit the window of a node, by its attributes."""
    window = attributes.get("kernel_shape")
    pads = attributes.get("pads")
    if window and pads and op_type != "Pad" and len(pads) != 2 * len(window):
        message = f"Padding vector (length {len(pads)}) does not have twice the length of the window ({len(window)})"
        raise popart_exception(message, expected=2 * len(window), got=list(pads))


def check_convolutions(
    groups: Sequence[Sequence[str]], settings: Mapping[str, Any], rank: Callable[[str], int]
) -> None:
    """Refuse operands, by name for each convolution, and settings of several convolutions that do not fit."""
    # A setting is a list with one list a convolution; `rank` is that of a tensor, by its name.
    for i, group in enumerate(groups):
        if len(group) < 2:
            raise popart_exception(f"convolution {i} must have at least two inputs - data and weights", got=group)
        if len(group) > 3:
            message = f"convolution {i} can have at most three inputs - data, weights, and bias"
            raise popart_exception(message, got=group)
    for name in (*_PER_AXIS, *_PER_SIDE):
        rows = settings.get(name) or []
        if not any(isinstance(row, list | tuple) for row in rows):
            continue
        if len(rows) != len(groups):
            raise popart_exception(
                f"number of {name} parameter sets ({len(rows)}) does not match the number of input sets ({len(groups)})"
            )
        for row, group in zip(rows, groups, strict=True):
            space = rank(group[0]) - 2
            factor = "" if name in _PER_AXIS else "2 * "
            if len(row) != (space if name in _PER_AXIS else 2 * space):
                raise popart_exception(
                    f"Length of {name} vector {len(row)} != {factor}number of spatial dimensions {space}"
                )
