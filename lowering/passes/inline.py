"""Pass `inline`: replaces calls by the equations of their callee, recursively, inside loops and branches too.

Calls are `jit`, `remat2`, `custom_jvp_call`, `custom_vjp_call` and their like: what they add (caching, rules for
differentiation) has done its work by the time a jaxpr is compiled. Control flow stays, except a branch that is chosen
already: by a constant, or by the platform (`lax.platform_dependent`), which is that of the engine, the CPU.

An inlined equation's name stack is prefixed with the caller's. Its source line is the callee's own, unless the callee
is library code: JAX traces that once and shares it between callers, so that its lines may be another caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ipujax.lowering.jax_compat import CALLEES, Atom, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, closed
from ipujax.lowering.jaxpr import Bodies, CallSite, CallSites, Rewrite, once, with_inner
from ipujax.lowering.source_info import jaxpr_file, source_line, with_caller
from ipujax.runtime.errors import GraphError, is_installed

PLATFORM = "cpu"  # where the engine computes, and plain JAX too


def inline(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr without calls."""

    @once
    def inside(body: ClosedJaxpr) -> ClosedJaxpr:
        return _Inliner(body, inside).run()

    return inside(jaxpr)


def inline_and_name(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The same, with the layer of each equation noted: later passes change the order, which tells layers apart."""

    bodies = Bodies(jaxpr.jaxpr)

    @once
    def inside(body: ClosedJaxpr) -> ClosedJaxpr:
        return _Inliner(body, inside, CallSites(body.jaxpr, bodies)).run()

    return inside(jaxpr)


class _Inliner:
    """Rewrites one jaxpr, those inside it by `inside`; constants of callees become constants of the whole."""

    def __init__(self, jaxpr: ClosedJaxpr, inside: Rewrite, sites: CallSites | None = None) -> None:
        self._jaxpr, self._consts, self._inside, self._sites = jaxpr.jaxpr, list(jaxpr.consts), inside, sites
        self._constvars = list(jaxpr.jaxpr.constvars)
        self._eqns: list[JaxprEqn] = []

    def run(self) -> ClosedJaxpr:
        same: dict[Var, Atom] = {v: v for v in (*self._jaxpr.constvars, *self._jaxpr.invars)}
        outs = self._copy(self._jaxpr, same, None, CallSite(), fresh=False)
        eqns = self._eqns if self._sites is None else self._sites.with_layers(self._eqns, outs)
        body = self._jaxpr.replace(constvars=self._constvars, eqns=eqns, outvars=outs)
        return ClosedJaxpr(body, self._consts)

    def _copy(
        self, jaxpr: Jaxpr, env: dict[Var, Atom], caller: JaxprEqn | None, site: CallSite, fresh: bool
    ) -> list[Atom]:
        """Appends the equations of `jaxpr` under the substitution `env`; returns its results."""
        of_library = caller is not None and is_installed(jaxpr_file(jaxpr))
        omitted = {} if self._sites is None else self._sites.omitted(jaxpr, of_library)
        for number, eqn in enumerate(jaxpr.eqns):
            here = site if self._sites is None else self._sites.of(eqn, site, of_library, omitted.get(number))
            eqn = eqn if caller is None else with_caller(eqn, caller, keep_line=not of_library)
            operands = [_read(env, atom) for atom in eqn.invars]
            if eqn.primitive.name == "platform_index":
                env[eqn.outvars[0]] = Literal(np.int32(_platform_index(eqn)), eqn.outvars[0].aval)
                continue
            call = _call_of(eqn, operands)
            if call is not None:
                results = self._call(*call, eqn, here)
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            outvars = [v if not fresh or isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            if self._sites is None:
                rewritten = with_inner(eqn, self._inside)
            else:
                with self._sites.bodies_of(eqn, operands, outvars):
                    rewritten = with_inner(eqn, self._inside)
                self._sites.add(here)
            self._eqns.append(rewritten.replace(invars=operands, outvars=outvars))
        return [_read(env, atom) for atom in jaxpr.outvars]

    def _call(self, callee: ClosedJaxpr, operands: Sequence[Atom], caller: JaxprEqn, here: CallSite) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(callee.jaxpr.invars, operands, strict=True))
        for var, value in zip(callee.jaxpr.constvars, callee.consts, strict=True):
            constant = Var(var.aval)
            env[var] = constant
            self._constvars.append(constant)
            self._consts.append(value)
        site = here if self._sites is None else self._sites.inside(caller, callee.jaxpr, here)
        return self._copy(callee.jaxpr, env, caller, site, fresh=True)


def callee_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that a call evaluates on its operands; None for what is no call."""
    param = CALLEES.get(eqn.primitive.name)
    return None if param is None else closed(eqn.params[param])


def _call_of(eqn: JaxprEqn, operands: list[Atom]) -> tuple[ClosedJaxpr, list[Atom]] | None:
    """The jaxpr that an equation does nothing but evaluate, and on what; None for other equations."""
    name, params = eqn.primitive.name, eqn.params
    callee = callee_of(eqn)
    if callee is not None:
        return callee, operands
    if name == "cond" and isinstance(operands[0], Literal):
        branches = params["branches"]
        return branches[min(max(int(operands[0].val), 0), len(branches) - 1)], operands[1:]
    if name == "custom_linear_solve":  # the other functions it holds are for differentiation
        matvec, vecmat, solve, transposed = params["const_lengths"]
        first, right_hand_side = matvec + vecmat, matvec + vecmat + solve + transposed
        return params["jaxprs"].solve, operands[first : first + solve] + operands[right_hand_side:]
    return None


def _platform_index(eqn: JaxprEqn) -> int:
    """Which of the branches for different platforms is meant: the one for ours, else the one for all others."""
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


def _read(env: dict[Var, Atom], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else env[atom]
