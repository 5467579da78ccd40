"""Variables, memory of one shape and dtype spread over tiles by a tile mapping of the graph, and what is known of them.

Input: dtypes of NumPy, and of JAX's PRNG keys; lines and name stacks that tracing has found. Output: `Variable`; bytes
and names of its elements; `Origin`, the source line, scope, layer and part of training that something in a graph comes
from, and names as reports show them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import shown_place
from ipujax.runtime.not_copied import OfGraph


@cache  # by dtype: there are few
def is_key_dtype(dtype: Any) -> bool:
    """Check whether `dtype` is a PRNG key dtype, whose elements are keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@cache
def element_bytes(dtype: Any) -> int:
    """Return the bytes of one element; a PRNG key counts its key data (threefry: two 32-bit words)."""
    return int(dtype.itemsize) if is_key_dtype(dtype) else int(np.dtype(dtype).itemsize)


@cache
def wide_dtype(dtype: Any) -> Any:
    """Return single precision, or what is wider, for numbers of `dtype`; JAX promotes no floats of eight bits."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_narrow else jnp.promote_types(dtype, jnp.float32)


@cache
def dtype_name(dtype: Any) -> str:
    """Return the dtype's JAX name, `float32` or `key<fry>`."""
    return str(dtype) if is_key_dtype(dtype) else np.dtype(dtype).name


OF_CALLER = "@caller"  # in a layer, stands for the layer of whoever calls the function
MAX_CALLERS = 8
MERGED_WITH = "with "  # begins a scope that names the other lines of a merged collective

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTED = "recomputed"
UPDATE = "update"
PLUMBING = "plumbing"  # counters, stashes and copies of pipelines and of loops over micro-batches
COLLECTIVES = "collectives"
STREAMS = "streams"  # between host and tiles
PARTS = (FORWARD, BACKWARD, RECOMPUTED, UPDATE, PLUMBING, COLLECTIVES, STREAMS)  # of a training step


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of something in the user's program.

    Args:
        line: `file:line (function)` of the user's frame, empty when none is known.
        path: JAX name stack or Poplar debug path, empty when none is known.
        library: line inside an installed library that the user's line leads to, empty when there is none.
        file: path of the file of `line`, whose text reports show; empty when none is known.
        layer: names of scopes or functions joined by "/", outermost first, `encoder/block[3]/dense`; inside a function
            that several layers call it begins with `OF_CALLER`, see `compose`.
        part: part of a training step, one of `PARTS`; empty where none is known, and in programs without a gradient.
        callers: the user's lines that called the function of `line`, innermost first, at most `MAX_CALLERS`.
        names: for the call of a function that several layers call, the names that `caller_name` stands for inside.
        places: the same of lines that a front end gives.

    Two origins that differ in the last six alone are equal.
    """

    line: str = ""
    path: str = ""
    library: str = ""
    file: str = field(default="", compare=False, repr=False)
    layer: str = field(default="", compare=False, repr=False)
    part: str = field(default="", compare=False, repr=False)
    callers: tuple[str, ...] = field(default=(), compare=False, repr=False)
    # Files leave names out: they are of calls of functions, which no row of a profile is.
    names: tuple[str, ...] = field(default=(), compare=False, repr=False, metadata={"is_saved": False})
    places: tuple[str, ...] = field(default=(), compare=False, repr=False, metadata={"is_saved": False})

    @classmethod
    def at(cls, place: tuple[str, int, str] | None) -> Origin:
        """Return the origin of a place (file, line, function), as of `runtime.errors.user_place`; empty for None."""
        return cls() if place is None else cls(shown_place(place), file=place[0])

    def __str__(self) -> str:
        return self.line or self.path or "unknown"

    def in_library(self) -> Origin:
        """Return the origin with the library's line in place of the user's, which its text names too."""
        line = f"{self.library}, from {self.line}" if self.line else self.library
        return replace(self, line=line) if self.library else self


def join_layers(*layers: str) -> str:
    """Join layers, outermost first, to one path."""
    return "/".join(filter(None, layers))


def compose(call: Origin, inner: Origin) -> Origin:
    """Return the origin of something inside a function, as seen from one call of the function."""
    # `call` is composed already where it is inside a called function itself.
    layer = _fill_placeholders(inner.layer, call.names)
    names = tuple(_fill_placeholders(name, call.names) for name in inner.names)
    first, *rest = layer.split("/")
    # A layer that begins at the caller is inside the call's; any other is absolute.
    layer = join_layers(call.layer, *rest) if first == OF_CALLER else layer or call.layer
    line = _fill_placeholders(inner.line, call.places)
    places = tuple(_fill_placeholders(place, call.places) for place in inner.places)
    return replace(inner, line=line, layer=layer, part=inner.part or call.part, names=names, places=places)


def caller_name(number: int) -> str:
    """Return the placeholder of a name that differs between calls of a function, see `Origin.names`."""
    return f"{OF_CALLER}{number}"


def _fill_placeholders(layer: str, names: Sequence[str]) -> str:
    """Replace the placeholders of a layer by the names of a call."""
    return _PLACEHOLDER.sub(lambda match: names[int(match[1])], layer) if names else layer


@remembered_small
def visible_layer(layer: str) -> str:
    """Return a layer as reports show it, without placeholders of callers."""
    return join_layers(*(name for name in layer.split("/") if not name.startswith(OF_CALLER)))


_PLACEHOLDER = re.compile(rf"{OF_CALLER}(\d+)")
REMATERIALISED = "rematted_computation"  # JAX's scope of recomputation by a checkpoint
TRANSPOSED = "transpose("
_TRANSFORMS = re.compile(r"((?:(?:transpose|jvp|vmap)\()+)([^()/,]*)\)+/?")
_INTERNAL_SCOPE = re.compile(rf"ipu_(stage|phase)_\d+|ipu_recompute_\w+|{REMATERIALISED}|checkpoint")
_RECOMPUTED_SCOPE = re.compile(rf"(checkpoint/)?{REMATERIALISED}/|\bipu_(stage|phase)_\d+/")


@remembered_small
def readable_name(name: str) -> str:
    """Rewrite a debug name without transformations: `transpose(jvp(mlp))/dot` as "backward of mlp/dot"."""
    # Of merged compute sets, joined by ", ", the result is the first name and the number of further ones.
    first, *further_names = name.split(", ") if "[" not in name else [name]  # shapes have commas too
    part = part_of_name(first)
    scopes = without_transformations(first)
    suffix = f" and {len(further_names)} more" if further_names else ""
    return f"{part}{' of ' if part and scopes else ''}{scopes}{suffix}"


@remembered_small
def without_transformations(name: str) -> str:
    """Return a debug name without JAX's transformations and internal scopes: `transpose(jvp(mlp))/dot` as `mlp/dot`."""
    plain = _TRANSFORMS.sub(lambda match: _scope(match[2]), name) if "(" in name else name
    return _RECOMPUTED_SCOPE.sub("", plain).strip("/")


@remembered_small
def part_of_name(name: str) -> str:
    """Return the part of training that the transformations in a name stack tell: one of the first three, or ""."""
    if TRANSPOSED in name.rpartition(REMATERIALISED)[2]:
        return BACKWARD
    if REMATERIALISED in name:
        return RECOMPUTED
    return FORWARD if "jvp(" in name else ""


def _scope(name: str) -> str:
    """Return the name of a transformed scope and a slash; nothing for a scope of this compiler."""
    return "" if not name or _INTERNAL_SCOPE.fullmatch(name) else f"{name}/"


@dataclass(frozen=True, eq=False, slots=True)
class Variable(OfGraph):
    """Memory on tiles; equal only to itself.

    Args:
        shape: sizes of its dimensions, row-major.
        dtype: a NumPy dtype, or one of JAX's extended dtypes (a PRNG key is one element).
        name: debug name.
        value: constant value, an array of `shape`; None for memory that programs write.
        monoid: name of the monoid ("add", "max"…) by which slots of dimension 0 combine, for a variable of partial
            results; the engine may then store one slot instead of `shape[0]`.
        origin: its origin.
        by_replica: whether `value` is [replicas, *shape], a constant for each replica.
        owner: the same object for all variables of a graph that a user builds and of its views; None for others.
    """

    shape: tuple[int, ...]
    dtype: Any
    name: str = ""
    value: Any = None
    monoid: str | None = None
    origin: Origin = Origin()
    by_replica: bool = False
    owner: object = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of all elements in bytes."""
        return self.size * element_bytes(self.dtype)

    @property
    def is_constant(self) -> bool:
        return self.value is not None

    def __repr__(self) -> str:
        return f"Variable({self.name or 'unnamed'}: {dtype_name(self.dtype)}{list(self.shape)})"
