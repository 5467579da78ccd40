"""Fingerprint of a jaxpr: equal in every process that traces an equal program from equal lines.

Input: a closed jaxpr. Output: a SHA-256 digest of its canonical form: variables by number, primitives, parameters,
types, bytes of constants, names and places of equations, code of functions among the parameters. No address is in it.
Limits: a parameter without such a form (an object that is known by its address alone, as the Python function of a
callback) raises `NoFingerprintError`. Functions for derivatives are left out: a traced jaxpr has them applied.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, raw_frames
from ipujax.lowering.source_info import traced_from

# Parameters that only later derivatives use, by primitive.
_OF_DERIVATIVES: Mapping[str, frozenset[str]] = {
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun"}),
    "custom_vjp_call": frozenset({"fwd_jaxpr_thunk", "bwd", "out_trees"}),
}
CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")  # primitives that call Python functions
# Packages whose objects have a `repr` of their contents, and whose functions their version identifies.
_VERSIONED = frozenset({"builtins", "ipujax", "jax", "jaxlib", "math", "ml_dtypes", "numpy", "operator", "typing"})
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}| object at ")
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


class NoFingerprintError(ValueError):
    """A value without a canonical form; the text says which."""


def fingerprint(jaxpr: ClosedJaxpr) -> str:
    """Return the digest of a closed jaxpr with its constants.

    Raises:
        NoFingerprintError: a constant or parameter has no canonical form.
    """
    return _Canonical().closed(jaxpr)


def digest_of(*values: Any) -> str:
    """Return the digest of plain values: numbers, texts, dtypes, arrays, and containers of these.

    Raises:
        NoFingerprintError: a value has no canonical form.
    """
    return _digest(_Canonical().value(values))


class Digests:
    """Digests of values as by `digest_of`, quicker for many that share objects.

    Args:
        common: values that each digest includes.
    """

    def __init__(self, *common: Any) -> None:
        self._canonical = _Canonical()
        self._common = self._canonical.value(common)

    def of(self, value: Any) -> str:
        """Return the digest of a value with the common ones.

        Raises:
            NoFingerprintError: it has no canonical form.
        """
        return _digest(self._common + self._canonical.value(value))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _array_text(array: np.ndarray) -> str:
    return f"{array.dtype!r}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


class _Canonical:
    """Canonical texts of values; those of jaxprs, functions and code are digests, computed once."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}  # by identity; all these objects are alive as long as the jaxpr
        self._kept: list[Any] = []
        self._open: list[Any] = []  # functions whose text is being computed: those that refer to themselves

    def _once(self, thing: Any, text: Callable[[Any], str]) -> str:
        if (form := self._texts.get(id(thing))) is None:
            form = self._texts[id(thing)] = text(thing)
            self._kept.append(thing)
        return form

    # --- jaxprs ---

    def closed(self, jaxpr: ClosedJaxpr) -> str:
        """Return the digest of a closed jaxpr."""
        return _digest(self.jaxpr(jaxpr.jaxpr) + "".join(self._once(x, self._constant) for x in jaxpr.consts))

    def jaxpr(self, jaxpr: Jaxpr) -> str:
        """Return the digest of an open jaxpr."""
        return self._once(jaxpr, self._jaxpr)

    def _jaxpr(self, jaxpr: Jaxpr) -> str:
        numbers: dict[Var, int] = {}

        def define(variables: Iterable[Var]) -> str:
            for var in variables:
                numbers.setdefault(var, len(numbers))
            return ",".join("_" if isinstance(var, DropVar) else self._type(var.aval) for var in variables)

        def use(atoms: Iterable[Any]) -> str:
            return ",".join(self._literal(x) if isinstance(x, Literal) else str(numbers[x]) for x in atoms)

        lines = [repr(traced_from(jaxpr)), define(jaxpr.constvars), define(jaxpr.invars)]
        for eqn in jaxpr.eqns:
            lines.append(f"{use(eqn.invars)}>{define(eqn.outvars)} {self._equation(eqn)}")
        return _digest("\n".join([*lines, use(jaxpr.outvars)]))

    def _equation(self, eqn: JaxprEqn) -> str:
        name = eqn.primitive.name
        if name in CALLBACKS:
            raise NoFingerprintError(f"{name} calls a Python function")
        skipped = _OF_DERIVATIVES.get(name, frozenset())
        params = [f"{key}={self.value(x)}" for key, x in sorted(eqn.params.items()) if key not in skipped]
        effects = sorted(type(effect).__qualname__ for effect in eqn.effects)
        context = self._once(eqn.ctx, self._object)
        place = self._place(eqn)
        return f"{name}[{' '.join(params)}] {effects} {context} {place}"

    def _place(self, eqn: JaxprEqn) -> str:
        info = eqn.source_info
        stack = self._once(info.name_stack, lambda stack: repr(str(stack)))
        if info.traceback is None:
            return stack
        frames = self._once(
            info.traceback,
            lambda _: _digest("".join(f"{self._once(code, self._code)}@{place};" for code, place in raw_frames(eqn))),
        )
        return f"{stack} {frames}"

    def _type(self, aval: Any) -> str:
        return self._once(aval, _type_text)

    def _literal(self, literal: Literal) -> str:
        return f"{self._type(literal.aval)}:{_array_text(np.asarray(literal.val))}"

    def _constant(self, value: Any) -> str:
        if isinstance(value, jax.core.Tracer):
            raise NoFingerprintError("it closes over a tracer")
        if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise NoFingerprintError(f"it closes over {type(value).__name__}")
        aval = jax.typeof(value)
        data: Any = value
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            data = jax.random.key_data(data)
        return f"{_type_text(aval)}:{_array_text(np.asarray(data))}"

    # --- other values ---

    def value(self, value: Any) -> str:
        """Return the canonical text of a parameter."""
        kind = type(value)
        if kind in _ATOMS:
            return repr(value)
        if isinstance(value, enum.Enum):
            return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
        if kind in (tuple, list):
            return f"{kind.__name__}({','.join(map(self.value, value))})"
        if isinstance(value, Mapping):
            return f"map({','.join(sorted(f'{self.value(key)}:{self.value(x)}' for key, x in value.items()))})"
        if isinstance(value, set | frozenset):
            return f"set({','.join(sorted(map(self.value, value)))})"
        return self._once(value, self._object)

    def _object(self, value: Any) -> str:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        match value:
            case ClosedJaxpr():
                return self.closed(value)
            case Jaxpr():
                return self.jaxpr(value)
            case np.dtype():
                return repr(value)
            case np.ndarray() if value.dtype.kind in "biufc":
                return _array_text(value)
            case np.ndarray() if value.dtype.hasobject:  # its bytes are addresses
                raise NoFingerprintError("an array of Python objects has no canonical form")
            case np.ndarray() | np.generic() | jax.Array():
                return self._constant(value)
            case FunctionType():
                return self._function(value)
            case MethodType():
                return f"method({self.value(value.__self__)},{self.value(value.__func__)})"
            case functools.partial():
                return f"partial({self.value(value.func)},{self.value(value.args)},{self.value(value.keywords)})"
            case type() | BuiltinFunctionType():
                return self._named(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{name}({','.join(map(self.value, value))})"
        # By fields first: a text of a dataclass may leave some out, and long arrays are cut short in it.
        if dataclasses.is_dataclass(value):
            fields = (f"{field.name}={self.value(getattr(value, field.name))}" for field in dataclasses.fields(value))
            return f"{self._named(kind)}({','.join(fields)})"
        if hasattr(value, "__wrapped__") and hasattr(value, "__qualname__"):  # a function of `jax.jit` or `ipu.jit`
            return f"{name}({self.value(value.__wrapped__)})"
        if kind.__module__.partition(".")[0] in _VERSIONED and "__repr__" in {
            key for x in kind.__mro__[:-1] for key in vars(x)
        }:
            text = repr(value)
            if not _ADDRESS.search(text):
                return f"{name}:{text}"
        raise NoFingerprintError(f"a value of type {name} is known by its address alone")

    def _named(self, value: Any) -> str:
        """Return the name of a class or builtin function: of a versioned package, else with the code of a class."""
        name = f"{value.__module__}.{value.__qualname__}"
        if str(value.__module__).partition(".")[0] in _VERSIONED:
            return name
        if not isinstance(value, type):
            raise NoFingerprintError(f"{name} has no code in Python")
        bases = ",".join(map(self._named, value.__bases__))
        plain = {
            key: x.fget if isinstance(x, property) else getattr(x, "__func__", x)
            for key, x in vars(value).items()
            if isinstance(x, (FunctionType, property, staticmethod, classmethod, *_ATOMS))
        }
        return _digest(f"{name}({bases}){self.value({key: x for key, x in plain.items() if key[:2] != '__'})}")

    def _function(self, function: FunctionType) -> str:
        """Return the text of a function: code, closure and defaults, for users' functions also globals in the code."""
        name = f"{function.__module__}.{function.__qualname__}"
        is_versioned = str(function.__module__).partition(".")[0] in _VERSIONED
        if is_versioned and "<" not in function.__qualname__:  # others share their names: lambdas, inner functions
            return name
        if function in self._open:
            return f"open({self._open.index(function)})"
        self._open.append(function)
        try:
            closure = [cell.cell_contents for cell in function.__closure__ or ()]
            # The version identifies the globals of its packages.
            names = set() if is_versioned else _names_in(function.__code__) & function.__globals__.keys()
            used = {key: self._global(function.__globals__[key]) for key in sorted(names)}
            defaults = function.__defaults__, function.__kwdefaults__
            code = self._once(function.__code__, self._code)
            return _digest(f"{name}{code}{self.value(closure)}{self.value(defaults)}{sorted(used.items())}")
        finally:
            self._open.pop()

    def _global(self, value: Any) -> str:
        if not isinstance(value, ModuleType):
            return self.value(value)
        if value.__name__.partition(".")[0] not in _VERSIONED:
            raise NoFingerprintError(f"a function of its parameters uses the module {value.__name__}")
        return value.__name__

    def _code(self, code: CodeType) -> str:
        """Digest of the byte code, names, lines and constants of a function, and of those inside it."""
        constants = ",".join(
            self._once(x, self._code) if isinstance(x, CodeType) else self.value(x) for x in code.co_consts
        )
        names = repr((code.co_filename, code.co_qualname, code.co_firstlineno, code.co_names, code.co_varnames))
        lines = hashlib.sha256(code.co_code + code.co_linetable).hexdigest()
        return _digest(f"{names}{lines}({constants})")


def _type_text(aval: Any) -> str:
    weak = "w" if getattr(aval, "weak_type", False) else ""
    return f"{type(aval).__name__} {aval.str_short()}{weak} {getattr(aval, 'memory_space', '')}"


def _names_in(code: CodeType) -> frozenset[str]:
    """Return the global names and attributes that a function's code has, with those of functions inside."""
    inner = (_names_in(x) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(*inner)
