"""Checks a call's arguments, once JAX has refused them, and the settings of `ipu.jit` that name arguments.

Input: a function, what it was called with, and which of its arguments are static or donated. Output: nothing, or an
error that names the argument. Errors are also of the class that Python or JAX raises for the same mistake.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
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
from ipujax.runtime.signatures import check_call, described, shown_signature
from ipujax.runtime.target import nearest

_AN_ARRAY = "a jax or numpy array of a dtype JAX has, or a Python number"
_SHAPES = (jax.ShapeDtypeStruct, jax.core.ShapedArray)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def has_tracer(leaves: Sequence[Any]) -> bool:
    """Whether a transformation of JAX is tracing through the call with these leaves."""
    kinds = set(map(type, leaves))  # few, and found without a loop in Python
    return any(issubclass(kind, jax.core.Tracer) for kind in kinds)


# --- settings ---------------------------------------------------------------------------------------------------------


def as_numbers(setting: str, value: Any, who: str = "ipu.jit", of: str = "positions of arguments") -> tuple[int, ...]:
    """Positions of arguments, or other numbers, given as one, several or None.

    Args:
        setting: what they are given for, for the message.
        value: whole numbers.
        who: whose setting it is, for the message.
        of: the things they are positions of, for the message.

    Raises:
        ArgumentTypeError: for anything else, booleans included.
    """
    return _several(setting, value, int, f"a whole number or several: the {of}, from 0", who)


def as_names(setting: str, value: Any) -> tuple[str, ...]:
    """Names of arguments, given as one string, several or None.

    Args:
        setting: what they are given for, for the message.
        value: strings.

    Raises:
        ArgumentTypeError: for anything else.
    """
    return _several(setting, value, str, "a string or several: the names of arguments")


def _several(setting: str, value: Any, kind: type, expected: str, who: str = "ipu.jit") -> tuple[Any, ...]:
    single = isinstance(value, str) or not isinstance(value, Sequence | set | frozenset)
    items = () if value is None else (value,) if single else tuple(value)
    read = [_as_index(item) if kind is int else item for item in items]
    if not all(isinstance(item, kind) for item in read):
        raise ArgumentTypeError(f"{setting} of {who} cannot be {value!r}", expected=expected, got=_kinds(value, items))
    return tuple(read)


def _kinds(value: Any, items: Sequence[Any]) -> str:
    inside = ", ".join(sorted({type(item).__name__ for item in items}))
    return inside if len(items) == 1 and items[0] is value else f"{type(value).__name__} of {inside}"


def whole_number(what: str, value: Any, least: int, expected: str | None = None) -> int:
    """A whole number of at least `least`; booleans are none.

    Args:
        what: the setting, for the message.
        value: anything with `__index__`.
        least: the smallest that is taken.
        expected: what to give, for the message.

    Raises:
        ArgumentValueError: for anything else.
    """
    number = _as_index(value)
    if number is None or number < least:
        raise ArgumentValueError(what, expected=expected or f"a whole number from {least}", got=repr(value))
    return number


def _as_index(value: Any) -> int | None:
    """A whole number, or None; arrays of several have `__index__` too."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def floating_dtype(what: str, dtype: Any) -> Any:
    """A floating-point dtype.

    Args:
        what: the setting, for the message.
        dtype: anything that names a dtype.

    Raises:
        ArgumentTypeError: for anything else.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ArgumentTypeError(what, expected="a floating-point dtype, as jnp.float32", got=repr(dtype))
    return found


def by_position(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, those by position that can be.

    Args:
        fun: any callable; as they are if it has no signature, or takes no such arguments.
        args: given by position.
        kwargs: given by name.
    """
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself says what is wrong
        return args, kwargs
    return bound.args, bound.kwargs


def check_function(fun: object, hint: str | None = None) -> None:
    """Refuses what `ipu.jit` cannot compile.

    Args:
        fun: anything.
        hint: what to try, for the message.

    Raises:
        ArgumentTypeError: for what cannot be called, generators, and `staticmethod`s, whose decorator comes first.
    """
    what, expected = "ipu.jit needs a function", "a callable"
    if isinstance(fun, staticmethod | classmethod):
        decorator = type(fun).__name__
        what, hint = f"ipu.jit was given a {decorator}", f"@{decorator} above @ipu.jit"
    elif inspect.isgeneratorfunction(fun):
        what, expected = f"{function_name(fun)} is a generator: what it yields is no array", "a function of arrays"
        hint = "return a list of what it yields"
    elif callable(fun):
        return
    raise ArgumentTypeError(what, expected=expected, got=repr(fun), hint=hint)


def check_settings(
    fun: Callable[..., Any],
    donate_argnums: Sequence[int],
    donate_argnames: Sequence[str],
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
) -> None:
    """Refuses settings that name no argument of the function, or make a static one donated.

    Args:
        fun: any callable; one without a signature takes everything.
        donate_argnums: positions of donated arguments, from the end if negative.
        donate_argnames: names of donated ones.
        static_argnums: positions of static ones.
        static_argnames: names of static ones.

    Raises:
        ArgumentValueError: naming the setting and the function's arguments.
    """
    signature = _signature(fun)
    if signature is None:
        return
    parameters, given = _parameters(fun), positional_parameters(fun)
    kinds = {p.kind for p in parameters}
    who = function_name(fun)
    shown = shown_signature(who, signature)
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        for setting, numbers in (("donate_argnums", donate_argnums), ("static_argnums", static_argnums)):
            for number in numbers:
                if not -len(given) <= number < len(given):
                    raise ArgumentValueError(
                        f"{setting} names an argument that {who} lacks",
                        expected=f"positions in {shown}, of {len(given)} that can be given by position",
                        got=number,
                        hint="static_argnames for one that is given by name" if "static" in setting else None,
                    )
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        names = [p.name for p in parameters]
        for setting, given_names in (("donate_argnames", donate_argnames), ("static_argnames", static_argnames)):
            for name in given_names:
                if name not in names:
                    what, hint = f"{setting} names an argument that {who} lacks", nearest(name, names)
                    raise ArgumentValueError(what, expected=shown, got=repr(name), hint=hint)
    static = {_name_at(given, n) for n in static_argnums} | set(static_argnames)
    for donated in (*(_name_at(given, n) for n in donate_argnums), *donate_argnames):
        if donated in static:
            raise ArgumentValueError(
                f"argument {donated} of {who} is both static and donated",
                expected="an argument that is static, which is compiled in, or donated, which is an array, or neither",
                got=f"donated: {', '.join(map(str, (*donate_argnums, *donate_argnames)))}, "
                f"static: {', '.join(sorted(map(str, static)))}",
                hint=f"leave {donated} out of what is donated",
            )


def _name_at(names: Sequence[str], number: int) -> str | int:
    """The name at a position, or the position itself where only a starred parameter takes it."""
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
    """Refuses arguments the function does not take, static ones that cannot be hashed, and leaves that are no arrays.

    Args:
        fun: any callable.
        args: given by position.
        kwargs: given by name.
        static_argnums: positions of static arguments.
        static_argnames: names of static ones.
        shapes: whether `jax.ShapeDtypeStruct`s are as good as arrays.

    Raises:
        ArgumentTypeError: naming function, argument and place in its tree, and the static argument that would allow it.
        ArgumentValueError: for a static argument that cannot be hashed.
        DeletedArgumentError: for an array that an earlier call has taken.
    """
    _check_call(fun, args, kwargs)
    names, static = argument_places(fun, args, static_argnums, static_argnames)
    keywords = static_keywords(fun, static_argnums, static_argnames)
    given = [(names[n], value, n in static, f"static_argnums={n}") for n, value in enumerate(args)]
    given += [(name, value, name in keywords, f"static_argnames={name!r}") for name, value in kwargs.items()]
    for name, value, is_static, remedy in given:
        if is_static:
            _check_static(fun, name, value)
        else:
            _check_leaves(fun, name, value, remedy, shapes)


def argument_places(
    fun: Callable[..., Any],
    args: Sequence[Any],
    static_argnums: Sequence[int] | None,
    static_argnames: Sequence[str] | None,
) -> tuple[list[str], set[int]]:
    """The name of each positional argument of a call, and the positions of those that are static."""
    parameters = positional_parameters(fun)
    rest = next((p.name for p in _parameters(fun) if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    more = range(len(args) - len(parameters))
    names = [*parameters[: len(args)], *(f"arg{n + len(parameters)}" if rest is None else f"{rest}[{n}]" for n in more)]
    static = {n % len(args) for n in static_argnums or () if -len(args) <= n < len(args)}
    by_name = static_argnames or () if static_argnums is None else ()
    return names, static | {n for n, name in enumerate(names) if name in by_name}


def static_keywords(
    fun: Callable[..., Any], static_argnums: Sequence[int] | None, static_argnames: Sequence[str] | None
) -> set[str]:
    """Names of arguments that are static when they are given by name."""
    parameters = positional_parameters(fun)
    # Given one way only, they are static the other way too; given both ways, JAX takes each as it is.
    numbers = static_argnums or () if static_argnames is None else ()
    by_number = {parameters[n] for n in numbers if -len(parameters) <= n < len(parameters)}
    return {*(static_argnames or ()), *by_number}


def dynamic_arguments(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Sequence[int] | None,
    static_argnames: Sequence[str] | None,
) -> tuple[dict[int, Any], dict[str, Any]]:
    """The arguments of a call that are not static, by position and by name."""
    _, static = argument_places(fun, args, static_argnums, static_argnames)
    names = static_keywords(fun, static_argnums, static_argnames)
    given = {n: x for n, x in enumerate(args) if n not in static}
    return given, {name: x for name, x in kwargs.items() if name not in names}


def _check_call(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    # A wrapper takes what it takes itself, whatever the function inside does.
    signature = _signature(fun, follow_wrapped=False)
    if signature is not None:
        check_call(function_name(fun), signature, args, kwargs)


def _check_static(fun: Callable[..., Any], name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise ArgumentValueError(
            f"static argument {name} of {function_name(fun)} cannot be hashed",
            expected="a value that can be hashed and compared, which each compiled version is looked up by",
            got=f"{type(value).__name__} {value!r:.60} ({error})",
            hint="pass a tuple for a list, or leave it out of the static arguments if it holds arrays",
        ) from error


def _check_leaves(fun: Callable[..., Any], name: str, value: Any, remedy: str, shapes: bool) -> None:
    hint = f"pass {remedy} to ipu.jit if it is a setting, or convert it to an array"
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        shown_array(function_name(fun), f"{name}{jax.tree_util.keystr(path)}", leaf, hint, shapes=shapes)


def shown_array(who: str, place: str, leaf: Any, hint: str, expected: str = _AN_ARRAY, *, shapes: bool = False) -> str:
    """Shape and dtype of a leaf of an argument, `float32[8]`.

    Args:
        who: the function that is given it, for the message.
        place: the leaf as the user would write it, for the message.
        leaf: anything.
        hint: what to try in place of what is neither array nor shape, for the message.
        expected: what to give, for the message.
        shapes: whether a `jax.ShapeDtypeStruct` is as good as an array.

    Raises:
        ArgumentTypeError: for what is no array.
        ArgumentOverflowError: for a number that is too large.
        DeletedArgumentError: for an array that an earlier call has taken.
    """
    check_not_deleted(who, place, leaf)
    if isinstance(leaf, _SHAPES) and not shapes:
        what = f"argument {place} of {who} is the shape of an array, which has no values"
        take = "an array, as jnp.zeros(shape, dtype) makes; .lower(...) and .eval_shape(...) take shapes"
        raise ArgumentTypeError(what, expected=expected, got=repr(leaf), hint=take)
    try:
        aval = leaf if isinstance(leaf, jax.core.ShapedArray) else jax.typeof(leaf)
        return str(aval.str_short())
    except OverflowError as error:
        what, kept = f"argument {place} of {who} is too large a number", "a float, or an array of a wider dtype"
        raise ArgumentOverflowError(what, expected=expected, got=f"{leaf} ({error})", hint=kept) from error
    except TypeError as error:
        dtype = f" of {leaf.dtype}" if hasattr(leaf, "dtype") else ""
        got = f"{type(leaf).__name__}{dtype} {leaf!r:.60}"
        what = f"argument {place} of {who} is not an array"
        raise ArgumentTypeError(what, expected=expected, got=got, hint=hint) from error


def check_not_deleted(who: str, place: str, leaf: Any) -> None:
    """Refuses an array whose buffer is gone.

    Args:
        who: the function that is given it, for the message.
        place: the array as the user would write it, for the message.
        leaf: anything.

    Raises:
        DeletedArgumentError: naming function and place.
    """
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        raise DeletedArgumentError(
            f"argument {place} of {who} has been deleted, most often by donating it to an earlier call",
            expected="an array that no call has taken",
            got=f"deleted {described(leaf)}",
            hint="what the earlier call returned in its place, or leave it out of donate_argnums",
        )


# --- functions and values in words ------------------------------------------------------------------------------------


def positional_parameters(fun: Callable[..., Any]) -> list[str]:
    """Names of the parameters that can be given by position; none where a function has no signature."""
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
    """The function's name for messages: that of the innermost function of a `functools.partial`, or the class's."""
    inner = fun
    while not hasattr(inner, "__name__") and hasattr(inner, "func"):
        inner = inner.func
    return getattr(inner, "__name__", None) or type(inner).__name__


def function_file(fun: Callable[..., Any]) -> str:
    """The name of the file or cell that defines the function; "" for one of an installed package, or of no file."""
    inner: Any = inspect.unwrap(fun)
    while isinstance(inner, partial | MethodType):
        inner = inspect.unwrap(inner.func if isinstance(inner, partial) else inner.__func__)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return "" if code is None or is_installed(code.co_filename) else file_name(code.co_filename)


def check_optimizer(optimizer: Any, who: str) -> None:
    """Refuses what is no optimiser.

    Args:
        optimizer: what a wrapper of optimisers was given.
        who: the wrapper's name in `ipu.optim`.

    Raises:
        ArgumentTypeError: for anything without `init` and `update`.
    """
    if not all(hasattr(optimizer, name) for name in ("init", "update", "_replace")):
        raise ArgumentTypeError(
            f"ipu.optim.{who} needs an optimiser",
            expected="an optax.GradientTransformation, as optax.adam(1e-3) makes",
            got=repr(optimizer),
        )
