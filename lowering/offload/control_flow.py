"""Loops and branches that read and write what the user has on the host: they load and store it themselves.

    constant, operand   stays there; the body loads it where it is read
    state of a loop     stays there, in one memory for all iterations, which the body stores to
    stacked row         stored row by row: the body says so by `host_put` of the result
    result of branches  stays there, in one memory for all branches

Input: an equation, and the moves around it. Output: the equation, which stands for what its results leave there.
Limits: a loop that runs as long as any of a batch goes on keeps no state there, see `memory_spaces`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import equations_inside
from ipujax.lowering.offload.primitives import host_put_p

_CONTROL = frozenset(("scan", "while", "cond"))

# Rewrites a body, given which of its inputs lie there, for results the input whose memory they go to, and which other
# results are rows that are stored.
Inside = Callable[[ClosedJaxpr, Collection[int], Mapping[int, int], Collection[int]], ClosedJaxpr]


class Surroundings(Protocol):
    """The moves around an equation."""

    def is_hosted(self, atom: Atom) -> bool:
        """Whether the user has a value on the host."""

    def here(self, atom: Atom, step: int, user: JaxprEqn | None) -> Atom:
        """A value on chip."""

    def stays(self, eqn: JaxprEqn) -> list[bool]:
        """For each operand whether it is read row by row."""

    def mark_hosted(self, var: Var, memory: Var | None = None) -> Var:
        """Notes that a value lies there."""

    def memory_for_state(self, first: Atom, result: Var, eqn: JaxprEqn, number: int, step: int) -> Var:
        """Memory that a loop may overwrite, with its first value."""

    def memory_for_result(self, result: Var, number: int, step: int, eqn: JaxprEqn) -> Var:
        """Memory for what branches leave."""


def streams(eqn: JaxprEqn, is_hosted: Callable[[Atom], bool]) -> bool:
    """Whether a loop or a branch reads or writes what the user has on the host."""
    if eqn.primitive.name not in _CONTROL:
        return False
    return any(map(is_hosted, eqn.invars)) or any(inner.primitive is host_put_p for inner in equations_inside(eqn))


def rewritten(eqn: JaxprEqn, around: Surroundings, number: int, step: int, inside: Inside) -> JaxprEqn:
    """The equation, which loads and stores.

    Args:
        eqn: one that `streams`.
        around: the moves around it.
        number: its place among the equations.
        step: its step.
        inside: rewrites its bodies.
    """
    return _REWRITES[eqn.primitive.name](eqn, around, number, step, inside)


def put_results(body: Jaxpr) -> list[bool]:
    """For each result whether a `host_put` makes it."""
    put = {eqn.outvars[0] for eqn in body.eqns if eqn.primitive is host_put_p}
    return [isinstance(x, Var) and x in put for x in body.outvars]


def _scan(eqn: JaxprEqn, around: Surroundings, number: int, step: int, inside: Inside) -> JaxprEqn:
    params, by_rows = eqn.params, around.stays(eqn)
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    is_put = put_results(params["jaxpr"].jaxpr)
    states = {k: first + k for k in range(params["num_carry"]) if is_put[k]}
    rows = [k for k in range(params["num_carry"], len(is_put)) if is_put[k]]
    operands, there = _operands(eqn, around, number, step, states, range(first), by_rows)
    for k in (*states, *rows):
        around.mark_hosted(eqn.outvars[k], operands[states[k]] if k in states else None)
    assert all(n < last for n in there), "stacks are read by rows"
    return eqn.replace(invars=operands, params={**params, "jaxpr": inside(params["jaxpr"], there, states, rows)})


def _while(eqn: JaxprEqn, around: Surroundings, number: int, step: int, inside: Inside) -> JaxprEqn:
    params = eqn.params
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    first = of_condition + of_body
    is_put = put_results(params["body_jaxpr"].jaxpr)
    states = {k: first + k for k in range(len(is_put)) if is_put[k]}
    operands, there = _operands(eqn, around, number, step, states, range(first), [False] * len(eqn.invars))
    for k, n in states.items():
        around.mark_hosted(eqn.outvars[k], operands[n])
    in_condition = {n if n < of_condition else n - of_body for n in there if not of_condition <= n < first}
    in_body = {n - of_condition for n in there if n >= of_condition}
    condition = inside(params["cond_jaxpr"], in_condition, {}, ())
    body = inside(params["body_jaxpr"], in_body, {k: n - of_condition for k, n in states.items()}, ())
    return eqn.replace(invars=operands, params={**params, "cond_jaxpr": condition, "body_jaxpr": body})


def _cond(eqn: JaxprEqn, around: Surroundings, number: int, step: int, inside: Inside) -> JaxprEqn:
    branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
    is_put = [all(of_branches) for of_branches in zip(*(put_results(b.jaxpr) for b in branches), strict=True)]
    operands, there = _operands(eqn, around, number, step, {}, range(1, len(eqn.invars)), [False] * len(eqn.invars))
    memories: dict[int, int] = {}
    for k, result in enumerate(eqn.outvars):
        if is_put[k]:
            memory = around.memory_for_result(result, number, step, eqn)
            if not any(x is memory for x in operands[1:]):
                operands.append(memory)
            memories[k] = next(n for n, x in enumerate(operands) if n and x is memory)
            around.mark_hosted(result, memory)
    there |= set(memories.values())
    extra = [Var(x.aval) for x in operands[len(eqn.invars) :]]
    of_branch, to = {n - 1 for n in there}, {k: n - 1 for k, n in memories.items()}
    done = tuple(inside(_with_inputs(branch, extra), of_branch, to, ()) for branch in branches)
    return eqn.replace(invars=operands, params={**eqn.params, "branches": done})


_REWRITES: Mapping[str, Callable[..., JaxprEqn]] = {"scan": _scan, "while": _while, "cond": _cond}


def _operands(
    eqn: JaxprEqn,
    around: Surroundings,
    number: int,
    step: int,
    states: Mapping[int, int],
    constant: Collection[int],
    by_rows: Sequence[bool],
) -> tuple[list[Atom], set[int]]:
    """What the equation reads, and the numbers of what of it lies there as a whole."""
    result_of = {n: k for k, n in states.items()}
    operands, there = list[Atom](), set[int]()
    for n, x in enumerate(eqn.invars):
        if n in result_of:
            there.add(n)
            operands.append(around.memory_for_state(x, eqn.outvars[result_of[n]], eqn, number, step))
        elif n in constant and around.is_hosted(x):
            there.add(n)
            operands.append(x)
        else:
            operands.append(x if by_rows[n] else around.here(x, step, eqn))
    return operands, there


def _with_inputs(jaxpr: ClosedJaxpr, extra: Sequence[Var]) -> ClosedJaxpr:
    """A jaxpr with further inputs, which it does not read."""
    if not extra:
        return jaxpr
    body, own = jaxpr.jaxpr, [Var(var.aval) for var in extra]
    names = body.debug_info.with_unknown_names()
    return ClosedJaxpr(body.replace(invars=[*body.invars, *own], debug_info=names), jaxpr.consts)
