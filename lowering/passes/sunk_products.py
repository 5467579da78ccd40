"""Sums of products over the iterations of a loop: computed behind it, by one product of all rows.

    scan: h, dw' = …, dw + x[t]ᵀ @ g             h, g = scan: …, the rows of g
                                                 dw' = dw + x.reshape(-1, m)ᵀ @ g.reshape(-1, n)

Gradients of the weights of a recurrent layer are such sums, which cuDNN computes so too (`cudnnRNNBackwardWeights`).
The loop stacks the operands of the product that are no rows of a stack yet. The sum of elements, as the gradient of a
bias, moves where its operand is one of these.
Input: a `scan`. Output: the loop and the equations behind it. Sums stay that `jax.checkpoint` computes again, those of
a stage, and those whose rows cost more bytes than the supersteps that they save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, JaxprEqn, Var, is_on_host
from ipujax.lowering.jaxpr import (
    Body,
    elements_of,
    scan_body,
    spliced,
    stage_name,
    sum_carries,
    value_bytes,
    variables,
    variables_read,
)
from ipujax.lowering.primitives import is_matrix_product, record_of
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.tensor import REMATERIALISED, element_bytes

WIDE_BYTES = 4  # of numbers; sums of narrower ones round and overflow where they are stored


@dataclass(frozen=True, slots=True)
class _Sum:
    """A carry to which each iteration adds a value that nothing else reads.

    Args:
        number: of the carry.
        carry: input of the body.
        eqns: the product or sum of elements, views of its result, and the addition.
    """

    number: int
    carry: Var
    eqns: tuple[JaxprEqn, ...]

    @property
    def operands(self) -> list[Var]:
        """Values of the iteration that are multiplied, or whose elements are added."""
        return variables(self.eqns[0].invars)

    @property
    def is_product(self) -> bool:
        return is_matrix_product(self.eqns[0])


def sunk(scan: JaxprEqn, most_bytes: float, zeros: Collection[Atom]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Returns a loop without its sums of products, and these sums over all iterations, as equations behind it.

    One product of the rows of all iterations takes the place of a product in each. The first list is empty where
    nothing is left of the loop; both are as before, ([scan], []), where it has no such sum.

    Args:
        scan: the loop.
        most_bytes: upper bound of the bytes, on all tiles, of the rows that a sum makes an iteration keep.
        zeros: values outside of the loop that are known to be 0.
    """
    inside = scan_body(scan.params)
    body = inside.jaxpr.jaxpr
    # Variables of the body whose rows of all iterations are in a variable outside: first the loop's own stacks.
    stacks: dict[Var, Atom] = dict(
        zip(body.invars[inside.inputs.stacks], scan.invars[inside.operands.stacks], strict=True)
    )
    equal_in_all = {*body.invars[inside.inputs.constants], *body.constvars}
    for eqn in body.eqns:
        if equal_in_all.issuperset(variables_read(eqn)):
            equal_in_all.update(eqn.outvars)
    sums: list[_Sum] = []
    # Sums of elements last, as they move only with the rows of products.
    for each in sorted(_sums(scan, inside, zeros), key=lambda each: not each.is_product):
        new = [var for var in dict.fromkeys(each.operands) if var not in stacks]
        is_small = sum(value_bytes(var.aval) for var in new) <= most_bytes
        if equal_in_all.isdisjoint(each.operands) and (is_small if each.is_product else not new):
            sums.append(each)
            stacks.update((var, _stack_of(var, scan)) for var in new)
    return _split(scan, inside, sums, stacks) if sums else ([scan], [])


def _stack_of(var: Var, scan: JaxprEqn) -> Var:
    """A new variable for all rows of a value."""
    aval: Any = var.aval
    return Var(aval.update(shape=(scan.params["length"], *aval.shape)))


def _sums(scan: JaxprEqn, inside: Body, zeros: Collection[Atom]) -> list[_Sum]:
    """Carries of a loop that are sums over its iterations, of products or of sums of elements.

    A sum of half precision stays unless it begins with 0: what all iterations add may overflow where the sum does not.
    """
    body = inside.jaxpr.jaxpr
    if scan.params["length"] < 2:  # a sum of one term gains nothing
        return []
    makers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    # Number of reads of each variable.
    reads = Counter(var for eqn in body.eqns for var in variables_read(eqn)) + Counter(variables(body.outvars))
    carries = body.invars[inside.inputs.carries]
    sums = []
    for number, add in sum_carries(inside).items():
        eqns = _added(carries[number], add, makers, reads)
        begin = scan.invars[inside.operands.carries][number]
        is_wide = element_bytes(add.outvars[0].aval.dtype) >= WIDE_BYTES  # type: ignore[attr-defined]
        is_read = not isinstance(scan.outvars[number], DropVar)
        if eqns is not None and is_read and (is_wide or (isinstance(begin, Var) and begin in zeros)):
            sums.append(_Sum(number, carries[number], eqns))
    return sums


def _added(
    carry: Var, add: JaxprEqn, makers: Mapping[Var, JaxprEqn], reads: Mapping[Var, int]
) -> tuple[JaxprEqn, ...] | None:
    """The equations of what is added to a carry, from a product or sum of elements over views of it to the addition.

    Args:
        carry: input of the body.
        add: addition to it.
        makers: equation of each value of the body.
        reads: number of reads of each value.

    Returns:
        The equations in order, `add` last; None where something else is added, or something else reads it too.
    """
    (added,) = [atom for atom in add.invars if atom is not carry]
    eqns = [add]
    # Back from the addition: each equation's only operand is the result of the one before.
    while isinstance(added, Var) and reads[added] == 1 and (eqn := makers.get(added)) is not None:
        if not _may_sink(eqn):
            return None
        eqns.insert(0, eqn)
        is_sum = eqn.primitive.name == "reduce_sum" and elements_of(eqn.invars[0]) > elements_of(added)
        if is_matrix_product(eqn) or is_sum:
            return tuple(eqns)
        if record_of(eqn).cost != "view" and eqn.primitive.name != "reduce_sum":
            return None
        (added,) = eqn.invars
    return None


def _may_sink(eqn: JaxprEqn) -> bool:
    """True for an equation on the chip, of no stage, and not of a `jax.checkpoint`."""
    is_on_chip = not any(is_on_host(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
    is_of_variables = len(variables(eqn.invars)) == len(eqn.invars)
    return is_on_chip and is_of_variables and stage_name(eqn).stage is None and REMATERIALISED not in name_stack(eqn)


def _split(
    scan: JaxprEqn, inside: Body, sums: list[_Sum], stacks: Mapping[Var, Atom]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The loop without sums, in a list that is empty if nothing is left of it, and the equations of the sums behind it.

    Args:
        scan: the loop.
        inside: its body.
        sums: carries to take out of the loop.
        stacks: variable outside with the rows of each value that a sum needs; the loop gets those that it does not read
            as further results.
    """
    body = inside.jaxpr.jaxpr
    sunk_ids = {id(eqn) for each in sums for eqn in each.eqns}
    numbers = {each.number for each in sums}  # of carries
    own_stacks = body.invars[inside.inputs.stacks]
    pushed = [var for var in stacks if var not in own_stacks]

    def without(carries: list[Atom]) -> list[Atom]:
        return [atom for number, atom in enumerate(carries) if number not in numbers]

    def inputs(atoms: list[Atom]) -> list[Atom]:
        """Of the inputs of the loop or of its body those that remain."""
        places = inside.inputs
        return [*atoms[places.constants], *without(atoms[places.carries]), *atoms[places.stacks]]

    def results(atoms: list[Atom], rows: list[Atom]) -> list[Atom]:
        """Of the results of the loop or of its body those that remain, and new stacks or their rows."""
        return [*without(atoms[inside.results.carries]), *atoms[inside.results.stacks], *rows]

    names = body.debug_info.with_unknown_names()
    jaxpr = body.replace(
        invars=inputs(list(body.invars)),
        eqns=[eqn for eqn in body.eqns if id(eqn) not in sunk_ids],
        outvars=results(list(body.outvars), list(pushed)),
        debug_info=names,
    )
    params = {**scan.params, "jaxpr": ClosedJaxpr(jaxpr, inside.jaxpr.consts)}
    params["num_carry"] -= len(sums)
    outvars: list[Any] = results(list(scan.outvars), [stacks[var] for var in pushed])
    loop = scan.replace(params=params, invars=inputs(list(scan.invars)), outvars=outvars)
    behind: list[JaxprEqn] = []
    for each in sums:
        initial = scan.invars[inside.operands.carries][each.number]
        # Variables of the body → those outside: the sum begins with the initial carry, and is the loop's old result.
        table = {**stacks, each.carry: initial, each.eqns[-1].outvars[0]: scan.outvars[each.number]}
        over_rows = [_over_all_rows(each.eqns[0]), *each.eqns[1:]]
        behind += spliced(body.replace(eqns=over_rows, outvars=[]), table)[0]
    return [loop] if outvars or loop.effects else [], behind


def _over_all_rows(eqn: JaxprEqn) -> JaxprEqn:
    """A product, or sum of elements, that sums over the first dimension of its operands too."""
    if eqn.primitive.name == "reduce_sum":
        return eqn.replace(params={**eqn.params, "axes": (0, *(axis + 1 for axis in eqn.params["axes"]))})
    contracted, batch = ([tuple(d + 1 for d in dims) for dims in pair] for pair in eqn.params["dimension_numbers"])
    numbers = tuple((0, *dims) for dims in contracted), tuple(batch)
    return eqn.replace(params={**eqn.params, "dimension_numbers": numbers})
