"""Bodies of control flow: which operands and results of a loop, a branch or a call its jaxprs have.

    equation       body          constants           carries          stacks
    scan           jaxpr         first operands      next operands    last operands
    while          cond_jaxpr    first operands      last operands
                   body_jaxpr    next operands       last operands
    cond           branches      all but the index
    calls          callee        all operands

A constant has one value in all iterations, a carry a new one after each, a stack a row for each. A body has its
constants, carries and rows of stacks as inputs, in this order; its results are the carries of the next iteration, then
rows of stacks. Results of branches and calls are constants. Input: equation. Output: its bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var, closed
from ipujax.lowering.jaxpr.nested import variables
from ipujax.lowering.jaxpr.stage_names import PIPELINE

Item = TypeVar("Item")

LOOPS = frozenset(("scan", "while"))
CONTROL_FLOW = LOOPS | {"cond"}
# Equations whose jaxprs passes rewrite; code of the user for tiles stays as it is.
HOLDERS = CONTROL_FLOW | {"replicated"}
_CALLEES = {"function_call": "jaxpr", PIPELINE: "loop"}  # calls that are lowered as such; `inline` expands the others


class Places(NamedTuple):
    """Where constants, carries and stacks are among operands, inputs or results."""

    constants: slice
    carries: slice
    stacks: slice

    def are_stacks(self) -> tuple[bool, ...]:
        """Return for each operand, input or result whether it is a stack."""
        return tuple(n >= self.stacks.start for n in range(self.stacks.stop))


@dataclass(frozen=True, slots=True)
class Body:
    """A jaxpr in an equation, and what its inputs and results are outside.

    Args:
        jaxpr: the jaxpr.
        operands: places among the operands of the equation.
        inputs: places among the inputs of the jaxpr.
        results: places among the results of the equation, and of the jaxpr; of a condition none.
    """

    jaxpr: ClosedJaxpr
    operands: Places
    inputs: Places
    results: Places

    def of_operands(self, values: Sequence[Item]) -> list[Item]:
        """Return for each input of the jaxpr the value of the operand, or stack, that it comes from."""
        return [value for places in self.operands for value in values[places]]


def bodies(eqn: JaxprEqn) -> list[Body]:
    """Return the jaxprs inside a loop, branch or call, with the operands and results that they correspond to.

    Those that compute results: not the condition of a loop. Empty for equations that hold none.
    """
    name = eqn.primitive.name
    params = eqn.params
    if name == "scan":
        return [scan_body(params)]
    if name == "while":
        return [while_body(params)]
    if name == "cond":
        return [_called_body(branch, first_operand=1) for branch in params["branches"]]
    return [_called_body(closed(params[_CALLEES[name]]), first_operand=0)] if name in _CALLEES else []


def scan_body(params: Mapping[str, Any]) -> Body:
    """Return the body of a `scan` from its parameters."""
    jaxpr: ClosedJaxpr = params["jaxpr"]
    constants = params["num_consts"]
    carries = params["num_carry"]
    inputs = _places(constants=constants, carries=carries, stacks=len(jaxpr.in_avals) - constants - carries)
    return Body(jaxpr, inputs, inputs, _places(carries=carries, stacks=len(jaxpr.out_avals) - carries))


def with_scan_body(params: Mapping[str, Any], jaxpr: ClosedJaxpr, more_constants: int) -> dict[str, Any]:
    """Return the parameters of a `scan` with another body, which has so many more constants."""
    return {**params, "jaxpr": jaxpr, "num_consts": params["num_consts"] + more_constants}


def sum_carries(body: Body) -> dict[int, JaxprEqn]:
    """Return carries of a `scan` that are sums over its iterations: the equation that adds to each, by its number.

    Nothing else reads such a carry in the loop, so that a plan may add all its terms at once.
    """
    jaxpr = body.jaxpr.jaxpr
    adding = {var: eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("add", "add_any") for var in eqn.outvars}
    reads = Counter(variables([*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]))
    pairs = zip(jaxpr.invars[body.inputs.carries], jaxpr.outvars[body.results.carries], strict=True)
    return {
        number: adding[result]
        for number, (carry, result) in enumerate(pairs)
        if isinstance(result, Var) and result in adding and carry in adding[result].invars
        if reads[carry] == reads[result] == 1
    }


def while_body(params: Mapping[str, Any]) -> Body:
    """Return the body of a `while` from its parameters."""
    jaxpr: ClosedJaxpr = params["body_jaxpr"]
    constants = params["body_nconsts"]
    carries = len(jaxpr.out_avals)
    operands = _places(first=params["cond_nconsts"], constants=constants, carries=carries)
    return Body(jaxpr, operands, _places(constants=constants, carries=carries), _places(carries=carries))


def while_condition(params: Mapping[str, Any]) -> Body:
    """Return the condition of a `while` from its parameters."""
    constants = params["cond_nconsts"]
    body = while_body(params)
    inputs = _places(constants=constants, carries=len(body.jaxpr.out_avals))
    operands = Places(inputs.constants, body.operands.carries, body.operands.stacks)
    return Body(params["cond_jaxpr"], operands, inputs, _places())


def _called_body(jaxpr: ClosedJaxpr, first_operand: int) -> Body:
    """The body of a branch or a callee."""
    count = len(jaxpr.in_avals)
    operands = _places(first=first_operand, constants=count)
    return Body(jaxpr, operands, _places(constants=count), _places(constants=len(jaxpr.out_avals)))


def _places(*, first: int = 0, constants: int = 0, carries: int = 0, stacks: int = 0) -> Places:
    """Places of so many constants, carries and stacks, one after the other from number `first` on."""
    bounds = accumulate((constants, carries, stacks), initial=first)
    return Places(*(slice(start, end) for start, end in pairwise(bounds)))
