"""Pass `memory_spaces`: what the user keeps on the host, in `pinned_host`, becomes what is put to streaming memory.

    m<host> = argument; m1 = device_put[Device] m          m1 is read where m is: the pass `offload` loads it
    v1 = 0.9 * m1; v<host> = device_put[Host] v1           v = host_put v1

Input: an inlined jaxpr, whose abstract values say in which memory they are. Output: an equal one of values that are all
on the device, in which `host_put` says what is stored. What is computed of values on the host is computed on tiles, as
all is, and put back where it is a result. Results of loops and branches, and of the whole, that are on the host are
each what a `host_put` of its own makes.

Source: `jax.memory.Space`, jax 0.10. Limits: values of one element, and keys, stay on the chip, and so does what a
jitted function inside closes over, what is computed of values on the host before it is a result, and the state of a
loop under `jax.vmap` that runs as long as any of the batch goes on.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Var,
    fetched,
    is_on_host,
    new_equation,
    on_device,
)
from ipujax.lowering.jaxpr import Rewrite, equations, everywhere, with_inner
from ipujax.lowering.offload.primitives import host_put_p
from ipujax.lowering.replicas import replicated_p
from ipujax.runtime.logs import Log, subject
from ipujax.runtime.tensor import is_key_dtype

_LOG = Log("passes")
_LEAST_ELEMENTS = 2  # of what is put, as of what is offloaded


def memory_spaces(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr of values on the device, which puts to streaming memory what was put on the host."""
    return everywhere(_on_device)(jaxpr) if _names_host(jaxpr) else jaxpr


def is_streamed(aval: Any) -> bool:
    """Whether a value is in streaming memory: it is on the host, and neither a key nor a single element."""
    return is_on_host(aval) and not is_key_dtype(aval.dtype) and prod(aval.shape) >= _LEAST_ELEMENTS


def _names_host(jaxpr: ClosedJaxpr) -> bool:
    body = jaxpr.jaxpr
    atoms = [*body.invars, *body.constvars, *(var for eqn in equations(body) for var in eqn.outvars)]
    return any(is_on_host(var.aval) for var in atoms)


def _on_device(jaxpr: ClosedJaxpr, inside: Rewrite) -> ClosedJaxpr:
    return _Rewritten(jaxpr, inside).jaxpr()


class _Rewritten:
    """One jaxpr, rewritten; those inside it by `inside`."""

    def __init__(self, jaxpr: ClosedJaxpr, inside: Rewrite) -> None:
        self._before, self._inside = jaxpr, inside
        self._new: dict[Var, Atom] = {}
        self._eqns = list[JaxprEqn]()
        self._put = set[Var]()  # results of `host_put`
        body = jaxpr.jaxpr
        self._invars = [self._renamed(var) for var in body.invars]
        self._constvars = [self._renamed(var) for var in body.constvars]

    def jaxpr(self) -> ClosedJaxpr:
        """The jaxpr afterwards."""
        body = self._before.jaxpr
        for eqn in body.eqns:
            if eqn.primitive.name == "device_put" and any(is_on_host(x.aval) for x in (*eqn.invars, *eqn.outvars)):
                self._add_moves(eqn)
            else:
                self._add(eqn)
        outvars = list[Atom]()
        for atom in body.outvars:
            new = self._read(atom)
            if is_streamed(atom.aval) and (not isinstance(new, Var) or new not in self._put or new in outvars):
                new = self._add_put(new, None)
            outvars.append(new)
        after = body.replace(invars=self._invars, constvars=self._constvars, eqns=self._eqns, outvars=outvars)
        return ClosedJaxpr(after, self._constants())

    def _add_moves(self, eqn: JaxprEqn) -> None:
        """A `device_put` of which something is on the host: what is fetched is the value itself, loaded when read."""
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            value = self._read(atom)
            is_put = is_streamed(var.aval) and not is_on_host(atom.aval)
            if not isinstance(var, DropVar):
                self._new[var] = self._add_put(value, eqn) if is_put else value

    def _add(self, eqn: JaxprEqn) -> None:
        operands = [self._read(atom) for atom in eqn.invars]
        outvars = [self._renamed(var) for var in eqn.outvars]
        is_batched = _is_batched_loop(eqn)
        body = with_inner(eqn, self._inside)
        body = with_inner(body, _left_on_chip) if is_batched else body
        self._eqns.append(body.replace(invars=operands, outvars=outvars))
        if eqn.primitive is replicated_p or eqn.primitive.name == "shard_map":  # results are put inside
            self._put.update(outvars)
        for var, made in zip(eqn.outvars, outvars, strict=True):
            is_left = is_batched or _has_small_rows(eqn, var)  # by the equation on the chip
            if is_left and is_streamed(var.aval) and not isinstance(var, DropVar):
                self._new[var] = self._add_put(made, eqn)

    def _add_put(self, value: Atom, like: JaxprEqn | None) -> Var:
        there = Var(on_device(value.aval))
        self._eqns.append(new_equation(host_put_p, [value], [there], {}, like))
        self._put.add(there)
        return there

    def _renamed(self, var: Var) -> Var:
        if not is_on_host(var.aval):
            return var
        new = self._new[var] = type(var)(on_device(var.aval))
        return new

    def _read(self, atom: Atom) -> Atom:
        return self._new.get(atom, atom) if isinstance(atom, Var) else atom

    def _constants(self) -> list[Any]:
        """What the function closes over, on the device; what of it was on the host is named in a warning."""
        constants = list[Any]()
        for var, value in zip(self._before.jaxpr.constvars, self._before.consts, strict=True):
            if is_streamed(var.aval):
                what = "a function in %s closes over an array on the host, %s: it stays on the chip; arguments do not"
                _LOG.warning(what, subject(), var.aval.str_short())
            constants.append(fetched(value) if is_on_host(var.aval) else value)
        return constants


def _is_batched_loop(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop that runs as long as any of a batch goes on: its state is kept on the chip."""
    return eqn.primitive.name == "while" and bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def _left_on_chip(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr, and those inside it, with what is put left where it is."""

    def left(body: ClosedJaxpr, inside: Rewrite) -> ClosedJaxpr:
        same: dict[Var, Atom] = {}

        def read(atom: Atom) -> Atom:
            return same.get(atom, atom) if isinstance(atom, Var) else atom

        eqns = list[JaxprEqn]()
        for eqn in body.jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            if eqn.primitive is host_put_p:
                same[eqn.outvars[0]] = operands[0]
            else:
                eqns.append(with_inner(eqn, inside).replace(invars=operands))
        return ClosedJaxpr(body.jaxpr.replace(eqns=eqns, outvars=[read(x) for x in body.jaxpr.outvars]), body.consts)

    return everywhere(left)(jaxpr)


def _has_small_rows(eqn: JaxprEqn, var: Var) -> bool:
    """Whether a loop stacks values that are not put one by one."""
    if eqn.primitive.name != "scan":
        return False
    inner = eqn.params["jaxpr"].out_avals[eqn.outvars.index(var)]
    return not is_streamed(inner)
