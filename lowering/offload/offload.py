"""Pass `offload`: arguments that lie in streaming memory are loaded before they are used, and stored when they are new.

    m2 = 0.9 * m + g                      m1 = remote_load m; m2 = 0.9 * m1 + g; r = remote_store m m2

Input: a jaxpr, which of its arguments lie there, and which result takes the place of which argument. Output: an equal
jaxpr. What is used again after others have been loaded is dropped in between and loaded anew; optimisers update one
parameter after the other, see `depth_first`; small transfers go together, see `batches`. Of a table that is looked up
or updated by rows, these rows move.

Source: tensor locations of PopART, off chip.
Limits: what a loop or branch reads is loaded as a whole before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var, new_equation
from ipujax.lowering.jaxpr import variables, variables_read
from ipujax.lowering.offload.batches import batched
from ipujax.lowering.offload.depth_first import depth_first
from ipujax.lowering.offload.primitives import remote_load_p, remote_store_p
from ipujax.lowering.offload.row_access import row_access, takes_rows, writes_rows
from ipujax.lowering.replicas import on_one_replica

_FEW = 4  # arguments that are loaded between two uses of one that is kept: an optimiser reads two or three together


@dataclass(frozen=True, slots=True)
class Offloading:
    """What lies in streaming memory.

    Args:
        inputs: for each input of a jaxpr whether it does.
        aliases: for each output the number of the input whose place it takes, or None.
    """

    inputs: tuple[bool, ...] = ()
    aliases: tuple[int | None, ...] = ()


ON_CHIP = Offloading()


def offload(
    jaxpr: ClosedJaxpr, offloading: Offloading = ON_CHIP, in_groups: Callable[[Jaxpr], Sequence[bool]] | None = None
) -> ClosedJaxpr:
    """Returns an equal jaxpr that loads and stores what lies in streaming memory.

    Args:
        jaxpr: after all other passes; of one `replicated` equation if there are several replicas.
        offloading: what lies there.
        in_groups: says which inputs of a jaxpr tiles keep with their columns in groups; none when None.
    """
    if not any(offloading.inputs):
        return jaxpr

    def rewrite(body: ClosedJaxpr, places: Sequence[int | None]) -> ClosedJaxpr:
        grouped = [False] * len(places) if in_groups is None else in_groups(body.jaxpr)
        return _offloaded(body, _inside(offloading, places), grouped)

    return on_one_replica(jaxpr, rewrite)


def _inside(offloading: Offloading, places: Sequence[int | None]) -> Offloading:
    """The same for the jaxpr of one replica, of which input n is the whole's input `places[n]`."""
    own = {place: n for n, place in enumerate(places) if place is not None}
    inputs = tuple(place is not None and offloading.inputs[place] for place in places)
    return Offloading(inputs, tuple(None if alias is None else own[alias] for alias in offloading.aliases))


def _offloaded(jaxpr: ClosedJaxpr, offloading: Offloading, grouped: Sequence[bool]) -> ClosedJaxpr:
    body = jaxpr.jaxpr
    inputs = zip(body.invars, offloading.inputs, grouped, strict=True)
    remote = {var: in_groups for var, is_remote, in_groups in inputs if is_remote}
    moved = _Moved(body, remote, offloading.aliases)
    return ClosedJaxpr(body.replace(eqns=batched(moved.eqns), outvars=moved.outvars), jaxpr.consts)


class _Moved:
    """The equations with loads and stores.

    Args:
        body: the jaxpr.
        remote: inputs in streaming memory, and whether tiles keep them in groups of columns.
        aliases: for each output the number of the input whose place it takes.
    """

    def __init__(self, body: Jaxpr, remote: Mapping[Var, bool], aliases: Sequence[int | None]) -> None:
        self.eqns, self.outvars = list[JaxprEqn](), list(body.outvars)
        self._remote = remote
        self._loaded: dict[Var, Var] = {}  # the arguments loaded last, in the order of their loads
        eqns = depth_first(body.eqns, body.outvars)
        homes = self._homes(body, aliases)
        stored_by_rows = self._stored_by_rows(eqns, homes)
        last_read = {var: n for n, eqn in enumerate(eqns) for var in variables_read(eqn) if var in remote}
        given = {n: x for n, x in enumerate(body.outvars) if isinstance(x, Var) and x in remote}
        handed_on = {n: x for n, x in given.items() if homes.get(n) is not x}
        last_read.update((x, len(eqns)) for x in handed_on.values())
        made = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars}
        due: dict[int, list[int]] = {}  # outputs to be stored after each equation
        for number, home in homes.items():
            value = body.outvars[number]
            if value is not home and value not in stored_by_rows:
                at = max(made.get(value, -1) if isinstance(value, Var) else -1, last_read.get(home, -1))
                due.setdefault(len(eqns) if number in handed_on else at, []).append(number)
        self._store(due.get(-1, ()), homes)
        for number, eqn in enumerate(eqns):
            self._add(eqn, stored_by_rows)
            self._store(due.get(number, ()), homes)
        for number, remote_value in handed_on.items():
            self.outvars[number] = self._load(remote_value)
        self._store(due.get(len(eqns), ()), homes)

    def _homes(self, body: Jaxpr, aliases: Sequence[int | None]) -> dict[int, Var]:
        """The input in streaming memory that an output replaces, by the number of the output."""
        pairs = ((number, body.invars[alias]) for number, alias in enumerate(aliases) if alias is not None)
        return {number: var for number, var in pairs if var in self._remote}

    def _stored_by_rows(self, eqns: Sequence[JaxprEqn], homes: Mapping[int, Var]) -> set[Atom]:
        """Results that are an input with new rows, in the place of that input, which nothing reads later."""
        found, last = set[Atom](), dict[Var, int]()
        for number, eqn in enumerate(eqns):
            last.update(dict.fromkeys(variables_read(eqn), number))
        for number, eqn in enumerate(eqns):
            if writes_rows(eqn) and isinstance(table := eqn.invars[0], Var) and table in homes.values():
                (out,) = eqn.outvars
                goes_there = [home for n, home in homes.items() if self.outvars[n] is out]
                is_read_later = last[table] != number or table in self.outvars
                if goes_there == [table] and self.outvars.count(out) == 1 and out not in last and not is_read_later:
                    found.add(out)
        return found

    def _add(self, eqn: JaxprEqn, stored_by_rows: set[Atom]) -> None:
        """Adds an equation, with loads of what it reads, but for a table of which it takes rows."""
        stays = takes_rows(eqn) and eqn.invars[0] in self._remote
        if stays and writes_rows(eqn):
            stays = eqn.outvars[0] in stored_by_rows
        on_chip = eqn.invars[stays:]
        here = {x: self._load(x, eqn) for x in dict.fromkeys(variables(on_chip)) if x in self._remote}
        read = (here.get(x, x) if isinstance(x, Var) else x for x in on_chip)
        own = eqn.replace(invars=[*eqn.invars[:stays], *read])
        self.eqns += row_access(own) if stays else [own]

    def _load(self, remote: Var, user: JaxprEqn | None = None) -> Var:
        """An argument on chip: as it was loaded a moment ago, or loaded now."""
        if remote not in self._loaded:
            own = Var(remote.aval)
            params = {"in_groups": self._remote[remote]}
            self.eqns.append(new_equation(remote_load_p, [remote], [own], params, user))
            self._loaded[remote] = own
            while len(self._loaded) > _FEW:
                self._loaded.pop(next(iter(self._loaded)))
        return self._loaded[remote]

    def _store(self, outputs: Sequence[int], homes: Mapping[int, Var]) -> None:
        """Stores outputs in the place of arguments."""
        for number in outputs:
            new, home = self.outvars[number], homes[number]
            stored = Var(home.aval)
            maker = next((eqn for eqn in reversed(self.eqns) if new in eqn.outvars), None)
            self.eqns.append(new_equation(remote_store_p, [home, new], [stored], {}, maker))
            self.outvars[number] = stored
