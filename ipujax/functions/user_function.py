"""The user's function of an `ipu.jit` function, and how its arguments are read by its settings.

Input: a function and settings. Output: parts of a call (static, donated, dynamic arguments), and wrappers that JAX and
`inspect` take for the function, without a reference to it: a wrapper that JAX's caches keep must not keep the function,
which may be a closure of large arrays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import ref

from ipujax.arguments import FunctionName, argument_places, dynamic_arguments, own_check, static_keywords
from ipujax.calls import Places, Replication
from ipujax.functions.function_settings import FunctionSettings
from ipujax.runtime.names_at_import import jax_jit
from ipujax.sharding import UNSET, ShardingSettings

_ATTRIBUTES = tuple(name for name in functools.WRAPPER_ASSIGNMENTS if name != "__name__")


def make_alike(wrapper: Callable[..., Any], fun: Callable[..., Any], name: str) -> None:
    """Give a wrapper of a function its attributes, signature and line, and a name."""
    functools.update_wrapper(wrapper, fun, _ATTRIBUTES, updated=())
    wrapper.__name__ = name
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    code = _code(fun)
    if code is not None:
        # JAX names the line of the innermost wrapped function in its messages.
        cells = tuple(CellType() for _ in code.co_freevars)
        wrapper.__wrapped__ = FunctionType(code, {}, str(name), None, cells)  # type: ignore[attr-defined]
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # builtins and some C functions have none, nor has the wrapper then: not its own
        wrapper.__signature__ = ()  # type: ignore[attr-defined]
        return
    parameters = [p if p.default is p.empty else p.replace(default=None) for p in signature.parameters.values()]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]


def _code(fun: Callable[..., Any]) -> CodeType | None:
    inner: Any = inspect.unwrap(fun)
    while isinstance(inner, functools.partial | MethodType):
        inner = inspect.unwrap(inner.func if isinstance(inner, functools.partial) else inner.__func__)
    return getattr(inner, "__code__", None)


Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class UserFunction:
    """A user's function with its settings.

    The function is kept by those who call it, not here: what JAX keeps of a jitted wrapper would keep it too.

    Attributes:
        reference: returns the function; None if nobody has it any more.
        name: name in errors and logs.
        settings: settings of `ipu.jit`.
    """

    reference: Callable[[], Function | None]
    name: FunctionName
    settings: FunctionSettings
    _known_places: dict[int, Places] = field(default_factory=dict)  # by the number of positional arguments

    @classmethod
    def of(cls, fun: Function, settings: FunctionSettings) -> UserFunction:
        """Return a function with settings."""
        return cls(_weak_reference(fun), settings.name_of(fun), settings)

    @property
    def fun(self) -> Function:
        """The function, in a call: the caller keeps it."""
        fun = self.reference()
        assert fun is not None, f"{self.name} is called, and was not kept"
        return fun

    @property
    def replication(self) -> Replication | None:
        """Replicas and their specs; None for a function without an axis of replicas."""
        return self.settings.replication

    @property
    def shardings(self) -> ShardingSettings:
        """Shardings of `ipu.jit`."""
        return self.settings.shardings or UNSET

    @functools.cached_property
    def has_own_check(self) -> bool:
        """Whether the user's callable object checks its arguments before JAX traces it."""
        return own_check(self.fun) is not None

    @functools.cached_property
    def static_keywords(self) -> Collection[str]:
        """Names of the static arguments that are passed by name."""
        return static_keywords(self.fun, *self.settings.static)

    def places(self, args: Sequence[Any]) -> Places:
        """Return the names of positional arguments, and the positions of static ones."""
        if len(args) not in self._known_places:
            self._known_places[len(args)] = argument_places(self.fun, args, *self.settings.static)
        return self._known_places[len(args)]

    def dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[int, Any], dict[str, Any]]:
        """Return the arguments that are not static, by position and by name."""
        return dynamic_arguments(self.fun, args, kwargs, *self.settings.static)

    def jitted(self, wrapper: Function, donates: bool = True) -> Any:
        """Return a wrapper of the function with its name and signature, jitted by JAX with its settings.

        Args:
            wrapper: takes the arguments of the function.
            donates: whether XLA may reuse the buffers of donated arguments.
        """
        make_alike(wrapper, self.fun, self.name)
        donation = {} if donates else {"donate_argnums": None, "donate_argnames": None}
        return jax_jit(wrapper, **{**self.settings.of_jax, **donation})


def _weak_reference(fun: Function) -> Callable[[], Function | None]:
    try:
        return ref(fun)
    except TypeError:  # objects without weak references
        return lambda: fun
