"""Checks of a call's arguments, after JAX has refused them, and of settings of `ipu.jit` that name arguments.

Input: a function, the arguments of a call, and the static and donated ones of them. Output: nothing, or an error that
names the argument. Errors are also of the class that Python or JAX raises for the same mistake.

A callable whose class has a method `__check_arguments__`, with the parameters of `__call__`, has it called by `ipu.jit`
with the arguments of each call before they become arrays: JAX narrows 64-bit NumPy arrays without a word.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.runtime.errors import (
    ArgumentOverflowError,
    ArgumentTypeError,
    ArgumentValueError,
    DeletedArgumentError,
    file_name,
    is_installed,
)
from ipujax.runtime.signatures import check_call, describe, shown_signature
from ipujax.runtime.target import nearest

_METHOD = "__check_arguments__"


def own_check(fun: Callable[..., Any]) -> Callable[..., None] | None:
    """Return the check of a callable, of the one that a `functools.partial` or a bound `__call__` is of; else None."""
    if isinstance(fun, partial):
        check = own_check(fun.func)
        return None if check is None else partial(check, *fun.args, **fun.keywords)
    owner = fun.__self__ if isinstance(fun, MethodType) and fun.__name__ == "__call__" else fun
    return getattr(owner, _METHOD) if hasattr(type(owner), _METHOD) else None


_AN_ARRAY = "a jax or numpy array of a dtype JAX has, or a Python number"
_SHAPES = (jax.ShapeDtypeStruct, jax.core.ShapedArray)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def has_tracer(leaves: Sequence[Any]) -> bool:
    """Return whether a transformation of JAX is tracing through the call with these leaves."""
    kinds = set(map(type, leaves))  # few: this is on the path of every call, and `set` loops in C
    return any(issubclass(kind, jax.core.Tracer) for kind in kinds)


# --- settings ---------------------------------------------------------------------------------------------------------


def as_numbers(setting: str, value: Any, who: str = "ipu.jit", of: str = "positions of arguments") -> tuple[int, ...]:
    """Return positions of arguments, or other integers, as a tuple.

    Args:
        setting: name of the setting, for the message.
        value: an integer, several, or None for none.
        who: public function that has the setting, for the message.
        of: noun for the integers, for the message.

    Raises:
        ArgumentTypeError: anything else, booleans included.
    """
    return _several(setting, value, int, f"a whole number or several: the {of}, from 0", who)


def as_names(setting: str, value: Any) -> tuple[str, ...]:
    """Return names of arguments, a string, several or None, as a tuple; refuse anything else in a `setting`."""
    return _several(setting, value, str, "a string or several: the names of arguments")


def _several(setting: str, value: Any, kind: type, expected: str, who: str = "ipu.jit") -> tuple[Any, ...]:
    # A string is a sequence of strings: "x" is one name, and "xy" too. An array may be a number, not several.
    is_single = isinstance(value, str) or hasattr(value, "__array__") or not isinstance(value, Iterable)
    items = () if value is None else (value,) if is_single else tuple(value)
    converted = [_as_index(item) if kind is int else item for item in items]
    if not all(isinstance(item, kind) for item in converted):
        raise ArgumentTypeError(f"{setting} of {who} cannot be {value!r}", expected=expected, got=_kinds(value, items))
    return tuple(converted)


def _kinds(value: Any, items: Sequence[Any]) -> str:
    item_types = ", ".join(sorted({type(item).__name__ for item in items}))
    return item_types if len(items) == 1 and items[0] is value else f"{type(value).__name__} of {item_types}"


def whole_number(setting: str, value: Any, minimum: int, expected: str | None = None) -> int:
    """Return an integer of at least `minimum`.

    Args:
        setting: name of the setting, for the message.
        value: any object with `__index__` but booleans.
        minimum: smallest integer that is accepted.
        expected: description of accepted values, for the message.

    Raises:
        ArgumentValueError: anything else.
    """
    number = _as_index(value)
    if number is None or number < minimum:
        raise ArgumentValueError(setting, expected=expected or f"a whole number from {minimum}", got=repr(value))
    return number


def _as_index(value: Any) -> int | None:
    try:  # arrays of several elements have `__index__` too, which raises
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def floating_dtype(setting: str, dtype: Any) -> Any:
    """Return a floating-point dtype of a dtype, its name or its scalar type; refuse anything else in a `setting`."""
    try:
        canonical = jnp.dtype(dtype)
    except TypeError:
        canonical = None
    # `jnp.floating` includes bfloat16 and the float8 types, which numpy's own hierarchy lacks.
    if canonical is None or not jnp.issubdtype(canonical, jnp.floating):
        raise ArgumentTypeError(setting, expected="a floating-point dtype, as jnp.float32", got=repr(dtype))
    return canonical


def by_position(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, by position where the signature allows it; unchanged if they do not fit it."""
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call raises the error
        return args, kwargs
    return bound.args, bound.kwargs


def check_function(fun: object, hint: str | None = None) -> None:
    """Refuse an object that `ipu.jit` cannot compile: no callable, a generator function, a static or class method."""
    problem = "ipu.jit needs a function"
    expected = "a callable"
    if isinstance(fun, staticmethod | classmethod):
        decorator = type(fun).__name__
        problem = f"ipu.jit was given a {decorator}"
        hint = f"@{decorator} above @ipu.jit"
    elif inspect.isgeneratorfunction(fun):
        problem = f"{function_name(fun)} is a generator function, which returns no arrays"
        expected = "a function of arrays"
        hint = "return a list of the values that it yields"
    elif callable(fun):
        return
    raise ArgumentTypeError(problem, expected=expected, got=repr(fun), hint=hint)


def check_settings(fun: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Refuse settings of arguments that the function lacks, and arguments that are both static and donated."""
    # A function without a signature is not checked. Positions count from the end if negative.
    donate_argnums, donate_argnames, static_argnums, static_argnames = (
        settings[name] or () for name in ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
    )
    is_set = donate_argnums or donate_argnames or static_argnums or static_argnames
    signature = _signature(fun) if is_set else None
    if signature is None:
        return
    parameters = _parameters(fun)
    positional = positional_parameters(fun)
    kinds = {p.kind for p in parameters}
    who = function_name(fun)
    signature_text = shown_signature(who, signature)
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        for setting, numbers in (("donate_argnums", donate_argnums), ("static_argnums", static_argnums)):
            for number in numbers:
                if not -len(positional) <= number < len(positional):
                    raise ArgumentValueError(
                        f"{setting} names an argument that {who} lacks",
                        expected=f"positions in {signature_text}, of {len(positional)} that can be given by position",
                        got=number,
                        hint="static_argnames for one that is given by name" if "static" in setting else None,
                    )
    names = [p.name for p in parameters]
    nameless = {p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)}
    for setting, argnames in (("donate_argnames", donate_argnames), ("static_argnames", static_argnames)):
        for name in argnames:
            problem = f"{setting} names an argument that {who} lacks"
            hint = nearest(name, names)
            if name in nameless:
                problem = f"{setting} names an argument that {who} takes by position alone"
                hint = f"{setting.replace('names', 'nums')}, its position"
            elif name in names or inspect.Parameter.VAR_KEYWORD in kinds:
                continue
            raise ArgumentValueError(problem, expected=signature_text, got=repr(name), hint=hint)
    static = {_name_at(positional, n) for n in static_argnums} | set(static_argnames)
    for donated in (*(_name_at(positional, n) for n in donate_argnums), *donate_argnames):
        if donated in static:
            raise ArgumentValueError(
                f"argument {donated} of {who} is both static and donated",
                expected="an argument that is static (compiled in), donated (an array), or neither",
                got=f"donated: {', '.join(map(str, (*donate_argnums, *donate_argnames)))}, "
                f"static: {', '.join(sorted(map(str, static)))}",
                hint=f"leave {donated} out of what is donated",
            )


def _name_at(names: Sequence[str], number: int) -> str | int:
    """Return the name at a position, or the position itself where only a starred parameter has it."""
    return names[number] if -len(names) <= number < len(names) else number


# --- calls ------------------------------------------------------------------------------------------------------------


def check_arguments(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int] | None,
    static_argnames: Sequence[str] | None,
    shapes: bool = False,
) -> None:
    """Refuse arguments beside the signature, static ones that are not hashable, and leaves that are not arrays.

    Args:
        fun: any callable.
        args: positional arguments.
        kwargs: keyword arguments.
        static_argnums: positions of static arguments.
        static_argnames: names of static arguments.
        shapes: whether leaves may be `jax.ShapeDtypeStruct`s.

    Raises:
        ArgumentTypeError: with function, argument and path of the leaf, and the static argument that would allow it.
        ArgumentValueError: a static argument that cannot be hashed.
        DeletedArgumentError: an array that was donated to an earlier call.
    """
    _check_call(fun, args, kwargs)  # first: names of arguments beside the signature mean nothing
    names, static = argument_places(fun, args, static_argnums, static_argnames)
    keywords = static_keywords(fun, static_argnums, static_argnames)
    arguments = [(names[n], value, n in static, f"static_argnums={n}") for n, value in enumerate(args)]
    arguments += [(name, value, name in keywords, f"static_argnames={name!r}") for name, value in kwargs.items()]
    for name, value, is_static, setting in arguments:
        if is_static:
            _check_static(fun, name, value)
        else:
            _check_leaves(fun, name, value, setting, shapes)


def argument_places(
    fun: Callable[..., Any],
    args: Sequence[Any],
    static_argnums: Sequence[int] | None,
    static_argnames: Sequence[str] | None,
) -> tuple[list[str], set[int]]:
    """Return the name of each positional argument of a call, and the positions of static ones."""
    parameters = positional_parameters(fun)
    starred = next((p.name for p in _parameters(fun) if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    names = parameters[: len(args)]
    for n in range(len(args) - len(parameters)):
        names.append(f"arg{n + len(parameters)}" if starred is None else f"{starred}[{n}]")
    # JAX ignores positions beyond the arguments of a call: a default may be in use there.
    static = {n % len(args) for n in static_argnums or () if -len(args) <= n < len(args)}
    by_name = static_argnames or () if static_argnums is None else ()
    return names, static | {n for n, name in enumerate(names) if name in by_name}


def donated_places(
    fun: Callable[..., Any], args: Sequence[Any], numbers: Sequence[int] | None, names: Sequence[str] | None
) -> tuple[set[int], set[str]]:
    """Return the positions of a call's donated arguments, and the names of those that would be passed by name."""
    from_front = None if numbers is None else [n for n in numbers if n >= 0]  # JAX ignores negative ones
    _, places = argument_places(fun, args, from_front, names)
    return places, static_keywords(fun, numbers, names)


def static_keywords(
    fun: Callable[..., Any], static_argnums: Sequence[int] | None, static_argnames: Sequence[str] | None
) -> set[str]:
    """Return the names of keyword arguments that are static."""
    parameters = positional_parameters(fun)
    # As JAX does: if only one of the settings is set, the other follows from the signature; if both are, none does.
    numbers = static_argnums or () if static_argnames is None else ()
    by_number = {parameters[n] for n in numbers if 0 <= n < len(parameters)}  # JAX names none at a negative position
    return {*(static_argnames or ()), *by_number}


def dynamic_arguments(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Sequence[int] | None,
    static_argnames: Sequence[str] | None,
) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the arguments of a call that are not static, by position and by name."""
    _, static = argument_places(fun, args, static_argnums, static_argnames)
    names = static_keywords(fun, static_argnums, static_argnames)
    positional = {n: x for n, x in enumerate(args) if n not in static}
    return positional, {name: x for name, x in kwargs.items() if name not in names}


def _check_call(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    # The signature of a wrapper is its own: it may have other parameters than the function inside.
    signature = _signature(fun, follow_wrapped=False)
    if signature is not None:
        check_call(function_name(fun), signature, args, kwargs)


def _check_static(fun: Callable[..., Any], name: str, value: Any) -> None:
    """Refuse a static argument that cannot be hashed: programs are looked up by the values of these."""
    try:
        hash(value)
    except TypeError as error:
        raise ArgumentValueError(
            f"static argument {name} of {function_name(fun)} cannot be hashed",
            expected="a hashable value, by which compiled versions are looked up",
            got=f"{type(value).__name__} {value!r:.60} ({error})",
            hint=_hint_for_both(name, value)
            or "pass a tuple for a list, or leave it out of the static arguments if it holds arrays",
        ) from error


def _hint_for_both(name: str, value: Any) -> str:
    """Hint for an argument of arrays and other values, such as a module of Equinox; "" for any other."""
    # Arrays cannot be static, nor other values be traced.
    if len(set(map(_is_array, jax.tree.leaves(value)))) < 2:
        return ""
    separation = f"arrays, rest = eqx.partition({name}, eqx.is_array)"
    return f"pass its arrays alone, and close over the rest: {separation}; in the function eqx.combine(arrays, rest)"


def _is_array(leaf: Any) -> bool:
    try:
        jax.typeof(leaf)
    except (TypeError, ValueError, OverflowError):
        return isinstance(leaf, _SHAPES)
    return True


def _hint_for_leaves(name: str, value: Any, setting: str) -> str:
    """Hint for an argument with a leaf that is no array; `setting` makes it static, if it can be hashed."""
    try:
        hash(value)
    except TypeError:
        return _hint_for_both(name, value) or f"close over {name}, which cannot be hashed, or convert it to an array"
    return f"pass {setting} to ipu.jit if it is a setting, or convert it to an array"


def _check_leaves(fun: Callable[..., Any], name: str, value: Any, setting: str, shapes: bool) -> None:
    hint = _hint_for_leaves(name, value, setting)
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        shown_array(function_name(fun), f"{name}{jax.tree_util.keystr(path)}", leaf, hint, shapes=shapes)


def short_type(aval: Any) -> str:
    """Return shape and dtype of an abstract value, `float32[8]`, without the axes of a mesh in its type."""
    return re.sub(r"@(\([^)]*\)|\w+)", "", aval.str_short())


def shown_array(who: str, place: str, leaf: Any, hint: str, expected: str = _AN_ARRAY, *, shapes: bool = False) -> str:
    """Return shape and dtype of a leaf of an argument, `float32[8]`; refuse one that is not an array, or deleted."""
    check_not_deleted(who, place, leaf)
    if isinstance(leaf, _SHAPES) and not shapes:
        problem = f"argument {place} of {who} is the shape of an array, which has no values"
        remedy = "an array, as jnp.zeros(shape, dtype) makes; .lower(...) and .eval_shape(...) take shapes"
        raise ArgumentTypeError(problem, expected=expected, got=repr(leaf), hint=remedy)
    try:
        aval = leaf if isinstance(leaf, jax.core.ShapedArray) else jax.typeof(leaf)
        return short_type(aval)
    except OverflowError as error:
        problem = f"argument {place} of {who} is too large a number"
        remedy = "a float, or an array of a wider dtype"
        raise ArgumentOverflowError(problem, expected=expected, got=f"{leaf} ({error})", hint=remedy) from error
    except (TypeError, ValueError) as error:  # the latter of masked arrays
        dtype = f" of {leaf.dtype}" if hasattr(leaf, "dtype") else ""
        got = f"{type(leaf).__name__}{dtype} {' '.join(repr(leaf).split()):.60}"
        if is_dataclass(leaf):
            hint = f"jax.tree_util.register_dataclass({type(leaf).__name__}) if it has arrays; or {hint}"
        problem = f"argument {place} of {who} is not an array"
        raise ArgumentTypeError(problem, expected=expected, got=got, hint=hint) from error


def check_not_deleted(who: str, place: str, leaf: Any) -> None:
    """Refuse an array that was donated to an earlier call; `place` is its Python expression."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        raise DeletedArgumentError(
            f"argument {place} of {who} has been deleted, most often by donating it to an earlier call",
            expected="an array that was not donated",
            got=f"deleted {describe(leaf)}",
            hint="pass the result of the earlier call that replaces it, or leave it out of donate_argnums",
        )


# --- functions and values in words ------------------------------------------------------------------------------------


def positional_parameters(fun: Callable[..., Any]) -> list[str]:
    """Return the names of parameters that can be positional; none where a function has no signature."""
    return [p.name for p in _parameters(fun) if p.kind in _POSITIONAL]


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    signature = _signature(fun)
    return [] if signature is None else list(signature.parameters.values())


def _signature(fun: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature | None:
    try:
        return inspect.signature(fun, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):  # builtins and some C functions have no signature
        return None


def function_name(fun: Callable[..., Any]) -> str:
    """Return a name for messages: that of the innermost function of a `functools.partial`, or of the class."""
    inner = fun
    while not hasattr(inner, "__name__") and hasattr(inner, "func"):
        inner = inner.func
    return getattr(inner, "__name__", None) or type(inner).__name__


def function_file(fun: Callable[..., Any]) -> str:
    """Return the name of the file or cell that defines a function; "" for installed packages and C functions."""
    # Decorators of libraries, partials and bound methods hide the user's function.
    inner: Any = inspect.unwrap(fun)
    while isinstance(inner, partial | MethodType):
        inner = inspect.unwrap(inner.func if isinstance(inner, partial) else inner.__func__)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return "" if code is None or is_installed(code.co_filename) else file_name(code.co_filename)


def check_optimizer(optimizer: Any, who: str) -> None:
    """Refuse anything but an optimiser, a named tuple with `init` and `update`, for wrapper `who` of `ipu.optim`."""
    if not all(hasattr(optimizer, name) for name in ("init", "update", "_replace")):
        raise ArgumentTypeError(
            f"ipu.optim.{who} needs an optimiser",
            expected="an optax.GradientTransformation, as optax.adam(1e-3) makes",
            got=repr(optimizer),
        )
