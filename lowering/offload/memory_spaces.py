"""Pass `memory_spaces`: values that the user has on the host, in `pinned_host`, become puts to streaming memory.

    m<host> = argument; m1 = device_put[Device] m          m1 is replaced by m: the pass `offload` loads it
    v1 = 0.9 * m1; v<host> = device_put[Host] v1           v = host_put v1

Input: an inlined jaxpr, whose abstract values have memory spaces. Output: an equal one with all values on the device,
in which `host_put` marks those to store. Tiles compute on values of the host too, and results are put back. Results of
loops and branches, and of the program, that are on the host are each defined by a `host_put` of their own.

Source: `jax.memory.Space`, jax 0.10. Limits: values of one element, and keys, stay on chip, and so do values that an
inner jitted function closes over, intermediates computed from values on the host, and the state of a loop under
`jax.vmap`, which runs until the last element of the batch ends.
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
from ipujax.lowering.jaxpr import Rewrite, equations, everywhere, substituted, with_inner
from ipujax.lowering.offload.primitives import host_put_p
from ipujax.lowering.replicas import replicated_p
from ipujax.runtime.logs import Log, compilation_name
from ipujax.runtime.tensor import is_key_dtype

_LOG = Log("passes")
_MIN_ELEMENTS = 2  # of a value that is put, as of arguments that are offloaded


def memory_spaces(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr of values on the device, which puts values of the host to streaming memory."""
    return everywhere(_on_device)(jaxpr) if _names_host(jaxpr) else jaxpr


def is_streamed(aval: Any) -> bool:
    """True if a value is in streaming memory: it is on the host, and neither a key nor a single element."""
    return is_on_host(aval) and not is_key_dtype(aval.dtype) and prod(aval.shape) >= _MIN_ELEMENTS


def _names_host(jaxpr: ClosedJaxpr) -> bool:
    body = jaxpr.jaxpr
    atoms = [*body.invars, *body.constvars, *(var for eqn in equations(body) for var in eqn.outvars)]
    return any(is_on_host(var.aval) for var in atoms)


def _on_device(jaxpr: ClosedJaxpr, rewrite_inner: Rewrite) -> ClosedJaxpr:
    return _MemorySpaceRewrite(jaxpr, rewrite_inner).jaxpr()


class _MemorySpaceRewrite:
    """Rewrites one jaxpr to values on the device, some of which `host_put` marks.

    Args:
        jaxpr: the jaxpr.
        rewrite_inner: rewrites the jaxprs inside it.
    """

    def __init__(self, jaxpr: ClosedJaxpr, rewrite_inner: Rewrite) -> None:
        """Begins the new jaxpr: inputs and constants that the old one has on the host get variables on the device."""
        self._original = jaxpr
        self._rewrite_inner = rewrite_inner
        self._new_value: dict[Var, Atom] = {}  # in the new jaxpr, of values whose variable changes
        self._eqns = list[JaxprEqn]()
        self._results_of_puts = set[Var]()
        body = jaxpr.jaxpr
        self._invars = [self._variable_on_device(var) for var in body.invars]
        self._constvars = [self._variable_on_device(var) for var in body.constvars]

    def jaxpr(self) -> ClosedJaxpr:
        """The rewritten jaxpr, of values on the device: moves to the host are puts to streaming memory (`host_put`)."""
        body = self._original.jaxpr
        for eqn in body.eqns:
            if eqn.primitive.name == "device_put" and any(is_on_host(x.aval) for x in (*eqn.invars, *eqn.outvars)):
                self._replace_device_put(eqn)
            else:
                self._add_equation(eqn)
        outvars = list[Atom]()
        for atom in body.outvars:
            value = substituted(atom, self._new_value)
            # Each result on the host is defined by a put of its own, as it gets a buffer of its own there.
            has_own_put = isinstance(value, Var) and value in self._results_of_puts and value not in outvars
            outvars.append(self._put_on_host(value, like=None) if is_streamed(atom.aval) and not has_own_put else value)
        rewritten = body.replace(invars=self._invars, constvars=self._constvars, eqns=self._eqns, outvars=outvars)
        return ClosedJaxpr(rewritten, self._constants_on_device())

    def _replace_device_put(self, eqn: JaxprEqn) -> None:
        """Replaces a `device_put` from or to the host: a fetched value is the value itself, loaded when read."""
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            value = substituted(atom, self._new_value)
            is_put = is_streamed(var.aval) and not is_on_host(atom.aval)
            if not isinstance(var, DropVar):
                self._new_value[var] = self._put_on_host(value, eqn) if is_put else value

    def _add_equation(self, eqn: JaxprEqn) -> None:
        """Adds an equation on values on the device.

        Results of its bodies that are in streaming memory are put there inside. Those of a loop over a batch, which has
        no put of one member, and stacks of rows that are too small to be put one by one, are put after it.
        """
        operands = [substituted(atom, self._new_value) for atom in eqn.invars]
        outvars = [self._variable_on_device(var) for var in eqn.outvars]
        is_batched = _is_batched_loop(eqn)
        new_eqn = with_inner(eqn, self._rewrite_inner)
        new_eqn = with_inner(new_eqn, _without_puts) if is_batched else new_eqn
        self._eqns.append(new_eqn.replace(invars=operands, outvars=outvars))
        if eqn.primitive is replicated_p or eqn.primitive.name == "shard_map":  # results are put inside
            self._results_of_puts.update(outvars)
        for var, result in zip(eqn.outvars, outvars, strict=True):
            is_on_chip = is_batched or _has_small_rows(eqn, var)
            if is_on_chip and is_streamed(var.aval) and not isinstance(var, DropVar):
                self._new_value[var] = self._put_on_host(result, eqn)

    def _put_on_host(self, value: Atom, like: JaxprEqn | None) -> Var:
        """Adds a `host_put` of a value, at the source of equation `like`, and returns its result."""
        result = Var(on_device(value.aval))
        self._eqns.append(new_equation(host_put_p, [value], [result], {}, like))
        self._results_of_puts.add(result)
        return result

    def _variable_on_device(self, var: Var) -> Var:
        """The variable that stands for another in the new jaxpr: a new one if that is on the host."""
        if not is_on_host(var.aval):
            return var
        new_var = self._new_value[var] = type(var)(on_device(var.aval))
        return new_var

    def _constants_on_device(self) -> list[Any]:
        """Captured constants, on the device; a warning names those that were on the host."""
        constants = list[Any]()
        for var, value in zip(self._original.jaxpr.constvars, self._original.consts, strict=True):
            if is_streamed(var.aval):
                text = "a function in %s closes over an array on the host, %s: it stays on the chip; arguments do not"
                _LOG.warning(text, compilation_name(), var.aval.str_short())
            constants.append(fetched(value) if is_on_host(var.aval) else value)
        return constants


def _is_batched_loop(eqn: JaxprEqn) -> bool:
    """True if a loop was batched by `jax.vmap`: its condition is an array, and it runs until the last element ends.

    Its state stays on chip: each iteration selects the new state of those elements alone that still run.
    """
    return eqn.primitive.name == "while" and bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def _without_puts(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr, and those inside it, with values left on the device in place of those put on the host."""

    def remove_puts(body: ClosedJaxpr, rewrite_inner: Rewrite) -> ClosedJaxpr:
        """Replaces the result of each put by the value, in one jaxpr."""
        replaced: dict[Var, Atom] = {}
        eqns = list[JaxprEqn]()
        for eqn in body.jaxpr.eqns:
            operands = [substituted(x, replaced) for x in eqn.invars]
            if eqn.primitive is host_put_p:
                replaced[eqn.outvars[0]] = operands[0]
            else:
                eqns.append(with_inner(eqn, rewrite_inner).replace(invars=operands))
        outvars = [substituted(x, replaced) for x in body.jaxpr.outvars]
        return ClosedJaxpr(body.jaxpr.replace(eqns=eqns, outvars=outvars), body.consts)

    return everywhere(remove_puts)(jaxpr)


def _has_small_rows(eqn: JaxprEqn, var: Var) -> bool:
    """True if a loop stacks values that are too small to be put one by one."""
    if eqn.primitive.name != "scan":
        return False
    inner = eqn.params["jaxpr"].out_avals[eqn.outvars.index(var)]
    return not is_streamed(inner)
