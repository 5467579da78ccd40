"""Pass `inline`: replaces calls by the equations of their callee, recursively, in loops and branches too.

Caching and differentiation rules of calls (`jit`, `remat2`, `custom_vjp_call`, …) have done their work when a jaxpr
is compiled. Control flow stays, except a branch with a constant index, or one chosen by the platform
(`lax.platform_dependent`): that of the engine, the CPU. An inlined equation's name stack is prefixed with the
caller's. Its source line is that in the callee, unless the callee is library code: JAX traces that once and shares
it, so that its lines may be another caller's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, NamedSharding

from ipujax.lowering.jax_compat import (
    CALLEES,
    Atom,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    closed,
    eliminate_dead_code,
    new_equation,
    sharding_constraint_p,
)
from ipujax.lowering.jaxpr import Bodies, CallSite, CallSites, Rewrite, once, primitive_names, substituted, with_inner
from ipujax.lowering.passes.step_parts import with_parts
from ipujax.lowering.source_info import jaxpr_file, source_line, with_caller
from ipujax.runtime.errors import GraphError, is_installed

PLATFORM = "cpu"  # where the engine computes, and plain JAX too


def _exported_callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    from ipujax.lowering.stablehlo.exported_calls import exported_callee  # few programs need it

    return exported_callee(eqn)


def _pallas_callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    from ipujax.lowering.pallas_calls import pallas_callee  # few programs need it

    return pallas_callee(eqn)


# Functions that make the jaxpr of a call that holds its function in another form; None where there is none.
_CALLEES_IN_OTHER_FORMS: dict[str, Callable[[JaxprEqn], ClosedJaxpr | None]] = {
    "call_exported": _exported_callee,
    "pallas_call": _pallas_callee,
}


def inline(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr in which calls, also in bodies of loops, are replaced by the equations that they call."""

    @once
    def inline_body(body: ClosedJaxpr) -> ClosedJaxpr:
        return _Inliner(body, inline_body).run()

    return inline_body(_without_unread_residuals(jaxpr))


def inline_and_name(jaxpr: ClosedJaxpr, *, is_micro_batch: bool = False) -> ClosedJaxpr:
    """The first pass of a model: inlines calls, and notes the layer and the part of training of each equation.

    Later passes move equations, so that neither could be told from their order. `is_micro_batch`: whether the jaxpr is
    the micro-batch of a pipeline, whose gradients are added up.
    """

    jaxpr = _without_unread_residuals(jaxpr)
    bodies = Bodies(jaxpr)

    @once
    def inline_body(body: ClosedJaxpr) -> ClosedJaxpr:
        return _Inliner(body, inline_body, CallSites(body.jaxpr, bodies)).run()

    return with_parts(inline_body(jaxpr), is_micro_batch=is_micro_batch)


def _without_unread_residuals(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Function of a `custom_vjp(optimize_remat=True)` in place of its forward, where no residual is read, as in JAX."""
    if "remat_opt" not in primitive_names(jaxpr.jaxpr):
        return jaxpr
    return ClosedJaxpr(eliminate_dead_code(jaxpr.jaxpr), jaxpr.consts)


class _Inliner:
    """Inlines one jaxpr.

    Args:
        jaxpr: the jaxpr; constants of callees become constants of it.
        inline_nested: inlines bodies of loops and branches.
        sites: gets the call site of each equation, from which their layers are named; None to name none.
    """

    def __init__(self, jaxpr: ClosedJaxpr, inline_nested: Rewrite, sites: CallSites | None = None) -> None:
        self._jaxpr = jaxpr.jaxpr
        self._consts = list(jaxpr.consts)
        self._inline_nested = inline_nested
        self._sites = sites
        self._constvars = list(jaxpr.jaxpr.constvars)
        self._eqns: list[JaxprEqn] = []

    def run(self) -> ClosedJaxpr:
        outs = self._append(self._jaxpr, {}, None, CallSite())
        eqns = self._eqns if self._sites is None else self._sites.with_layers(self._eqns, outs)
        body = self._jaxpr.replace(constvars=self._constvars, eqns=eqns, outvars=outs)
        return ClosedJaxpr(body, self._consts)

    def _append(self, jaxpr: Jaxpr, env: dict[Var, Atom], caller: JaxprEqn | None, site: CallSite) -> list[Atom]:
        """Appends the equations of a jaxpr to those of the inlined one, with callees in the place of calls.

        Args:
            jaxpr: the jaxpr that is inlined, or a callee of it.
            env: atom that replaces each variable of the jaxpr; results of its equations are added.
            caller: the call of a callee; None for the outermost jaxpr, whose variables stay.
            site: where the call is, by which layers are named.

        Returns:
            The atoms that are its results.
        """
        # Equations inside a function of a library get the line of the user's call of it. Call sites are followed only
        # to name layers, in the first pass of a model.
        of_library = caller is not None and is_installed(jaxpr_file(jaxpr))
        # Calls that are missing in the frames that JAX has recorded for an equation, by number of the equation.
        omitted_calls = {} if self._sites is None else self._sites.omitted(jaxpr, of_library)
        for number, eqn in enumerate(jaxpr.eqns):
            omitted = omitted_calls.get(number)
            call_site = site if self._sites is None else self._sites.of(eqn, site, of_library, omitted)
            eqn = eqn if caller is None else with_caller(eqn, caller, keep_line=not of_library)
            operands = [substituted(atom, env) for atom in eqn.invars]
            # `lax.platform_dependent`: with a literal index its branch is inlined like a call, next.
            if eqn.primitive.name == "platform_index":
                env[eqn.outvars[0]] = Literal(np.int32(_platform_index(eqn)), eqn.outvars[0].aval)
                continue
            call = _call_of(eqn, operands)
            if call is not None:  # the callee's equations come in its place
                callee, arguments = call
                arguments = self._constrained(eqn, "in_shardings", arguments, call_site)
                results = self._append_callee(callee, arguments, eqn, call_site)
                results = self._constrained(eqn, "out_shardings", results, call_site)
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            # A callee inlined twice must not define its variables twice.
            outvars = [v if caller is None or isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            if self._sites is None:
                rewritten = with_inner(eqn, self._inline_nested)
            else:
                with self._sites.bodies_of(eqn, operands, outvars):
                    rewritten = with_inner(eqn, self._inline_nested)
                self._sites.add(call_site)
            is_same = caller is None and all(map(operator.is_, operands, eqn.invars))
            self._eqns.append(rewritten if is_same else rewritten.replace(invars=operands, outvars=outvars))
        return [substituted(atom, env) for atom in jaxpr.outvars]

    def _append_callee(
        self, callee: ClosedJaxpr, operands: Sequence[Atom], caller: JaxprEqn, call_site: CallSite
    ) -> list[Atom]:
        """Appends the equations of a callee on its operands, and its constants; returns the atoms of its results.

        Args:
            callee: the jaxpr that the call evaluates.
            operands: atom for each of its inputs.
            caller: the call.
            call_site: Python frames of the call, by which layers are named.
        """
        env: dict[Var, Atom] = dict(zip(callee.jaxpr.invars, operands, strict=True))
        for var, value in zip(callee.jaxpr.constvars, callee.consts, strict=True):
            # A callee inlined twice has its constants twice: each call site has its own substitution.
            constant = Var(var.aval)
            env[var] = constant
            self._constvars.append(constant)
            self._consts.append(value)
        # The frames around the callee's equations. They matter in the first pass of a model alone, which names layers:
        # other inliners have no `_sites`, and never read the site.
        site_inside = call_site if self._sites is None else self._sites.inside(caller, callee.jaxpr, call_site)
        return self._append(callee.jaxpr, env, caller, site_inside)

    def _constrained(self, eqn: JaxprEqn, param: str, atoms: Sequence[Atom], site: CallSite) -> list[Atom]:
        """Keeps the shardings that an inlined call of `jax.jit` asks for, as sharding constraints.

        Args:
            eqn: the call; one of another primitive has no shardings.
            param: "in_shardings" or "out_shardings".
            atoms: its operands, or its results.
            site: where the call is.

        Returns:
            `atoms`, each with a sharding replaced by the result of an equation that constrains it, which is appended.
        """
        shardings = eqn.params.get(param, ()) if eqn.primitive.name == "jit" else ()
        constrained = list(atoms)
        for number, sharding in enumerate(shardings):
            atom = atoms[number]
            if not isinstance(atom, Var) or not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
                continue
            # Explicit axes are in the types of values already.
            if AxisType.Auto in sharding.mesh.axis_types:
                result = Var(atom.aval)
                constrained[number] = result
                self._eqns.append(_sharding_constraint(atom, result, sharding, eqn))
                if self._sites is not None:  # in the first pass: each equation has a call site
                    self._sites.add(site)
        return constrained


def callee_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Jaxpr that a call evaluates on its operands; None for other equations."""
    param = CALLEES.get(eqn.primitive.name)
    return None if param is None else closed(eqn.params[param])


def _call_of(eqn: JaxprEqn, operands: list[Atom]) -> tuple[ClosedJaxpr, list[Atom]] | None:
    """Jaxpr that an equation only evaluates, and the operands of that jaxpr; None for an equation that stays.

    That is a call, a branch on a literal index, or a linear solve, whose own function computes it. `operands` are those
    of the equation, with the literals that variables stand for.
    """
    name = eqn.primitive.name
    params = eqn.params
    callee = callee_of(eqn)
    if callee is None and name in _CALLEES_IN_OTHER_FORMS:
        callee = _CALLEES_IN_OTHER_FORMS[name](eqn)
    if callee is not None:
        return callee, operands
    if name == "cond" and isinstance(operands[0], Literal):
        branches = params["branches"]
        return branches[min(max(int(operands[0].val), 0), len(branches) - 1)], operands[1:]  # JAX clamps the index
    if name == "custom_linear_solve":  # operands: constants of four functions, of which `solve` computes; right sides
        matvec, vecmat, solve, transposed = params["const_lengths"]
        solve_operands = matvec + vecmat
        right_hand_side = solve_operands + solve + transposed
        return params["jaxprs"].solve, operands[solve_operands : solve_operands + solve] + operands[right_hand_side:]
    return None


def _platform_index(eqn: JaxprEqn) -> int:
    """Index of the branch for the engine's platform, else of the default."""
    platforms = eqn.params["platforms"]
    for number, names in enumerate(platforms):
        if names is None or PLATFORM in names:
            return number
    raise GraphError(
        "lax.platform_dependent has no branch for this platform",
        where=source_line(eqn) or None,
        expected=f"one for {PLATFORM!r}, or a default",
        got=", ".join(name for names in platforms for name in names),
        hint="default=...",
    )


def _sharding_constraint(operand: Atom, result: Var, sharding: NamedSharding, like: JaxprEqn) -> JaxprEqn:
    """The equation that `jax.lax.with_sharding_constraint(operand, sharding)` is traced to, at the line of `like`."""
    params: dict[str, Any] = {
        "sharding": sharding,
        "layout": None,
        "context_mesh": None,
        "unconstrained_dims": frozenset(),
    }
    return new_equation(sharding_constraint_p, [operand], [result], params, like)
