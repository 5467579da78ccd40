"""Readings of Python values: a label and the values inside, by which a value is compared in another process.

Input: a value. Output: its `Reading`. Objects are read by content: classes with all their members, functions with their
code, closure and defaults, instances with their class and state. A global of an installed distribution is its name and
the version of the distribution.
Limits: `NoDigestError` for values whose content Python does not show, such as locks, files and generators, and for code
that reads files, clocks or names made at run time.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import jax
import numpy as np

from ipujax.lowering.digests.code_reads import OURS, PYTHON, CodeReads, distribution_of, is_pure, reads_of

ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented)})
# Bases with a content of their own.
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, int, float, complex, str, bytes)
# Builtins whose results are not in their arguments: files, the terminal, names and code that are made at run time.
_UNREADABLE_BUILTINS = frozenset(
    {"__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "locals", "open", "vars"}
)
# Attributes that lead from a function or frame to names that its code does not have.
_UNREADABLE_ATTRIBUTES = frozenset(
    {"__builtins__", "__globals__", "__subclasses__", "f_builtins", "f_globals", "f_locals"}
)
# Installed packages whose values depend on their arguments alone. Any function of another one may read files.
_PURE_PACKAGES = frozenset(
    {
        *("chex", "diffrax", "distrax", "einops", "equinox", "flax", "haiku", "jax", "jaxlib", "jaxopt", "jaxtyping"),
        *("jraph", "lineax", "ml_dtypes", "numpy", "opt_einsum", "optax", "optimistix", "scipy", OURS),
    }
)
# Of these: functions that read files, or draw from a state of the process.
_UNREADABLE_OF = re.compile(
    r"numpy(\..*)?\.(fromfile|fromregex|genfromtxt|load|loadtxt|memmap|open_memmap|random|DataSource)(\..*)?"
    r"|jax\.numpy(\..*)?\.load|scipy\.(datasets|io)(\..*)?|equinox(\..*)?\.tree_deserialise_leaves"
    r"|flax\.(io|training\.checkpoints)(\..*)?"
)
# Functions whose results are attributes that their arguments name.
READERS_BY_NAME = (getattr, inspect.getmembers, operator.attrgetter, operator.methodcaller)
# Members of a class that Python or its libraries add, and that no code of its own reads.
_ADDED_MEMBERS = frozenset({"__dict__", "__slotnames__", "__static_attributes__", "__weakref__", "_abc_impl"})
_ADDRESS_MARKS = (" at 0x", " object at ")
# Packages whose objects have a text of their contents.
_WITH_TEXTS = frozenset({"jax", "jaxlib", "ml_dtypes"})


class NoDigestError(ValueError):
    """A value without a digest; the text says which."""


class Reading(NamedTuple):
    """One value, without the values inside it.

    Args:
        label: kind of the value, and all of its content that is not another value.
        children: values inside, in order.
        reads: names that its code reads, of a function.
    """

    label: str
    children: Sequence[Any] = ()
    reads: CodeReads = CodeReads()


def reading_of(value: Any) -> Reading:
    """Return what the digest of a Python value is made of: a label, and the values inside it, which are read next.

    Not called for numbers, texts and other atoms, which are digested as they are.

    Raises:
        NoDigestError: the value has a content that Python does not show; the text names its type.
    """
    kind = type(value)
    reader = _READERS.get(kind)
    if reader is not None:
        return reader(value)
    if is_global_of_distribution(value):
        return Reading(_global_name(value))
    for base, read_of_base in _READERS_OF_BASES:
        if isinstance(value, base):
            return read_of_base(value)
    return _read_object(value)


def is_ours(value: Any) -> bool:
    """Return whether a value is a dataclass of ipujax: none of them is inside itself."""
    kind = type(value)
    return dataclasses.is_dataclass(kind) and kind.__module__.startswith(f"{OURS}.")


def is_global_of_distribution(value: Any) -> bool:
    """Return whether a function, class or object is a global of an installed distribution, under its own name."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or distribution_of(module) is None:
        return False
    member: Any = sys.modules.get(module)
    for part in name.split("."):
        member = getattr(member, part, None)
    return member is value and _has_code_of_distribution(value)


def _has_code_of_distribution(value: Any) -> bool:
    """Return whether no function of the user's is inside: a wrapper has the name of what it replaces."""
    while value is not None and not isinstance(value, type):
        if isinstance(value, FunctionType) and distribution_of(str(value.__globals__.get("__name__"))) is None:
            return False
        value = getattr(value, "__wrapped__", None)
    return True


def _global_name(value: Any) -> str:
    """Return the name of a global of a distribution, with version; refuse one that reads files or states."""
    module: str = value.__module__
    name = getattr(value, "__qualname__", None) or value.__name__
    is_builtin = module == "builtins" and name in _UNREADABLE_BUILTINS
    if is_builtin or _may_read_more(module) or _UNREADABLE_OF.fullmatch(f"{module}.{name}"):
        raise NoDigestError(_not_in_program(f"{module}.{name}"))
    return f"{distribution_of(module)}:{module}.{name}"


def _not_in_program(name: str) -> str:
    return f"its code uses {name}, whose results are not in the program"


def _may_read_more(module: str) -> bool:
    """Return whether values of a module of a distribution may depend on more than their arguments, such as files."""
    is_of_python = distribution_of(module) == PYTHON
    return not (is_pure(module) if is_of_python else module.partition(".")[0] in _PURE_PACKAGES)


# --- containers and arrays ---


def _read_array(array: np.ndarray) -> Reading:
    if array.dtype.hasobject:  # its bytes are addresses
        return Reading(f"array of objects {array.shape}", array.ravel().tolist())
    content = np.ascontiguousarray(array).tobytes()
    return Reading(f"array {array.shape} {array.strides}", (array.dtype, content, *_own_state(array, np.ndarray)))


def _own_state(value: Any, base: type) -> tuple[Any, ...]:
    """Return the class of a value and its attributes; nothing for `base` itself, whose content is read."""
    return () if type(value) is base else (type(value), dict(getattr(value, "__dict__", {})))


def _read_partial(value: functools.partial[Any]) -> Reading:
    kind_and_state = _own_state(value, functools.partial) or (vars(value),)
    return Reading("partial", (value.func, value.args, value.keywords, *kind_and_state))


def _read_error(error: BaseException) -> Reading:
    return Reading("exception", (type(error), error.args, error.__cause__, vars(error)))


def _refuse_ufunc(function: np.ufunc) -> Reading:
    raise NoDigestError(f"{function.__name__} has no code in Python")


def _read_tree(tree: Any) -> Reading:
    return Reading("pytree", (tree.node_data(), *tree.children()))


def _read_items(mapping: Mapping[Any, Any]) -> Reading:
    return Reading("dict", [part for item in mapping.items() for part in item])


# --- code ---


def _read_function(function: FunctionType) -> Reading:
    """Return what the digest of a function is made of: code, defaults, closure, and the globals that its code reads.

    A function of an installed package is its name, as the package's version is part of every digest.

    Raises:
        NoDigestError: its code reads more than it names, such as all globals.
    """
    defaults = (function.__defaults__, function.__kwdefaults__, dict(function.__dict__), function.__annotations__)
    closure = function.__closure__ or ()
    # A decorated function may have the name and module of another.
    module = str(function.__globals__.get("__name__"))
    if distribution_of(module) is not None:
        if is_global_of_distribution(function):
            return Reading(_global_name(function))
        if _may_read_more(module):
            raise NoDigestError(_not_in_program(f"{module}.{function.__qualname__}"))
        return Reading(f"function of {module}", (function.__code__, *defaults, *closure))
    reads = reads_of(function.__code__)
    for name in sorted(reads.attributes & _UNREADABLE_ATTRIBUTES):
        raise NoDigestError(f"{function.__qualname__} reads {name}, which has more than its code names")
    children: list[Any] = [function.__code__, *defaults, *closure]
    for name in sorted(reads.global_names):
        children += (name, _global_of(function, name))
    for level, name, names in sorted(reads.imports):
        children += _imported_values(function, level, name, names)
    return Reading(f"function {module}.{function.__qualname__}", children, reads)


def _global_of(function: FunctionType, name: str) -> Any:
    """Return a global of a function by its name; None for one that does not exist yet."""
    if name in function.__globals__:
        return function.__globals__[name]
    if name in _UNREADABLE_BUILTINS:
        raise NoDigestError(f"{function.__qualname__} calls {name}, whose results are not in the program")
    return getattr(sys.modules["builtins"], name, None)


def _imported_values(function: FunctionType, level: int, name: str, names: tuple[str, ...]) -> list[Any]:
    """Return what an `import` inside a function gives it: packages, module, and the values of the names from it.

    Args:
        function: the function.
        level: number of leading dots, 0 for an absolute import.
        name: name of the module.
        names: names after `from … import`.

    Returns:
        The values; a text if the import fails.
    """
    package = function.__globals__.get("__package__") or ""
    try:
        # As the function itself would: what its code reads is known when its modules are.
        module = __import__(name, {"__package__": package}, None, names or ("",), level)
    except ImportError as error:
        return [f"no module {name}: {type(error).__name__}"]
    parts = str(getattr(module, "__name__", name)).split(".")
    packages = [sys.modules.get(".".join(parts[:n])) for n in range(1, len(parts))]
    return [*packages, module, *(getattr(module, each, None) for each in names)]


def _read_class(kind: type) -> Reading:
    if is_global_of_distribution(kind):
        return Reading(_global_name(kind))
    members = [part for item in vars(kind).items() if item[0] not in _ADDED_MEMBERS for part in item]
    return Reading(f"class {kind.__module__}.{kind.__qualname__}", (type(kind), *kind.__bases__, *members))


def _read_property(value: property) -> Reading:
    return Reading("property", (value.fget, value.fset, value.fdel))


def _read_builtin(function: BuiltinFunctionType) -> Reading:
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        if is_global_of_distribution(function):
            return Reading(_global_name(function))
        raise NoDigestError(f"{function.__module__}.{function.__qualname__} has no code in Python")
    return Reading(f"method {function.__name__}", (owner,))


def _read_descriptor(value: Any) -> Reading:
    return Reading(f"{type(value).__name__} {value.__objclass__.__qualname__}.{value.__name__}")


def _read_cell(cell: CellType) -> Reading:
    try:
        return Reading("cell", (cell.cell_contents,))
    except ValueError:  # nothing is in it yet
        return Reading("empty cell")


def check_module(module: ModuleType) -> None:
    """Refuse an installed module whose functions read files or states of the process.

    Raises:
        NoDigestError: the text names it.
    """
    name = module.__name__
    if _may_read_more(name) or _UNREADABLE_OF.fullmatch(name):
        raise NoDigestError(_not_in_program(f"the module {name}"))


# --- objects ---


def _read_enum(member: enum.Enum) -> Reading:
    kind = type(member)
    state = {name: value for name, value in vars(member).items() if name not in ("__objclass__", "_sort_order_")}
    return Reading(f"member {member.name}", (kind, state))


def _read_object(value: Any) -> Reading:
    """Return what the digest of an object of any class is made of: its class and its state.

    State is a content that its class has from a base (of a `list`, its items), attributes, and slots.
    """
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    is_installed = distribution_of(kind.__module__) is not None
    if is_installed and hasattr(value, "__wrapped__") and not isinstance(value, type):
        return Reading(f"{name} around", (value.__wrapped__,))  # a function of jax.jit, ipu.jit, functools.cache
    if is_installed and dataclasses.is_dataclass(kind):  # its attributes may include values that are computed later
        fields = [getattr(value, field.name) for field in dataclasses.fields(kind)]
        return Reading("dataclass", (kind, *fields))
    if kind.__module__.partition(".")[0] in _WITH_TEXTS:
        text = _text_of_contents(value)
        if text is not None:
            return Reading(f"{name}:{text}")
    return Reading("object", (kind, *_builtin_content(value), *_attributes_and_slots(value, name)))


def _text_of_contents(value: Any) -> str | None:
    """Return the text of an object whose class shows its contents; None where it shows an address, or nothing."""
    if not any("__repr__" in vars(base) for base in type(value).__mro__[:-1]):
        return None
    text = repr(value)
    return None if any(mark in text for mark in _ADDRESS_MARKS) else text


def _builtin_content(value: Any) -> list[Any]:
    """Return the content that an object has as a dict, list, number or text."""
    base = next((base for base in _CONTAINERS if isinstance(value, base)), None)
    if base is None:
        return []
    return [list(dict.items(value))] if base is dict else [base(value)]


def _attributes_and_slots(value: Any, name: str) -> list[Any]:
    """Return the state of an object as `pickle` would: attributes and slots, and what its own `__reduce__` gives.

    Args:
        value: the object.
        name: name of its class, for the error.

    Raises:
        NoDigestError: it has a content that Python does not show.
    """
    kind = type(value)
    registered = copyreg.dispatch_table.get(kind)
    try:
        # Refuses an object with a content that Python does not show.
        reduced = registered(value) if registered is not None else value.__reduce_ex__(4)
        state = object.__getstate__(value)  # all attributes, where the class may leave some out
        parts = [reduced] if isinstance(reduced, str) else _read_parts(reduced)
    except Exception as error:  # whatever a user's `__reduce__` raises, and its iterators
        raise NoDigestError(f"a value of type {name} cannot be read: {error}") from error
    is_own = any("__reduce__" in vars(base) or "__reduce_ex__" in vars(base) for base in kind.__mro__[:-1])
    return [state, *parts] if is_own or registered is not None else [state]


def _read_parts(reduced: tuple[Any, ...]) -> list[Any]:
    """Return the parts of a reduction; the fourth and fifth are iterators, over items of a list and of a dict."""
    return [list(part) if n in (3, 4) and part is not None else part for n, part in enumerate(reduced)]


_READERS: dict[type, Callable[[Any], Reading]] = {
    tuple: lambda value: Reading("tuple", value),
    list: lambda value: Reading("list", value),
    dict: _read_items,
    MappingProxyType: _read_items,
    FunctionType: _read_function,
    MethodType: lambda value: Reading("method", (value.__self__, value.__func__)),
    BuiltinFunctionType: _read_builtin,
    property: _read_property,
    staticmethod: lambda value: Reading("staticmethod", (value.__func__,)),
    classmethod: lambda value: Reading("classmethod", (value.__func__,)),
    CellType: _read_cell,
    slice: lambda value: Reading("slice", (value.start, value.stop, value.step)),
    range: lambda value: Reading("range", (value.start, value.stop, value.step)),
    **dict.fromkeys(
        (
            ClassMethodDescriptorType,
            GetSetDescriptorType,
            MemberDescriptorType,
            MethodDescriptorType,
            WrapperDescriptorType,
        ),
        _read_descriptor,
    ),
}
_READERS_OF_BASES: tuple[tuple[type, Callable[[Any], Reading]], ...] = (
    (type, _read_class),
    (enum.Enum, _read_enum),
    (np.dtype, lambda value: Reading(repr(value), (dict(value.metadata or {}),))),
    (np.ndarray, _read_array),
    (np.generic, lambda value: _read_array(np.asarray(value))),
    (functools.partial, _read_partial),
    (BaseException, _read_error),
    (np.ufunc, _refuse_ufunc),
    (type(jax.tree.structure(0)), _read_tree),
)
