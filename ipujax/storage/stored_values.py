"""Plans and costs in the directory of a cache, for every program that needs them.

Input: the key of a value, and a function that computes it. Output: the value. A program of which a part was compiled
before, in this process or another, takes plans and costs of that part from there; two programs need not be equal.
A stored value equals the computed one: its key is a digest of all that it depends on, and of the compiler's state.
What is read is of the type of the value, and possible for its key; anything else is computed. A value is stored as
JSON-able data and the bytes of its arrays, by its type:

    type ::= None | bool | int | float | str | a literal | a dtype | an array | type "|" None | tuple of types
           | a dataclass, whose fields have the types of their annotations | a class of numbered values

From these and the type comes an equal value. The data name no class and no function: what is built follows from the
type alone. An array of one repeated number is one number in memory again, all are read-only.
Limits: values whose key has no digest, or whose type has no such form, are computed. Files are written when the
compilation ends or fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from functools import cache
from math import prod
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import jax.numpy as jnp
import numpy as np

from ipujax.lowering.digests import NoDigestError, value_digests
from ipujax.runtime.cache import drop_values, numbered_values, values_stored_in
from ipujax.runtime.files import DamagedError, FileError, FileKind, Sealed, Section, compress, decompress
from ipujax.runtime.files.sealed import section_of
from ipujax.runtime.logs import Log
from ipujax.storage.cache_directory import PLAN, CacheDirectory, NewFile, requested_directory
from ipujax.storage.versions import compiler_state

_ALIGNMENT_BYTES = 8  # of the largest element
_MAX_INTEGER = 2**63
_MAX_ELEMENTS = 2**27  # of an array; a system has no more tiles
_MAX_RANK = 16
_ARRAY_DTYPES = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float32",
    "float64",
)
_DTYPES = (*_ARRAY_DTYPES, "float16", "bfloat16", "complex64", "complex128", "int2", "int4", "uint2", "uint4")
_DTYPES += ("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
_DTYPES += ("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn")


class NoDataError(TypeError):
    """A value without such a form; the text says which."""


def value_data(value: object, kind: Any) -> tuple[Any, bytes]:
    """Return a value of a type as JSON-able data, and the bytes of its arrays.

    Raises:
        NoDataError: it, or a value in it, is not of its type, or of a type that is not listed above.
    """
    arrays: list[bytes] = []
    data = _data(value, kind, arrays)
    return data, b"".join(arrays)


def value_of_data(data: Any, content: bytes, kind: Any) -> Any:
    """Return the value of `value_data`.

    Raises:
        DamagedError: the data describe no value of the type.
    """
    arrays = _Arrays(content)
    value = _value(data, kind, arrays)
    arrays.check_end()
    return value


def _data(value: Any, kind: Any, arrays: list[bytes]) -> Any:
    """Return a value as JSON, read by the annotation of its place; arrays are appended to `arrays`."""
    form = get_origin(kind)
    if form in (Union, UnionType):
        return None if value is None else _data(value, _optional(kind), arrays)
    if form is Literal and value in get_args(kind):
        return value
    if form is tuple and type(value) is tuple:
        return [_data(item, each, arrays) for item, each in _with_types(value, kind, NoDataError)]
    if isinstance(value, np.dtype) and (form or kind) is np.dtype and value.name in _DTYPES:
        return value.name
    if type(value) is not (form or kind):
        raise NoDataError(f"{type(value).__module__}.{type(value).__qualname__} in the place of {kind}")
    if type(value) is float:
        return value.hex()  # JSON has neither infinity nor all digits
    if type(value) in (bool, str, NoneType) or (type(value) is int and abs(value) < _MAX_INTEGER):
        return value
    if type(value) is np.ndarray and value.dtype.name in _ARRAY_DTYPES:
        return _array_data(value, arrays)
    if (table := numbered_values(type(value))) and value in table:
        return table.index(value)
    if is_dataclass(value):
        return [_data(getattr(value, name), each, arrays) for name, each in _types(kind).items()]
    raise NoDataError(f"{type(value).__module__}.{type(value).__qualname__}")


def _array_data(value: np.ndarray, arrays: list[bytes]) -> list[Any]:
    is_repeated = value.ndim == 1 and len(value) > 0 and value.strides == (0,)
    content = np.ascontiguousarray(value[:1] if is_repeated else value).tobytes()
    arrays.append(content + bytes(-len(content) % _ALIGNMENT_BYTES))
    return [value.dtype.name, list(value.shape), is_repeated]


def _value(data: Any, kind: Any, arrays: _Arrays) -> Any:
    """Return the value that JSON of `_data` describes, of the annotated kind; refuse anything else."""
    form = get_origin(kind)
    if form in (Union, UnionType):
        return None if data is None else _value(data, _optional(kind), arrays)
    if form is Literal and any(type(data) is type(each) and data == each for each in get_args(kind)):
        return data
    if form is tuple and type(data) is list:
        return tuple(_value(item, each, arrays) for item, each in _with_types(data, kind, DamagedError))
    if (form or kind) is np.dtype and data in _DTYPES:
        return jnp.dtype(data)
    if kind is float and type(data) is str:
        return _float(data)
    if kind is np.ndarray:
        return arrays.array(data)
    if kind in (bool, str, int, NoneType) and type(data) is kind:
        if kind is not int or abs(data) < _MAX_INTEGER:
            return data
    elif isinstance(kind, type) and (table := numbered_values(kind)):
        if type(data) is int and 0 <= data < len(table):
            return table[data]
    elif is_dataclass(form or kind) and type(data) is list and len(data) == len(_types(kind)):
        types = _types(kind)
        members = {name: _value(item, types[name], arrays) for name, item in zip(types, data, strict=True)}
        return (form or kind)(**members)
    raise DamagedError(f"it describes no value: no {kind}")


def _float(data: str) -> float:
    try:
        value = float.fromhex(data)
    except (ValueError, OverflowError) as error:
        raise DamagedError("it describes no value: no number") from error
    if math.isnan(value):
        raise DamagedError("it describes no value: NaN")
    return value


def _optional(kind: Any) -> Any:
    """Return the type of which a union with None is."""
    kinds = [each for each in get_args(kind) if each is not NoneType]
    if len(kinds) != 1 or len(get_args(kind)) != 2:
        raise NoDataError(f"{kind}: one type or None")
    return kinds[0]


def _with_types(items: Any, kind: Any, refused: Callable[[str], Exception]) -> list[tuple[Any, Any]]:
    """Return the items of a tuple with their types."""
    kinds = get_args(kind)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = kinds[:1] * len(items)
    if len(kinds) != len(items):
        raise refused(f"a tuple of {len(items)} in the place of {kind}")
    return list(zip(items, kinds, strict=True))


@cache
def _types(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, by name, in place of type variables those of the annotation."""
    form = get_origin(kind) or kind
    hints = get_type_hints(form)
    variables = dict(zip(getattr(form, "__parameters__", ()), get_args(kind), strict=False))
    return {item.name: _with_variables(hints[item.name], variables) for item in fields(form) if item.init}


def _with_variables(kind: Any, variables: dict[Any, Any]) -> Any:
    if isinstance(kind, TypeVar):
        return variables[kind]
    parameters = getattr(kind, "__parameters__", ())
    return kind[tuple(variables[each] for each in parameters)] if parameters else kind


class _Arrays:
    """Arrays of a content, one behind the other."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 0

    def array(self, data: Any) -> np.ndarray:
        """Return the next array."""
        match data:
            case [str(name), list(shape), bool(is_repeated)] if name in _ARRAY_DTYPES and _is_shape(shape, is_repeated):
                return np.broadcast_to(self._next(np.dtype(name), [1] if is_repeated else shape), shape)
        raise DamagedError("it describes no value: no array")

    def _next(self, dtype: np.dtype[Any], shape: list[int]) -> np.ndarray:
        num_bytes = prod(shape) * dtype.itemsize
        if self._position + num_bytes > len(self._content):
            raise DamagedError("it describes no value: an array is cut off")
        content = self._content[self._position : self._position + num_bytes]
        self._position += num_bytes + -num_bytes % _ALIGNMENT_BYTES
        if dtype == np.bool_ and content.strip(b"\0\1"):
            raise DamagedError("it describes no value: no truth values")
        return np.frombuffer(content, dtype).reshape(shape)

    def check_end(self) -> None:
        """Refuse a content with more than the arrays."""
        if self._position != len(self._content):
            raise DamagedError("it describes no value: there are further arrays")


def _is_shape(shape: list[Any], is_repeated: bool) -> bool:
    are_sizes = len(shape) <= _MAX_RANK and all(type(n) is int and 0 <= n <= _MAX_ELEMENTS for n in shape)
    return are_sizes and prod(shape) <= _MAX_ELEMENTS and (not is_repeated or (len(shape) == 1 and shape[0] > 0))


Value = TypeVar("Value")

_DATA, _ARRAYS = "data", "arrays"
_LEVEL = 1  # of compression: most arrays repeat few numbers
# The fields of a plan are those of its type, which is part of its key.
PLAN_FILE = FileKind(PLAN, {_DATA: Section("a value by its type"), _ARRAYS: Section()})
_LOG = Log("cache")


class StoredValues:
    """Values of one compilation in the directory of a cache.

    Args:
        directory: the directory.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self._digests = value_digests(compiler_state())
        self._computed: list[NewFile] = []
        self._read: list[str] = []  # digests of the values that were taken from the directory

    def recall(
        self, key: Hashable, compute: Callable[[], Value], kind: Any, is_valid: Callable[[Value], bool]
    ) -> Value:
        """Return the value of a key, from `compute` if the directory has no valid one of type `kind`."""
        try:
            digest = self._digests.of(key)
        except NoDigestError as error:
            _LOG.debug("a plan is not stored: %s", error)
            return compute()
        file = self._directory.read(digest, PLAN_FILE)
        if file is not None:
            try:
                stored = _value_of(file, kind, is_valid)
                self._read.append(digest)
                return stored
            except FileError as error:
                self._directory.discard(digest, PLAN_FILE, error)
        value = compute()
        self._add(digest, value, kind)
        return value

    def _add(self, digest: str, value: Any, kind: Any) -> None:
        try:
            data, arrays = value_data(value, kind)
        except NoDataError as error:
            _LOG.debug("a plan is not stored: %s", error)
            return
        self._computed.append(
            NewFile(PLAN_FILE, digest, {_DATA: section_of(data, _LEVEL), _ARRAYS: compress(arrays, _LEVEL)})
        )

    @property
    def are_used(self) -> bool:
        """Whether values were taken from the directory."""
        return bool(self._read)

    def discard(self, problem: str) -> None:
        """Remove the values that were taken from the directory."""
        for digest in self._read:
            self._directory.discard(digest, PLAN_FILE, DamagedError(problem))

    def write(self) -> None:
        """Write the values that were computed."""
        if self._computed:
            self._directory.write(*self._computed)


def _value_of(file: Sealed, kind: Any, is_valid: Callable[[Value], bool]) -> Value:
    value: Value = value_of_data(file.data(_DATA), decompress(file.sections[_ARRAYS]), kind)
    if not is_valid(value):
        raise DamagedError("it has a value of another key")
    return value


def with_stored_values(cache_dir: str | None, compute: Callable[[], Value]) -> Value:
    """Return a result whose plans and costs are taken from the directory of a cache, and new ones stored there.

    Where stored plans lead to an error, they are computed again: a file may have the right form and other numbers.

    Args:
        cache_dir: see `requested_directory`.
        compute: computes the result.
    """
    directory = requested_directory(cache_dir)
    if directory is None:
        return compute()
    try:
        values = StoredValues(directory)
    except NoDigestError as error:
        _LOG.info("plans are not stored: %s", error)
        return compute()
    try:
        with values_stored_in(values):
            return compute()
    except Exception:
        if not values.are_used:
            raise
        drop_values()
        result = compute()  # raises the same error, if not for the plans
        values.discard("it has other numbers than the compiler computes")
        return result
    finally:  # also of a program that does not fit, of which the next one may have parts
        values.write()
