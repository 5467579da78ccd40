"""Computations as sections of files: functions of arrays as StableHLO, with the shapes of arguments and results.

Input: a function of arrays, and their shapes. Output: a section; from such a section a function, whose module is parsed
and verified before it is returned. Keys of random numbers are their words there.
Limits: a module that XLA does not compile is found at the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ipujax.runtime.files import DamagedError, Section
from ipujax.runtime.files.kinds import Flag, Integer, Lengths, List, Record, Text
from ipujax.runtime.files.sealed import section_data, section_of

if TYPE_CHECKING:
    from ipujax.lowering.stored_modules import StoredModule

Function = Callable[..., Sequence[Any]]
_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")  # implementations of random numbers
_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_SMALL_FLOATS = ("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
_INTEGERS = tuple(f"{sign}int{bits}" for bits in (2, 4, 8, 16, 32, 64) for sign in ("", "u"))
_DTYPES = ("bool", *_INTEGERS, *_FLOATS, *_SMALL_FLOATS, "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn")
_AVAL = Record(
    {"dtype": Text((*_DTYPES, *_KEYS)), "shape": List(Integer(maximum=2**31 - 1), maximum=64), "isWeak": Flag()}
)
_FIELDS = Record({"name": Text(), "module": Text(), "arguments": List(_AVAL), "results": List(_AVAL)})
COMPUTATION = Section(repr(_FIELDS), lambda data: _FIELDS.check(data, "computation", Lengths()))
_LEVEL = 1  # of compression, as programs are stored while they are compiled


class ExportError(ValueError):
    """`jax.export` refuses a computation; the text says why."""


@dataclass(frozen=True)
class Computation:
    """A function of arrays that was read from a file.

    Args:
        module: its module, of arrays without keys of random numbers.
        in_avals: shape and dtype of each argument.
        out_avals: shape and dtype of each result.
    """

    module: StoredModule
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Compute the results."""
        words = [jax.random.key_data(x) if _is_key(aval) else x for x, aval in zip(arrays, self.in_avals, strict=True)]
        results = zip(self.module(*words), self.out_avals, strict=True)
        return [jax.random.wrap_key_data(x, impl=_name(aval)) if _is_key(aval) else x for x, aval in results]


def exported_computation(function: Function, name: str, avals: Sequence[Any]) -> bytes:
    """Return a function of arrays as a section.

    Args:
        function: from arrays to a sequence of arrays.
        name: its name.
        avals: shape and dtype of each argument.

    Raises:
        ExportError: an operation whose form other versions may not know, an effect, or a type.
    """
    from ipujax.lowering.stored_modules import stored_module  # a hit that XLA computes needs none

    results: list[Any] = []

    def of_words(*words: Any) -> list[Any]:
        keys = [
            jax.random.wrap_key_data(x, impl=_name(aval)) if _is_key(aval) else x
            for x, aval in zip(words, avals, strict=True)
        ]
        results[:] = function(*keys)
        return [jax.random.key_data(x) if _is_key(x) else x for x in results]

    try:
        module = stored_module(of_words, name, [_words(aval) for aval in avals])
        weak = [aval.weak_type for aval in module.out_avals]
        arguments = [_data(aval, is_weak=False) for aval in avals]
        outs = [_data(x, is_weak) for x, is_weak in zip(results, weak, strict=True)]
    except (ValueError, NotImplementedError, TypeError) as error:
        raise ExportError(f"jax.export refuses it: {error}") from error
    return section_of({"name": name, "module": module.text, "arguments": arguments, "results": outs}, _LEVEL)


def read_computation(content: bytes) -> Computation:
    """Return the function of `exported_computation`.

    Raises:
        FileError: a section of another form, or whose module is not one of such arguments and results.
    """
    from ipujax.lowering.stored_modules import ModuleError, StoredModule

    data = section_data(content, COMPUTATION)
    in_avals, out_avals = (tuple(map(_aval, data[place])) for place in ("arguments", "results"))
    words = [tuple(map(_words, avals)) for avals in (in_avals, out_avals)]
    module = StoredModule(data["module"], data["name"], *words)
    try:
        module.check()
    except ModuleError as error:
        raise DamagedError("its computation is damaged", "a module of StableHLO", str(error)) from error
    return Computation(module, in_avals, out_avals)


def _is_key(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


@cache
def _key_dtypes() -> dict[str, Any]:
    """Return the dtype of keys, by implementation."""
    return {name: jax.eval_shape(lambda n=name: jax.random.key(0, impl=n)).dtype for name in _KEYS}


def _name(aval: Any) -> str:
    if not _is_key(aval):
        return str(aval.dtype)
    for name, dtype in _key_dtypes().items():
        if dtype == aval.dtype:
            return name
    raise TypeError(f"keys of {aval.dtype} have no form in files")


def _words(aval: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an array, or of the words of keys."""
    weak = getattr(aval, "weak_type", False)
    shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
    return jax.eval_shape(jax.random.key_data, shape) if _is_key(aval) else shape


def _data(aval: Any, is_weak: bool) -> dict[str, Any]:
    return {"dtype": _name(aval), "shape": list(aval.shape), "isWeak": is_weak}


def _aval(data: dict[str, Any]) -> jax.core.ShapedArray:
    name = data["dtype"]
    dtype = _key_dtypes()[name] if name in _KEYS else jnp.dtype(name)
    return jax.core.ShapedArray(tuple(data["shape"]), dtype, weak_type=data["isWeak"])
