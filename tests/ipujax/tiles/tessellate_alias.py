"""A plugin of pytest that runs the tests of TessellateIPU against `ipujax`, by its module names.

::

    cd tessellate-ipu   # a checkout of github:graphcore-research/tessellate-ipu
    PYTHONPATH=IPUJAX:IPUJAX/tests/ipujax/tiles pytest -p tessellate_alias tests/core/test_tile_array.py

`TileShardedArray` is a tile array with its tiles; its functions call those of `ipujax`. `jax.jit(backend="ipu")` is
`ipu.jit`, and `jax.devices("ipu")` has one IPU. Names of C++ vertices exist so that test files can be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import Primitive as JaxPrimitive

NUM_TILES = 64
DEVICE = ipu.IPUModel(tiles_per_ipu=NUM_TILES)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class TileShardedArray:
    """A tile array with its tiles."""

    array: Any
    tiles: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tiles) != self.array.shape[0]:
            raise ValueError(f"{self.array.shape} has no row for each of {len(self.tiles)} tiles")
        object.__setattr__(self, "tiles", tuple(int(tile) for tile in self.tiles))

    def tree_flatten(self) -> tuple[tuple[Any], tuple[int, ...]]:
        return (self.array,), self.tiles

    @classmethod
    def tree_unflatten(cls, tiles: tuple[int, ...], children: Sequence[Any]) -> TileShardedArray:
        # Transformations unflatten objects that are no arrays.
        result = object.__new__(cls)
        object.__setattr__(result, "array", children[0])
        object.__setattr__(result, "tiles", tiles)
        return result

    dtype = property(lambda self: self.array.dtype)
    shape = property(lambda self: self.array.shape)
    size = property(lambda self: self.array.size)
    num_tiles = property(lambda self: len(self.tiles))
    aval = property(lambda self: jax.core.ShapedArray(self.array.shape, self.array.dtype))
    tile_aval = property(lambda self: jax.core.ShapedArray(self.array.shape[1:], self.array.dtype))
    tile_shape = property(lambda self: self.array.shape[1:])

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.array, dtype=dtype)

    def reshape(self, shape: Sequence[int]) -> TileShardedArray:
        if shape[0] not in (-1, self.num_tiles):
            raise ValueError("the axis of tiles stays")
        return TileShardedArray(self.array.reshape((self.num_tiles, *shape[1:])), self.tiles)

    def squeeze(self) -> TileShardedArray:
        axes = [n for n, extent in enumerate(self.shape) if n and extent == 1]
        return TileShardedArray(jnp.squeeze(self.array, axes), self.tiles)

    def __getitem__(self, key: Any) -> TileShardedArray:
        keys = key if isinstance(key, tuple) else (key,)
        first = slice(keys[0], keys[0] + 1) if isinstance(keys[0], int) else keys[0]
        keys = (first, *keys[1:])
        check_tile_array_multi_slice(keys, self.shape)
        return TileShardedArray(self.array[keys], self.tiles[first])


def check_tile_array_multi_slice(slices: tuple[Any, ...], shape: Sequence[int]) -> bool:
    """Refuse slices of a row that are not contiguous in memory."""
    if len(slices) > len(shape):
        raise ValueError("more slices than dimensions")
    full = (*slices, *(slice(None) for _ in shape[len(slices) :]))
    if any(isinstance(s, slice) and s.step not in (None, 1) for s in full[1:]):
        raise ValueError("strided slice of a row")
    cut = [n for n, s in enumerate(full) if n and shape[n] > 1 and s != slice(None)]
    if any(not isinstance(full[n], int) for n in range(1, max(cut, default=0))):
        raise ValueError("slice of a row with gaps")
    return True


def tile_put_sharded(array: Any, tiles: Sequence[int]) -> TileShardedArray:
    return TileShardedArray(ipu.tile_put_sharded(array, tiles), tuple(tiles))


def tile_put_replicated(array: Any, tiles: Sequence[int]) -> TileShardedArray:
    return TileShardedArray(ipu.tile_put_replicated(array, tiles), tuple(tiles))


def tile_gather(array: Any, indices: Sequence[int], tiles: Sequence[int], copy: bool = False) -> TileShardedArray:
    return TileShardedArray(ipu.tile_gather(_plain(array), indices, tiles), tuple(tiles))


def tile_constant_replicated(data: Any, tiles: Sequence[int]) -> TileShardedArray:
    return TileShardedArray(np.stack([np.asarray(data)] * len(tiles)), tuple(tiles))


def tile_constant_sharded(data: Any, tiles: Sequence[int]) -> TileShardedArray:
    return TileShardedArray(np.asarray(data), tuple(tiles))


def tile_data_barrier(*arrays: TileShardedArray) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    if len({x.dtype.itemsize for x in arrays}) > 1:
        raise TypeError("dtypes of several sizes")  # a limit of the library's vertex, which a test expects
    results = ipu.tile_barrier(*(x.array for x in arrays))
    return tuple(TileShardedArray(y, x.tiles) for y, x in zip(results, arrays, strict=True))


def tile_map(primitive: Any, *arrays: TileShardedArray, **attributes: Any) -> Any:
    tiles = tuple(attributes.pop("tiles", None) or arrays[0].tiles)
    attributes.pop("sync", None)
    if primitive is None:
        return arrays
    function = _functions.get(primitive.name)
    target = primitive if function is None else function
    results = ipu.tile_map(target, *map(_plain, arrays), tiles=tiles, **attributes)
    wrapped = tuple(TileShardedArray(y, tiles) for y in jax.tree.leaves(results))
    return wrapped if isinstance(results, tuple | list) else wrapped[0]


def ipu_cycle_count(*arrays: TileShardedArray, sync: bool = False) -> tuple[TileShardedArray, ...]:
    *results, count = ipu.cycle_count(*map(_plain, arrays), sync=sync)
    wrapped = [TileShardedArray(y, x.tiles) for y, x in zip(results, arrays, strict=True)]
    return *wrapped, TileShardedArray(count, arrays[0].tiles)


def _plain(x: Any) -> Any:
    return x.array if isinstance(x, TileShardedArray) else x


# Functions that tile primitives of TessellateIPU compute, by name; JAX's own primitives map themselves.
_functions: dict[str, Callable[..., Any]] = {}


def _tile_primitive(name: str, function: Callable[..., Any]) -> Any:
    primitive = Primitive(name)
    primitive.impl = function
    _functions[name] = function
    return primitive


class Primitive(JaxPrimitive):
    """A primitive whose implementation is mapped over tiles."""

    def def_impl(self, impl: Callable[..., Any]) -> Any:
        _functions[self.name] = impl
        return super().def_impl(impl)


def declare_ipu_tile_primitive(vertex_name: str, gp_filename: Any = None) -> Callable[..., Any]:
    return lambda initialise: Primitive(initialise.__name__.removesuffix("_p"))


UNARY = "abs asin cbrt ceil cos erf exp expm1 floor log log1p neg population_count round sign sin tan tanh rsqrt sqrt"
BINARY = "add atan2 div max min mul pow rem sub"


def _lax_names() -> dict[str, Any]:
    in_place = {
        f"{name}_inplace_p": _tile_primitive(f"{name}_inplace", partial(getattr(lax, f"{name}_p").bind))
        for name in (*UNARY.split(), *BINARY.split())
    }
    for name in UNARY.split():
        _functions[f"{name}_inplace"] = getattr(lax, name)
    by_name = {name: getattr(lax, name) for name in dir(lax) if name.endswith("_p")}
    names = {f"{name}_p" for name in ("cumsum", "cummax", "cummin", "cumprod", "gather", "reshape")}
    scatters = {"scatter_p", "scatter_add_p", "scatter_max_p", "scatter_min_p", "scatter_mul_p"}
    known = {name: by_name[name] for name in (*names, *scatters) if name in by_name}
    return (
        in_place
        | known
        | {
            "bitcast_convert_type_p": lax.bitcast_convert_type_p,
            "fill": lambda shape, value, dtype: jnp.full(shape, value, dtype),
            "tile_fill": lambda shape, value, dtype, tiles: tile_put_replicated(jnp.full(shape, value, dtype), tiles),
            "tile_sharded_identity": lambda dtype, tiles: tile_put_sharded(jnp.identity(len(tiles), dtype), tiles),
        }
    )


def _prim_sharded(x: Any, tiles: Sequence[int]) -> Any:
    assert len(tiles) == x.shape[0]
    # Outside of a trace the library returns its argument.
    return ipu.tile_put_sharded(x, tiles) if isinstance(x, jax.core.Tracer) else x


class _NotHere:
    """A name of a C++ extension: it exists, and every use of it fails."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a structure of TessellateIPU's C++ extension")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NotHere


_PUBLIC = (TileShardedArray, tile_put_sharded, tile_put_replicated, tile_gather, tile_constant_replicated, tile_map)
_ALSO_PUBLIC = (tile_constant_sharded, tile_data_barrier, ipu_cycle_count, declare_ipu_tile_primitive)
_CORE: dict[str, Any] = {value.__name__: value for value in (*_PUBLIC, *_ALSO_PUBLIC)}
_CORE |= {"is_ipu_model": lambda device: True, "register_ipu_tile_primitive": lambda *_: None}
_PRIMS = {"tile_put_sharded_prim": _prim_sharded, "tile_put_replicated_prim": ipu.tile_put_replicated}
_SCALED = {
    "scaled_add_p": _tile_primitive("scaled_add", lambda a, b, s: a + s * b),
    "scaled_sub_p": _tile_primitive("scaled_sub", lambda a, b, s: a - s * b),
}


def _tile_copy(x: TileShardedArray) -> TileShardedArray:
    return TileShardedArray(ipu.tile_map(jnp.copy, x.array, tiles=x.tiles), x.tiles)


def _modules() -> dict[str, dict[str, Any]]:
    lax_names = _lax_names()
    return {
        "": _CORE,
        "core": _CORE,
        "core.tile_array": {"check_tile_array_multi_slice": check_tile_array_multi_slice, **_CORE},
        "core.tile_array_primitives": _PRIMS,
        "core.tile_interpreter_primitives": {},
        "core.tile_common_utils": {},
        "lib": {},
        "lib.pytessellate_ipu_core": {},
        "utils": {"is_ipu_model": lambda device: True, "DTypeLike": Any},
        "lax": lax_names,
        "lax.tile_lax_unary": {"tile_copy": _tile_copy},
        "lax.tile_lax_binary": _SCALED,
        "lax.tile_lax_reduce": {},
    }


def _install() -> None:
    for name, contents in _modules().items():
        module = _Module(f"tessellate_ipu.{name}".rstrip("."))
        module.__path__ = []  # type: ignore[attr-defined]  # a package
        vars(module).update(contents)
        sys.modules[module.__name__] = module
    for name in list(_modules()):
        parent, _, child = f"tessellate_ipu.{name}".rstrip(".").rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[f"{parent}.{child}"])


@dataclass(frozen=True)
class Device:
    """The IPU of `jax.devices("ipu")`."""

    num_tiles: int = NUM_TILES
    num_worker_contexts: int = 6
    platform: str = "ipu"


_jit = jax.jit
_devices = jax.devices


def jit(fun: Callable[..., Any], *, backend: str | None = None, **options: Any) -> Callable[..., Any]:
    return ipu.jit(fun, device=DEVICE, **options) if backend == "ipu" else _jit(fun, **options)


def devices(backend: str | None = None) -> Any:
    return [Device()] if backend == "ipu" else _devices(backend)


_install()
jax.jit = jit
jax.devices = devices
jax.core.Primitive = Primitive
