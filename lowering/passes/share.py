"""Pass `share`: callees that a program uses several times become functions, lowered once and called from each place.

A call of a jaxpr that other calls hold too (JAX traces a jitted function once for each signature) becomes an equation
`function_call`; all other calls stay, for `inline`. Operands are copied into the function's own variables and results
out of them, so a callee is shared only when that is little beside its own work, see `_Callee.pays`. What is saved is
its code, its exchange code, its vertices and the time to lower them, at all places but one.

An operand that is the same value at every place is not copied: the function reads it where it lies.

The equations of a function belong to all its callers. Their name stacks begin with what those of the callers have in
common and the function's name, and their source lines are the callee's own. So library code, whose only line of the
user's is its caller's, is shared between calls of one line (a loop of the user's) and inlined otherwise. Calls in
different stages, which run on different IPUs, share nothing, nor does a stage's forward part with its backward part.
What has effects is inlined, since each print has its place, and so is what has stages inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    common_stack,
    in_function,
    jaxpr_as_fun,
    jaxpr_file,
    jaxpr_function,
    jaxprs_in_params,
    joined_stack,
    make_primitive,
    source_line,
)
from ipujax.lowering.jaxpr import StageName, elements_of, has_stages, read_name, rewritten_params, work_of
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.inline import callee_of
from ipujax.runtime.errors import is_installed

# Measured on 1,472 tiles with two and four calls of elementwise chains, softmax, layer norms, and one to three matrix
# products of 128 x 512 x 512, a copy costs 250 to 600 cycles. Within these bounds sharing adds 4 to 15 % to the cycles
# and takes away all code but one callee's: the training step of a transformer of four blocks keeps 58 of 98 KB a tile.
# A callee of one elementwise step takes 75 % longer, for nothing.
_LEAST_STEPS = 4
_WEIGHT_PER_COPY = 3  # steps for each operand and result that is copied
_WORK_PER_ELEMENT = 2  # elements that steps read and write, for each element that is copied


class _Key(NamedTuple):
    """Key of calls that share a function: the callee by identity, the stage, and of library code the line."""

    callee: int
    consts: tuple[int, ...]
    stage: StageName | None
    line: str


def _compute(*operands: Any, jaxpr: ClosedJaxpr, name: str, fixed: tuple[bool, ...]) -> Sequence[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _shapes(*operands: Any, jaxpr: ClosedJaxpr, **params: Any) -> Sequence[Any]:
    return jaxpr.out_avals


function_call_p = make_primitive("function_call", _compute, _shapes, None)


@dataclass(slots=True, eq=False)
class _Callee:
    """A callee and its calls."""

    jaxpr: ClosedJaxpr
    first: JaxprEqn  # the first call
    stacks: list[Any] = field(default_factory=list)  # the whole name stack of each call
    scopes: list[object] = field(default_factory=list)  # the evaluation of a jaxpr that each call is part of
    operands: list[Sequence[Atom]] = field(default_factory=list)  # of each call

    @property
    def name(self) -> str:
        """The name of the Python function, where JAX knows it."""
        return self.first.params.get("name") or jaxpr_function(self.jaxpr.jaxpr) or self.first.primitive.name

    def fixed(self) -> tuple[bool, ...]:
        """For each operand whether it is the same value at every call."""
        if any(scope is not self.scopes[0] for scope in self.scopes):
            return (False,) * len(self.operands[0])
        return tuple(len(set(map(_identity, atoms))) == 1 for atoms in zip(*self.operands, strict=True))

    def pays(self) -> bool:
        """Whether it is worth a function."""
        copied = [atom for atom, same in zip(self.first.invars, self.fixed(), strict=True) if not same]
        return sharing_pays(self.jaxpr.jaxpr, (*copied, *self.first.outvars))


def sharing_pays(callee: Jaxpr, copied: Sequence[Atom]) -> bool:
    """Whether a callee costs much more than copying its operands and results.

    Args:
        callee: what is called.
        copied: the operands and results that are copied.
    """
    work, sizes = work_of(callee), list(map(elements_of, copied))
    enough = work.weight >= _WEIGHT_PER_COPY * len(sizes) and work.elements >= _WORK_PER_ELEMENT * sum(sizes)
    return work.steps >= _LEAST_STEPS and enough


def share(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr in which callees worth it are functions."""
    if not _shared(jaxpr):
        return jaxpr
    live = dce(jaxpr)  # what only some calls need would be computed by all
    return _Rewriter(_shared(live)).run(live)


def _shared(jaxpr: ClosedJaxpr) -> dict[_Key, _Callee]:
    """The callees to share. One that is not leaves the calls inside it to be counted at each of its places."""
    inlined: set[_Key] = set()
    while True:
        callees: dict[_Key, _Callee] = {}
        _find(jaxpr.jaxpr, None, callees, inlined)
        several = {key: callee for key, callee in callees.items() if len(callee.stacks) > 1}
        refused = {key for key, callee in several.items() if not callee.pays()}
        if not refused:
            return several
        inlined |= refused


def _find(jaxpr: Jaxpr, stack: Any, callees: dict[_Key, _Callee], inlined: set[_Key]) -> None:
    """Collects the calls of a jaxpr; what is inside a callee counts once."""
    scope = object()
    for eqn in jaxpr.eqns:
        inner = joined_stack(stack, eqn)
        callee = callee_of(eqn)
        if callee is None:
            solver = eqn.params["jaxprs"].solve if eqn.primitive.name == "custom_linear_solve" else None
            for nested in jaxprs_in_params(eqn.params) if solver is None else (solver,):
                _find(getattr(nested, "jaxpr", nested), inner, callees, inlined)
            continue
        key = _key(eqn, callee, inner)
        if key not in inlined and not callee.effects and not has_stages(callee.jaxpr):
            found = callees.setdefault(key, _Callee(callee, eqn))
            found.stacks.append(inner)
            found.scopes.append(scope)
            found.operands.append(eqn.invars)
            if len(found.stacks) > 1:
                continue
        _find(callee.jaxpr, inner, callees, inlined)


def _key(eqn: JaxprEqn, callee: ClosedJaxpr, stack: Any) -> _Key:
    stage = read_name(str(stack))
    line = source_line(eqn) if is_installed(jaxpr_file(callee.jaxpr)) else ""
    return _Key(id(callee.jaxpr), tuple(map(id, callee.consts)), None if stage.stage is None else stage, line)


def _identity(atom: Atom) -> object:
    if isinstance(atom, Literal):
        return str(atom.aval), np.asarray(atom.val).tobytes()
    return atom


class _Rewriter:
    """Replaces calls of shared callees; each becomes one function."""

    def __init__(self, shared: Mapping[_Key, _Callee]) -> None:
        self._shared = shared
        self._bodies: dict[_Key, ClosedJaxpr] = {}

    def run(self, jaxpr: ClosedJaxpr, stack: Any = None) -> ClosedJaxpr:
        """Rewrites a jaxpr whose callers' name stack is `stack`."""
        eqns = [self._equation(eqn, joined_stack(stack, eqn)) for eqn in jaxpr.jaxpr.eqns]
        return ClosedJaxpr(jaxpr.jaxpr.replace(eqns=eqns), jaxpr.consts)

    def _equation(self, eqn: JaxprEqn, stack: Any) -> JaxprEqn:
        callee = callee_of(eqn)
        key = None if callee is None else _key(eqn, callee, stack)
        if key is None or key not in self._shared:
            return eqn.replace(params=rewritten_params(eqn.params, lambda jaxpr: self.run(jaxpr, stack)))
        found = self._shared[key]
        if key not in self._bodies:
            body = self.run(found.jaxpr, found.stacks[0])
            line_of = found.first if key.line else None
            self._bodies[key] = in_function(body, common_stack(found.stacks).extend(found.name), line_of)
        params = {"jaxpr": self._bodies[key], "name": found.name, "fixed": found.fixed()}
        return eqn.replace(primitive=function_call_p, params=params)
