"""Loops and branches with values that the user has put on the host: their bodies load and store them.

    constant, operand   stays in streaming memory; the body loads it before it is read
    state of a loop     stays there, in one buffer for all iterations, which the body stores to
    stacked row         stored row by row: the body has a `host_put` of the result
    result of branches  stays there, in one buffer for all branches

Input: an equation, and the moves of the jaxpr around it. Output: the equation, whose results stand for those buffers.
Limits: a loop over a batch, which runs until its last element ends, has no state there, see `memory_spaces`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import (
    CONTROL_FLOW,
    Body,
    equations_inside,
    scan_body,
    variables,
    while_body,
    while_condition,
)
from ipujax.lowering.offload.primitives import host_put_p


@dataclass(frozen=True, slots=True)
class BodyMemory:
    """Inputs and results of a body in streaming memory, by number.

    Args:
        inputs: inputs that stay there around the body, which loads them.
        input_of_result: for each result that the body stores the input whose buffer it takes.
        stacked_results: results that the body puts on the host, a row in each iteration.
    """

    inputs: Collection[int]
    input_of_result: Mapping[int, int] = field(default_factory=dict)
    stacked_results: Collection[int] = ()


# Adds the loads and stores of a body.
BodyRewrite = Callable[[ClosedJaxpr, BodyMemory], ClosedJaxpr]


class OuterMoves(Protocol):
    """The moves of the jaxpr around an equation."""

    def is_hosted(self, atom: Atom) -> bool:
        """True if the user has put a value on the host."""

    def on_chip(self, atom: Atom, step: int, user: JaxprEqn | None) -> Atom:
        """A value on chip."""

    def stays_off_chip(self, eqn: JaxprEqn) -> list[bool]:
        """For each operand whether it is read row by row."""

    def mark_hosted(self, var: Var, memory: Var | None = None) -> Var:
        """Notes that a value is in streaming memory."""

    def memory_for_state(self, initial: Atom, result: Var, eqn: JaxprEqn, number: int, step: int) -> Var:
        """Memory that a loop may overwrite, with its first value."""

    def memory_for_result(self, result: Var, number: int, step: int, eqn: JaxprEqn) -> Var:
        """Memory for a result of branches."""


def uses_streaming_memory(eqn: JaxprEqn, is_hosted: Callable[[Atom], bool]) -> bool:
    """True if a loop or a branch reads or writes values that the user has put on the host."""
    if eqn.primitive.name not in CONTROL_FLOW:
        return False
    return any(map(is_hosted, eqn.invars)) or any(inner.primitive is host_put_p for inner in equations_inside(eqn))


def rewrite_control_flow(
    eqn: JaxprEqn, outer: OuterMoves, number: int, step: int, rewrite_body: BodyRewrite
) -> JaxprEqn:
    """Rewrites an equation that `uses_streaming_memory`, so that its bodies load and store.

    Args:
        eqn: a loop or a branch.
        outer: moves of the jaxpr around it; receives loads of operands, and results in streaming memory.
        number: number of the equation in that jaxpr.
        step: its step of phases.
        rewrite_body: adds the loads and stores of its bodies.
    """
    return _REWRITES[eqn.primitive.name](eqn, outer, number, step, rewrite_body)


def put_results(body: Jaxpr) -> list[bool]:
    """For each result whether a `host_put` defines it."""
    put = {eqn.outvars[0] for eqn in body.eqns if eqn.primitive is host_put_p}
    return [isinstance(x, Var) and x in put for x in body.outvars]


def _rewrite_scan(eqn: JaxprEqn, outer: OuterMoves, number: int, step: int, rewrite_body: BodyRewrite) -> JaxprEqn:
    """A `scan` whose body loads and stores values in streaming memory.

    States that the body puts there stay there; stacks there are loaded and stored by rows. `number` is that of the loop
    in the jaxpr around it, `step` its step of phases; `outer` adds moves around it, `rewrite_body` those of its body.
    """
    inside = scan_body(eqn.params)
    is_by_rows = outer.stays_off_chip(eqn)
    by_rows = [n for n in range(len(eqn.invars)) if is_by_rows[n]]
    constants, _, stacks = (range(len(eqn.invars))[places] for places in inside.operands)
    states = _put_states(inside)
    is_put = put_results(inside.jaxpr.jaxpr)
    put_stacks = [result for result in range(len(is_put))[inside.results.stacks] if is_put[result]]
    operands, remote_operands = _place_operands(eqn, outer, number, step, states, constants, by_rows)
    _mark_states(eqn, outer, states, operands)
    for result in put_stacks:
        outer.mark_hosted(eqn.outvars[result])
    assert remote_operands.isdisjoint(stacks), "stacks are read by rows"
    # Operands and inputs of a scan have the same numbers.
    body = rewrite_body(inside.jaxpr, BodyMemory(remote_operands, states, put_stacks))
    return eqn.replace(invars=operands, params={**eqn.params, "jaxpr": body})


def _rewrite_while(eqn: JaxprEqn, outer: OuterMoves, number: int, step: int, rewrite_body: BodyRewrite) -> JaxprEqn:
    """A `while` whose condition and body load values in streaming memory, and whose body stores them.

    States that the body puts there stay there, and are loaded in the condition too. `number` is that of the loop in the
    jaxpr around it, `step` its step of phases; `outer` adds moves around it, `rewrite_body` those of its jaxprs.
    """
    tested = while_condition(eqn.params)
    inside = while_body(eqn.params)
    numbers = range(len(eqn.invars))
    constants = {*numbers[tested.operands.constants], *numbers[inside.operands.constants]}
    states = _put_states(inside)
    operands, remote_operands = _place_operands(eqn, outer, number, step, states, constants)
    _mark_states(eqn, outer, states, operands)
    # Condition and body have inputs of numbers of their own: `of_operands` lists for each input its operand.
    in_condition = [i for i, operand in enumerate(tested.of_operands(numbers)) if operand in remote_operands]
    input_of_operand = {operand: i for i, operand in enumerate(inside.of_operands(numbers))}
    in_body = [i for operand, i in input_of_operand.items() if operand in remote_operands]
    condition = rewrite_body(tested.jaxpr, BodyMemory(in_condition))
    input_of_state = {result: input_of_operand[operand] for result, operand in states.items()}
    body = rewrite_body(inside.jaxpr, BodyMemory(in_body, input_of_state))
    return eqn.replace(invars=operands, params={**eqn.params, "cond_jaxpr": condition, "body_jaxpr": body})


def _put_states(body: Body) -> dict[int, int]:
    """The states that a loop's body puts in streaming memory: number of the loop's operand by number of the result."""
    is_put = put_results(body.jaxpr.jaxpr)[body.results.carries]
    first_operand = body.operands.carries.start  # the first results are the states, in the order of their operands
    return {result: first_operand + result for result, is_state_put in enumerate(is_put) if is_state_put}


def _mark_states(eqn: JaxprEqn, outer: OuterMoves, states: Mapping[int, int], operands: Sequence[Atom]) -> None:
    """Notes that the results of states are in the buffers of their operands."""
    for k, n in states.items():
        (memory,) = variables(operands[n : n + 1])
        outer.mark_hosted(eqn.outvars[k], memory)


def _rewrite_cond(eqn: JaxprEqn, outer: OuterMoves, number: int, step: int, rewrite_body: BodyRewrite) -> JaxprEqn:
    """A `cond` whose branches load and store values in streaming memory.

    Results that all branches put there get a buffer there, as a further operand of the branches. `number` is that of
    the equation in the jaxpr around it, `step` its step of phases; `outer` adds moves around it, `rewrite_body` those
    of the branches.
    """
    branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
    # Operand 0 is the index of the branch, which branches themselves do not get.
    is_put = [all(flags) for flags in zip(*(put_results(b.jaxpr) for b in branches), strict=True)]
    constants = range(1, len(eqn.invars))
    operands, remote_operands = _place_operands(eqn, outer, number, step, {}, constants)
    operand_of_result: dict[int, int] = {}
    for result_number, result in enumerate(eqn.outvars):
        if is_put[result_number]:
            memory = outer.memory_for_result(result, number, step, eqn)
            if not any(x is memory for x in operands[1:]):  # an argument that the result replaces may be one already
                operands.append(memory)
            operand_of_result[result_number] = next(n for n, x in enumerate(operands) if n and x is memory)
            outer.mark_hosted(result, memory)
    remote_operands |= set(operand_of_result.values())
    extra = [Var(x.aval) for x in operands[len(eqn.invars) :]]
    input_of_result = {result_number: operand - 1 for result_number, operand in operand_of_result.items()}
    memory_of_branch = BodyMemory({operand - 1 for operand in remote_operands}, input_of_result)
    new_branches = tuple(rewrite_body(_with_inputs(branch, extra), memory_of_branch) for branch in branches)
    return eqn.replace(invars=operands, params={**eqn.params, "branches": new_branches})


_REWRITES: Mapping[str, Callable[..., JaxprEqn]] = {
    "scan": _rewrite_scan,
    "while": _rewrite_while,
    "cond": _rewrite_cond,
}


def _place_operands(
    eqn: JaxprEqn,
    outer: OuterMoves,
    number: int,
    step: int,
    states: Mapping[int, int],
    constants: Collection[int],
    by_rows: Collection[int] = (),
) -> tuple[list[Atom], set[int]]:
    """The operands, on chip or in streaming memory, and the numbers of those that stay there entirely.

    Args:
        eqn: the loop or branch.
        outer: moves of the jaxpr around it; receives the loads of other operands.
        number: number of the equation in that jaxpr.
        step: its step of phases.
        states: operands that are states in streaming memory, by the number of their result.
        constants: operands that no iteration changes.
        by_rows: operands that are read by rows, which stay as they are.
    """
    result_of = {operand: result for result, operand in states.items()}
    operands: list[Atom] = []
    remote_operands: set[int] = set()
    for n, x in enumerate(eqn.invars):
        if n in result_of:
            remote_operands.add(n)
            operands.append(outer.memory_for_state(x, eqn.outvars[result_of[n]], eqn, number, step))
        elif n in constants and outer.is_hosted(x):
            remote_operands.add(n)
            operands.append(x)
        else:
            operands.append(x if n in by_rows else outer.on_chip(x, step, eqn))
    return operands, remote_operands


def _with_inputs(jaxpr: ClosedJaxpr, extra: Sequence[Var]) -> ClosedJaxpr:
    """A branch with further inputs like `extra`, unused as yet: all branches of a `cond` have equal ones."""
    if not extra:
        return jaxpr
    body = jaxpr.jaxpr
    new_inputs = [Var(var.aval) for var in extra]
    names = body.debug_info.with_unknown_names()
    return ClosedJaxpr(body.replace(invars=[*body.invars, *new_inputs], debug_info=names), jaxpr.consts)
