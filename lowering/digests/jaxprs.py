"""Digest of a jaxpr: equal in every process that traces an equal program from equal lines.

Input: a closed jaxpr. Output: a SHA-256 digest of its canonical form: variables by number, primitives with their
implementation, parameters, types, bytes of constants, names and places of equations.
Limits: a parameter without a digest, and a callback of Python, raise `NoDigestError`. Functions for derivatives are
left out: a traced jaxpr has them applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.digests.readings import NoDigestError
from ipujax.lowering.digests.walk import Digests, TextReaders, digest_of_text
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    implementations,
    mlir,
    raw_frames,
)
from ipujax.lowering.source_info import traced_from

# Parameters that only later derivatives use, by primitive.
_OF_DERIVATIVES: Mapping[str, frozenset[str]] = {
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun"}),
    "custom_vjp_call": frozenset({"fwd_jaxpr_thunk", "bwd", "out_trees"}),
}
CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")  # primitives that call Python functions
_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


_LOWERINGS_AT_IMPORT = dict(mlir._lowerings)


def replaced_lowerings() -> tuple[Any, ...]:
    """Return the lowerings of JAX's primitives that the program replaced: those of others may use them."""
    return tuple(
        mlir._lowerings.get(p) for p, rule in _LOWERINGS_AT_IMPORT.items() if mlir._lowerings.get(p) is not rule
    )


def value_digests(*common: Any) -> Digests:
    """Return digests of values that may have jaxprs inside; `common` values are part of each."""
    return Digests(_TEXT_READERS, *common)


def digest_of(*values: Any) -> str:
    """Return the digest of values.

    Raises:
        NoDigestError: a value, or one inside it, cannot be read.
    """
    return value_digests().of(values)


def jaxpr_digest(jaxpr: ClosedJaxpr) -> str:
    """Return the digest of a closed jaxpr with its constants.

    Raises:
        NoDigestError: a constant or parameter has none.
    """
    return _closed(value_digests(), jaxpr)


def _closed(digests: Digests, jaxpr: ClosedJaxpr) -> str:
    constants = "".join(digests.once(x, _constant) for x in jaxpr.consts)
    return digest_of_text(digests.once(jaxpr.jaxpr, lambda x: _jaxpr(digests, x)) + constants)


def _jaxpr(digests: Digests, jaxpr: Jaxpr) -> str:
    """Digest of a jaxpr; a variable is the number of its definition, so names and identities do not matter."""
    numbers: dict[Var, int] = {}

    def define(variables: Iterable[Var]) -> str:
        for var in variables:
            numbers.setdefault(var, len(numbers))
        return ",".join("_" if isinstance(var, DropVar) else digests.once(var.aval, _type) for var in variables)

    def use(atoms: Iterable[Any]) -> str:
        return ",".join(_literal(x) if isinstance(x, Literal) else str(numbers[x]) for x in atoms)

    lines = [repr(traced_from(jaxpr)), define(jaxpr.constvars), define(jaxpr.invars)]
    for eqn in jaxpr.eqns:
        lines.append(f"{use(eqn.invars)}>{define(eqn.outvars)} {_equation(digests, eqn)}")
    return digest_of_text("\n".join([*lines, use(jaxpr.outvars)]))


def _equation(digests: Digests, eqn: JaxprEqn) -> str:
    name = eqn.primitive.name
    if name in CALLBACKS:
        raise NoDigestError(f"{name} calls a Python function")
    skipped = _OF_DERIVATIVES.get(name, frozenset())
    params = " ".join(f"{key}={digests.text(x)}" for key, x in sorted(eqn.params.items()) if key not in skipped)
    effects = sorted(type(effect).__qualname__ for effect in eqn.effects)
    return f"{digests.text(eqn.primitive)}[{params}] {effects} {digests.text(eqn.ctx)} {_place(digests, eqn)}"


def _primitive(digests: Digests, primitive: Primitive) -> str:
    """Return name and implementation of a primitive: a rule of the user's own is part of the program."""
    return f"{primitive.name}:{digests.text(implementations(primitive))}"


def _place(digests: Digests, eqn: JaxprEqn) -> str:
    info = eqn.source_info
    stack = digests.once(info.name_stack, lambda stack: repr(str(stack)))
    if info.traceback is None:
        return stack
    frames = digests.once(info.traceback, lambda _: digest_of_text(digests.places(raw_frames(eqn))))
    return f"{stack} {frames}"


def _literal(literal: Literal) -> str:
    return f"{_type(literal.aval)}:{_bytes(np.asarray(literal.val))}"


def _constant(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        raise NoDigestError("it closes over a tracer")
    if not isinstance(value, _NUMBERS):
        raise NoDigestError(f"it closes over {type(value).__name__}")
    aval = jax.typeof(value)
    data: Any = value
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        data = jax.random.key_data(data)
    return f"{_type(aval)}:{_bytes(np.asarray(data))}"


def _bytes(array: np.ndarray) -> str:
    return f"{array.dtype!r}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


def _type(aval: Any) -> str:
    weak = "w" if getattr(aval, "weak_type", False) else ""
    return f"{type(aval).__name__} {aval.str_short()}{weak} {getattr(aval, 'memory_space', '')}"


_TEXT_READERS: TextReaders = {
    ClosedJaxpr: _closed,
    Jaxpr: _jaxpr,
    Primitive: _primitive,
    jax.Array: lambda _, value: _constant(value),
}
