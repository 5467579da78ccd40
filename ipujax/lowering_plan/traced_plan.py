"""Plan of a lowering: a traced function with all that its lowering reads.

Input: a traced function, the target, the user's options. Output: `LoweringPlan`, which `planned_program` lowers unless
the cache has its program; or an error that names a value of another type and its line. Values are arrays of numbers and
of keys, and Refs until they are discharged. Tokens may occur inside, because their users are dropped; they cannot be
arguments or results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_not
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.arguments import FunctionName
from ipujax.calls import Signature, Traced, check_annotations
from ipujax.lowering.jax_compat import ClosedJaxpr, is_float0, is_on_host, is_token, without_float0
from ipujax.lowering.jaxpr import Rewrite, equations, everywhere, primitive_names, with_equations, with_inner
from ipujax.lowering.partition import Shardings
from ipujax.lowering.refs import with_state
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentTypeError, GraphError
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target
from ipujax.sharding import PlanShardings, mesh_of_constraints, without_splits

if TYPE_CHECKING:
    from ipujax.distributed.instance.spread import Spread

_EXPECTED = "arrays of numbers, or of keys of jax.random"


def compilation_steps() -> tuple[str, ...]:
    """Steps of a compilation, in order."""
    from ipujax.lowering.dumps import steps as lowering_steps
    from ipujax.runtime.compile import STEPS as COMPILE_STEPS  # a program of the cache is called without

    return (*lowering_steps(), *COMPILE_STEPS)


def _with_static_products(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr with block-sparse products in place of those of sparse arrays with constant indices.

    A product is *static* in popsparse if its indices are constants: its sparsity is planned while compiling.
    """
    # The library is imported for programs that need it alone.
    if not any(name.startswith(("bcoo_dot", "bcsr_dot")) for name in primitive_names(jaxpr.jaxpr)):
        return jaxpr
    from ipujax.popsparse.jax_arrays import with_static_products

    return with_static_products(jaxpr)


def _with_own_constants(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr with copies of its NumPy arrays: the user's code may write to its own while the program lives."""
    copies: dict[int, np.ndarray] = {}  # by identity: an array that several jaxprs hold stays one

    def own(constant: Any) -> Any:
        if not isinstance(constant, np.ndarray):
            return constant
        if id(constant) not in copies:
            copies[id(constant)] = constant.copy()
        return copies[id(constant)]

    def rewrite(jaxpr: ClosedJaxpr, inner: Rewrite) -> ClosedJaxpr:
        rewritten = with_equations(jaxpr, [with_inner(eqn, inner) for eqn in jaxpr.eqns])
        consts = list(map(own, jaxpr.consts))
        return ClosedJaxpr(rewritten.jaxpr, consts) if any(map(is_not, consts, jaxpr.consts)) else rewritten

    return everywhere(rewrite)(jaxpr)


def check_values(jaxpr: ClosedJaxpr, who: str, names: Sequence[str]) -> None:
    """Refuse a jaxpr with values that no tile can store, such as tokens.

    Args:
        jaxpr: the jaxpr.
        who: name of the user's function, for the error.
        names: names of its inputs, `params['w']`, for the error.
    """
    arguments_and_results = [*zip((f"argument {name} of {who}" for name in names), jaxpr.in_avals, strict=True)]
    arguments_and_results += [(f"a result of {who}", aval) for aval in jaxpr.out_avals]
    for subject, aval in arguments_and_results:
        if not _is_storable(aval):
            hint = "leave the token out: effects keep their order by themselves" if is_token(aval) else _hint(aval)
            raise ArgumentTypeError(f"{subject} must be an array", expected=_EXPECTED, got=str(aval), hint=hint)
    for eqn in equations(jaxpr.jaxpr):
        for var in eqn.outvars:
            if not _is_storable(var.aval) and not is_token(var.aval):
                raise GraphError(
                    f"the result of {eqn.primitive} must be an array that a tile can store",
                    where=source_line(eqn) or None,
                    expected=_EXPECTED,
                    got=str(var.aval),
                    hint=_hint(var.aval),
                )


def _is_storable(aval: Any) -> bool:
    inner = aval.inner_aval if isinstance(aval, jax.ref.AbstractRef) else aval
    if not isinstance(inner, jax.core.ShapedArray):
        return False
    is_key = jnp.issubdtype(inner.dtype, jax.dtypes.prng_key)
    return is_key or not jnp.issubdtype(inner.dtype, jax.dtypes.extended)


def _hint(aval: Any) -> str:
    is_dtype = isinstance(aval, jax.core.ShapedArray)
    return f"the arrays that the {'dtype' if is_dtype else 'type'} of your own stands for, in its place"


@dataclass(frozen=True, eq=False, slots=True)
class ProgramSettings:
    """Settings of a program, whatever its arguments are.

    Args:
        name: name of the function.
        line: origin of equations that have no line of the user's.
        target: target of all replicas.
        options: options of the user.
        spread: distribution of replicas over instances.
    """

    name: FunctionName
    line: str
    target: Target
    options: Options
    spread: Spread | None = None


def _shardings(traced: Traced, copy: ClosedJaxpr, positions: Sequence[int], target: Target) -> PlanShardings:
    """Return the shardings of a traced function, for the inputs at some positions and all results but float0."""
    inputs = tuple(traced.shardings.inputs[n] for n in positions) if traced.shardings.inputs else ()
    settings = zip(traced.result_shardings, copy.out_avals, strict=bool(traced.result_shardings))
    outputs = tuple(sharding for sharding, aval in settings if not is_float0(aval))
    devices = traced.shardings.mesh or mesh_of_constraints(copy)
    return PlanShardings(Shardings(inputs, outputs, target), traced.shardings, traced.result_shardings, devices)


@dataclass(frozen=True, eq=False, slots=True)
class LoweringPlan:
    """A traced function with all that is equal in every plan of it.

    Args:
        settings: settings of the program.
        signature: signature of the trace.
        jaxpr: the traced jaxpr, with values in place of Refs and without float0.
        positions: for each input of the jaxpr the number of its leaf; Refs are numbered after the arguments.
        refs: Refs that the function closes over and changes.
        shardings: shardings of the program.
        timings: seconds of steps before.
        constants: arrays on the host that the function closes over: the last inputs of the jaxpr.
        has_64_bits: whether it is lowered and computed with `jax_enable_x64`.
    """

    settings: ProgramSettings
    signature: Signature
    jaxpr: ClosedJaxpr
    positions: Sequence[int]
    refs: Sequence[jax.Ref]
    shardings: PlanShardings
    timings: Mapping[str, float]
    constants: tuple[Any, ...] = ()
    has_64_bits: bool = False

    @property
    def program_signature(self) -> Signature:
        """Signature of the program, in which Refs are arguments."""
        return self.signature.with_state(self.refs)

    @property
    def has_values_on_host(self) -> bool:
        """Whether a type of an input or a result has the host's memory."""
        return any(map(is_on_host, (*self.jaxpr.in_avals, *self.jaxpr.out_avals)))

    @staticmethod
    def of(settings: ProgramSettings, traced: Traced) -> LoweringPlan:
        """Return the lowering plan of a traced function; refuse values other than arrays, and unsupported memories."""
        # A copy, as lowered programs are cached by weak references to the traced jaxpr, and must not refer to it. Its
        # constants are whole arrays: those that are split over devices of a mesh are gathered.
        owned = _with_own_constants(traced.jaxpr)
        copy = ClosedJaxpr(owned.jaxpr, list(map(without_splits, owned.consts)))
        signature = traced.signature
        check_values(copy, settings.name, signature.leaf_names)
        check_annotations(settings.name, copy)
        jaxpr, positions = without_float0(copy)
        shardings = _shardings(traced, copy, positions, settings.target)
        jaxpr, refs = with_state(_with_static_products(jaxpr))
        if refs:  # they are results too, for which any sharding will do
            shardings = replace(shardings, of_values=replace(shardings.of_values, outputs=()))
        num_arguments = len(signature.in_avals)  # leaves of the arguments, in whose numbering Refs follow
        positions += range(num_arguments, num_arguments + len(refs))
        return LoweringPlan(
            settings, signature, jaxpr, positions, refs, shardings, traced.timings, has_64_bits=traced.has_64_bits
        )
