"""Nested `ipu.jit` functions: the compilation that is tracing user code, and checks of functions called there.

An inner `ipu.jit` function is inlined into the outer one, so both need one device and one number of replicas. This is
checked where the inner one is called, and again in every equation that calls it: JAX traces the functions between the
two once, and later calls of them show nothing but the equation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ipujax.arguments import FunctionName
from ipujax.device import Device
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import Log
from ipujax.runtime.options import Options

_LOG = Log("jit")


@dataclass(frozen=True, slots=True)
class Compilation:
    """Device, number of replicas and options that user code is traced for."""

    device: Device
    replicas: int
    options: Options

    def check_inner(self, name: FunctionName, where: str | None = None) -> None:
        """Refuse an inner function, called at `where` or the running line, of another device or replica count."""
        one_device = "give both functions one device, or leave the inner one's out"
        no_specs = "leave out replicas=, in_specs= and out_specs= of the inner function: it is one replica's already"
        checks: tuple[tuple[str, object, object, str], ...] = (
            ("compiled for another device", self.device, name.device, one_device),
            ("of another number of replicas", self.replicas, name.replicas, no_specs),
        )
        for difference, expected, got, hint in checks:
            if got is not None and got != expected:  # None follows the outer function
                problem = f"{name} is called inside a function {difference}"
                raise ArgumentError(problem, where=where, expected=expected, got=got, hint=hint)

    def check(self, jaxpr: ClosedJaxpr) -> None:
        """Check the calls of inner functions at any depth of a jaxpr.

        Raises:
            ArgumentError: as `check_inner`, with the line of the call.
        """
        # JAX copies the name object of a jitted function into its equation, with the settings that it has here.
        for eqn in equations(jaxpr.jaxpr):
            if isinstance(name := eqn.params.get("name"), FunctionName):
                self.check_inner(name, source_line(eqn) or None)


# The compilation that is tracing user code; per context, as threads trace independently.
_COMPILING: ContextVar[Compilation | None] = ContextVar("ipujax_compiling", default=None)


def compiling() -> Compilation | None:
    """Return the compilation that traces the running code; None outside of `ipu.jit`."""
    return _COMPILING.get()


@contextmanager
def compiling_for(compilation: Compilation) -> Iterator[None]:
    """Set the compilation of code traced inside."""
    token = _COMPILING.set(compilation)
    try:
        yield
    finally:
        _COMPILING.reset(token)


# Whether code of an `ipu.jit` function is running or traced, also for `ipu.CPU` and by plain JAX.
_INSIDE: ContextVar[bool] = ContextVar("ipujax_inside_function", default=False)


def is_inside_function() -> bool:
    """Return whether the running code is called by an `ipu.jit` function."""
    return _INSIDE.get() or compiling() is not None


def inside_function(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose code knows that an `ipu.jit` function calls it."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        token = _INSIDE.set(True)
        try:
            return fun(*args, **kwargs)
        finally:
            _INSIDE.reset(token)

    return inside


class PlainCalls:
    """Calls that JAX computes alone, of which one line of the log says so, that a missing profile is no riddle.

    Args:
        what: a clause that says which function runs how.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_said = False

    def notice(self) -> None:
        """Warn, the first time."""
        if not self._is_said:
            self._is_said = True
            _LOG.warning("%s, without a profile", self._what)
