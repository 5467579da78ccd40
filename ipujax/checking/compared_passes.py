"""Comparison of the jaxprs after all passes, each computed by plain JAX.

Input: jaxprs by pass, and arrays of their inputs. Output: the first value that a pass changes beyond rounding, and
values of the results. The variables of two jaxprs are compared where both have them; passes keep those that they do not
fuse.

Limits: Refs and meshes exist before their passes only; a jaxpr with them is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from ipujax.checking.check_report import Mismatch
from ipujax.checking.differences import Difference, difference, is_equal
from ipujax.checking.jaxpr_values import JaxprValues, plain_results, plain_values, spreads
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.layer_notes import layer_of
from ipujax.lowering.refs import is_ref
from ipujax.lowering.replicas import unwrapped
from ipujax.lowering.source_info import source_line
from ipujax.runtime.tensor import dtype_name

# Primitives of meshes: on one device plain JAX cannot compute them.
_OF_MESHES = frozenset({"shard_map", "sharding_constraint", "reshard", "mesh_cast", "auto_axes", "explicit_axes"})
_WITH_CALLS = frozenset({"trace", "discharge"})


@dataclass(frozen=True, eq=False, slots=True)
class PassValues:
    """Values of results by plain JAX.

    Args:
        results: by the first jaxpr that plain JAX computes here.
        sizes: returns the sizes of rounding errors of the results.
        mismatch: the first equation that a pass changes; None if there is none.
        first: name of the pass after which the first jaxpr is, "trace" before all.
    """

    results: Sequence[Any]
    sizes: Callable[[], Sequence[Any]]
    mismatch: Mismatch | None
    first: str


def compare_passes(jaxprs: Mapping[str, ClosedJaxpr], operands: Sequence[Any]) -> PassValues:
    """Compute the jaxpr after each pass, and compare each with the one before it.

    Args:
        jaxprs: the jaxpr as traced and after each pass, by name.
        operands: arrays of the inputs.
    """
    first = first_plain(jaxprs)
    computed = list(jaxprs.items())[list(jaxprs).index(first) :]
    # The first without calls has most variables in common with those after it.
    inlined = next(jaxpr for name, jaxpr in computed if name not in _WITH_CALLS)
    sizes = cache(lambda: spreads(inlined, operands))
    changed = [computed[0]]
    changed += [after for before, after in pairwise(computed) if after[1] is not before[1]]
    results = plain_results(computed[0][1], operands)
    found = _first_mismatch(changed, operands, sizes, one_by_one=False)
    # XLA may compile a whole function wrongly: an error of a pass is there without its fusions, too.
    if found is not None:
        found = _first_mismatch(changed, operands, sizes, one_by_one=True)
    return PassValues(results, lambda: sizes().results, found, first)


def _first_mismatch(
    changed: Sequence[tuple[str, ClosedJaxpr]],
    operands: Sequence[Any],
    sizes: Callable[[], JaxprValues],
    *,
    one_by_one: bool,
) -> Mismatch | None:
    """Return the first equation whose value a pass changes, of the jaxprs of passes that change anything."""
    with_calls = [jaxpr for name, jaxpr in changed if name in _WITH_CALLS]
    others = [jaxpr for name, jaxpr in changed if name not in _WITH_CALLS]
    values = plain_values(with_calls, others, operands, one_by_one=one_by_one)
    steps = zip(changed[1:], values[1:], values[:-1], strict=True)
    found = (x for (name, jaxpr), after, before in steps for x in _mismatches(name, jaxpr, after, before, sizes))
    return next(found, None)


def first_plain(jaxprs: Mapping[str, ClosedJaxpr]) -> str:
    """Return the name of the first jaxpr that plain JAX computes on one device: without Refs as inputs, and meshes."""
    traced = next(iter(jaxprs.values()))
    eqns = list(equations(traced.jaxpr))
    avals = [*traced.in_avals, *(var.aval for eqn in eqns for var in eqn.outvars)]
    if any(eqn.primitive.name in _OF_MESHES for eqn in eqns) or any(map(_is_split, avals)):
        return "shard_map"
    return "discharge" if any(map(is_ref, traced.in_avals)) else next(iter(jaxprs))


def _is_split(aval: Any) -> bool:
    return any(axes is not None for axes in getattr(getattr(aval, "sharding", None), "spec", ()))


def _mismatches(
    name: str, jaxpr: ClosedJaxpr, values: JaxprValues, before: JaxprValues, sizes: Callable[[], JaxprValues]
) -> Iterator[Mismatch]:
    """Yield the equations of a jaxpr whose values differ from those before its pass, then its results."""
    body = unwrapped(jaxpr).jaxpr.jaxpr
    for eqn in body.eqns:
        for var in eqn.outvars:
            if var in values.variables and var in before.variables:
                pair = values.variables[var], before.variables[var]
                if is_equal(*pair) or var not in sizes().variables:
                    continue
                found = difference(*pair, sizes().variables[var], is_sampled=True)
                if found.is_error:
                    yield _mismatch(name, eqn, var, found)
    definitions: dict[Any, JaxprEqn] = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    pairs = zip(values.results, before.results, strict=True)
    for number, (var, pair) in enumerate(zip(body.outvars, pairs, strict=True)):
        if is_equal(*pair):
            continue
        found = difference(*pair, sizes().results[number], is_sampled=True)
        if found.is_error:
            yield _mismatch(name, definitions.get(var) if isinstance(var, Var) else None, var, found)


def _mismatch(name: str, eqn: JaxprEqn | None, var: Any, found: Difference) -> Mismatch:
    return Mismatch(
        f"pass {name}",
        "" if eqn is None else eqn.primitive.name,
        "" if eqn is None else source_line(eqn),
        "" if eqn is None else layer_of(eqn),
        type_text(var.aval),
        found.index,
        found.expected,
        found.got,
    )


def type_text(aval: Any) -> str:
    """Return dtype and shape as text, "float32[8, 16]"."""
    return f"{dtype_name(aval.dtype)}{list(aval.shape)}"
