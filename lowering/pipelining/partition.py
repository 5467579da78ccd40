"""Cuts the jaxpr of one micro-batch into the parts that a pipeline's tasks run.

Input: an inlined jaxpr of which some equations are named after stages, and how micro-batches go through it. Output: a
`Partition`: a forward part for each stage, a backward part for each in training, and what is the same for all
micro-batches. Run in order, the parts compute what the jaxpr computes.

    before all      what depends on nothing that differs between micro-batches
    F0 F1 … F(S−1)  forward parts; each reads values of parts before it
    B(S−1) … B1 B0  backward parts

An equation named after a stage belongs to its part. Others go with their operands, those of a gradient not before the
backward parts; what has none but arguments goes where it is used first. Sums of gradients from several stages (weights
that are used in several) are left to the end, so that each stage has an accumulator of its own.

Limits: state handed from micro-batch to micro-batch is found by the stage that uses it, on the way forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ipujax.lowering.ipus import check_flow, check_gaps, named_stage, variables
from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var, eliminate_dead_code
from ipujax.lowering.jaxpr import EquationNumbers, stage_name
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.segments import dependence
from ipujax.lowering.schedules import BACKWARD, FORWARD, Kind
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError

TaskKind = tuple[int, Kind]  # stage and kind of tasks that run the same part


@dataclass(frozen=True, slots=True)
class Part:
    """The equations of one kind of task of a stage.

    Args:
        task: stage and kind.
        eqns: its equations, in order.
    """

    task: TaskKind
    eqns: tuple[JaxprEqn, ...]

    def made(self) -> set[Var]:
        """The variables that its equations define."""
        return {var for eqn in self.eqns for var in eqn.outvars}


@dataclass(frozen=True, slots=True)
class Partition:
    """The parts of a micro-batch.

    Args:
        jaxpr: the jaxpr they were cut from, without dead equations.
        num_stages: how many stages there are.
        training: whether there are backward parts.
        before: equations that are the same for all micro-batches, each with the stage that uses it.
        parts: in an order in which they can run one after the other; some may be empty.
        results: for each result the values that make it up, each to be reduced for itself and then added.
        carried: for each input that is state, the stage that holds it.
    """

    jaxpr: ClosedJaxpr
    num_stages: int
    training: bool
    before: tuple[tuple[JaxprEqn, int], ...]
    parts: tuple[Part, ...]
    results: tuple[tuple[Atom, ...], ...]
    carried: Mapping[Var, int]


def partition(jaxpr: ClosedJaxpr, spec: PipelineSpec) -> Partition:
    """Cuts a jaxpr into parts.

    Args:
        jaxpr: computes one micro-batch; inlined.
        spec: how micro-batches go through it.

    Raises:
        ArgumentError: for stages with a gap, a value that flows back, a checkpoint around several stages, or state that
            cannot be handed on.
    """
    body = eliminate_dead_code(jaxpr.jaxpr)
    return _with_equal_values_once(_Partitioner(ClosedJaxpr(body, jaxpr.consts), spec).run())


def _with_equal_values_once(found: Partition) -> Partition:
    """The partition in which a stage has equal values once, of those that are the same for all micro-batches.

    Such as the masks of all its layers.
    """
    numbers, before = EquationNumbers(), list[tuple[JaxprEqn, int]]()
    known: dict[tuple[int, int, tuple[Var, ...]], list[Var]] = {}
    same: dict[Var, Var] = {}

    def of(atom: Atom) -> Atom:
        return same.get(atom, atom) if isinstance(atom, Var) else atom

    def reading(eqn: JaxprEqn) -> JaxprEqn:
        return eqn if same.keys().isdisjoint(variables(eqn.invars)) else eqn.replace(invars=list(map(of, eqn.invars)))

    for eqn, stage in found.before:
        eqn = reading(eqn)
        key = numbers.of(eqn), stage, tuple(variables(eqn.invars))
        if key in known:
            same.update(zip(eqn.outvars, known[key], strict=True))
            continue
        before.append((eqn, stage))
        if not any(isinstance(var, DropVar) for var in eqn.outvars):
            known[key] = eqn.outvars
    parts = tuple(replace(part, eqns=tuple(map(reading, part.eqns))) for part in found.parts)
    return replace(
        found, before=tuple(before), parts=parts, results=tuple(tuple(map(of, row)) for row in found.results)
    )


class _Partitioner:
    """One partition; ranks are places in the order of parts: F0 … F(S−1) are 0 … S−1, B(S−1) … B0 are S … 2S−1."""

    def __init__(self, jaxpr: ClosedJaxpr, spec: PipelineSpec) -> None:
        self.jaxpr, self.spec, self.body = jaxpr, spec, jaxpr.jaxpr
        self.named = [named_stage(eqn) for eqn in self.body.eqns]
        check_gaps(self.body.eqns, self.named)
        check_flow(self.body, self.named)
        self.num_stages = 1 + max(stage for stage in self.named if stage is not None)
        self.is_same = dependence(self.body, spec).is_same  # of each equation
        self.maker: dict[Var, int] = {var: n for n, eqn in enumerate(self.body.eqns) for var in eqn.outvars}
        self.users: dict[Var, list[int]] = {}
        for n, eqn in enumerate(self.body.eqns):
            for var in variables(eqn.invars):
                self.users.setdefault(var, []).append(n)
        self.ranks: list[int | None] = [None] * len(self.body.eqns)

    def run(self) -> Partition:
        carried = self._holders_of_states()
        self._rank(carried)
        removed, results = self._split_sums()
        stages = self.num_stages
        parts: list[list[JaxprEqn]] = [[] for _ in range(2 * stages)]
        for n, (eqn, rank) in enumerate(zip(self.body.eqns, self.ranks, strict=True)):
            if rank is not None and n not in removed:
                parts[rank].append(eqn)
        order: list[TaskKind] = [(s, FORWARD) for s in range(stages)] + [(s, BACKWARD) for s in reversed(range(stages))]
        training = any(parts[stages:])
        found = tuple(Part(task, tuple(eqns)) for task, eqns in zip(order, parts, strict=True))
        found = found if training else found[:stages]
        return Partition(self.jaxpr, stages, training, self._before(), found, tuple(results), carried)

    # --- what is the same for all micro-batches ---

    def _before(self) -> tuple[tuple[JaxprEqn, int], ...]:
        """Equations computed once, each at the stage it is named after, or that uses it first."""
        stages: dict[int, int] = {}
        for n, named in reversed(list(enumerate(self.named))):
            if self.is_same[n]:
                uses = [m for var in self.body.eqns[n].outvars for m in self.users.get(var, ())]
                used = [stages[m] if self.is_same[m] else self.stage(self.ranks[m]) for m in uses]
                stages[n] = named if named is not None else min(used, default=0)
        return tuple((self.body.eqns[n], stages[n]) for n in sorted(stages))

    # --- state ---

    def _holders_of_states(self) -> dict[Var, int]:
        """The stage that holds each state: the one that finds its next value; else where it is used first."""
        held = {}
        for operand, result in self.spec.carries:
            state, following = self.body.invars[operand], self.body.outvars[result]
            n = self.maker.get(following) if isinstance(following, Var) else None
            named = self._forward_stage(n) if n is not None else None
            uses = [stage for m in self.users.get(state, ()) if (stage := self.named[m]) is not None]
            held[state] = named if named is not None else min(uses, default=0)
        return held

    def _forward_stage(self, n: int) -> int | None:
        """The latest stage among an equation and those it depends on."""
        seen, waiting, latest = set[int](), [n], None
        while waiting:
            m = waiting.pop()
            if m in seen or self.is_same[m]:
                continue
            seen.add(m)
            stage = self.named[m]
            if stage is not None and (latest is None or stage > latest):
                latest = stage
            waiting += [self.maker[var] for var in variables(self.body.eqns[m].invars) if var in self.maker]
        return latest

    # --- ranks ---

    def stage(self, rank: int | None) -> int:
        """The stage of a rank."""
        assert rank is not None, "every equation that differs between micro-batches has a rank"
        return rank if rank < self.num_stages else 2 * self.num_stages - 1 - rank

    def _rank(self, carried: Mapping[Var, int]) -> None:
        """Gives each equation that is not the same for all its part."""
        last = 2 * self.num_stages - 1
        for n, eqn in enumerate(self.body.eqns):
            if self.is_same[n]:
                continue
            name, stage = stage_name(eqn), self.named[n]
            before = [self.ranks[self.maker[var]] for var in variables(eqn.invars) if var in self.maker]
            if stage is None or name.is_backward:
                before += [carried[var] for var in variables(eqn.invars) if var in carried]
            least = max((rank for rank in before if rank is not None), default=None)
            if stage is not None:
                own = last - stage if name.is_backward else stage
                if least is not None and least > own:
                    self._refuse_recomputation(eqn, own, before)
                self.ranks[n] = own if least is None else max(own, least)
            elif least is not None:
                self.ranks[n] = max(least, self.num_stages) if name.is_backward else least
        for n in reversed(range(len(self.ranks))):
            if self.ranks[n] is None and not self.is_same[n]:
                uses = [self.ranks[m] for var in self.body.eqns[n].outvars for m in self.users.get(var, ())]
                self.ranks[n] = min((rank for rank in uses if rank is not None), default=0)
        self._check_states(carried)

    def _refuse_recomputation(self, eqn: JaxprEqn, own: int, before: Sequence[int | None]) -> None:
        """Refuses a gradient that needs what another stage recomputes after it."""
        late = [
            self.body.eqns[self.maker[var]]
            for var, rank in zip([v for v in variables(eqn.invars) if v in self.maker], before, strict=False)
            if rank is not None and rank > own
        ]
        again = next((each for each in late if stage_name(each).is_recomputed), None)
        if again is not None:
            raise ArgumentError(
                f"a jax.checkpoint spans stages: stage {self.stage(own)} needs what another recomputes",
                where=source_line(again) or None,
                expected="checkpoint inside stages: each recomputes its own values before its gradients",
                got=f"{again.primitive.name} recomputed in another stage, used by {eqn.primitive.name}",
                hint="with ipu.stage(i): h = jax.checkpoint(block)(h)",
            )

    def _check_states(self, carried: Mapping[Var, int]) -> None:
        for operand, result in self.spec.carries:
            state, following = self.body.invars[operand], self.body.outvars[result]
            n = self.maker.get(following) if isinstance(following, Var) else None
            rank, used = self.ranks[n] if n is not None else None, self.users.get(state, ())
            early = [m for m in used if (r := self.ranks[m]) is not None and r < carried[state]]
            if (rank is not None and rank != carried[state]) or early:
                eqn = self.body.eqns[early[0] if early else n or 0]
                raise ArgumentError(
                    "state carried from one micro-batch to the next crosses stages of the pipeline",
                    where=source_line(eqn) or None,
                    expected="state that is used and replaced in one stage, on the way forward",
                    got=f"state of stage {carried[state]}, {'used before it' if early else 'found after it'} by "
                    f"{eqn.primitive.name}",
                    hint="compute its next value inside the ipu.stage that uses it",
                )

    # --- sums over stages ---

    def _split_sums(self) -> tuple[set[int], list[tuple[Atom, ...]]]:
        """Sums of gradients of several stages become several accumulators: equations to remove, terms of results."""
        removed: set[int] = set()
        counts = Counter(variables(self.body.outvars))

        def sides(atom: Atom) -> Sequence[Atom]:
            """The operands of a sum, if nothing else needs the sum."""
            n = None if isinstance(atom, Literal) else self.maker.get(atom)
            if n is None or self.is_same[n] or self.body.eqns[n].primitive.name != "add_any":
                return ()
            alone = len(self.users.get(atom, ())) + counts[atom] == 1  # type: ignore[arg-type, index]
            return self.body.eqns[n].invars if alone else ()

        def stages(atom: Atom) -> set[int | None]:
            return set().union(*map(stages, sides(atom))) or {self._stage_of(atom)}

        def terms(atom: Atom) -> tuple[Atom, ...]:
            found = stages(atom)
            if len(found) == 1 or None in found:
                return (atom,)
            removed.add(self.maker[atom])  # type: ignore[index]
            return tuple(term for side in sides(atom) for term in terms(side))

        pairs = zip(self.spec.reduce, self.body.outvars, strict=True)
        return removed, [terms(atom) if kind in ("mean", "sum") else (atom,) for kind, atom in pairs]

    def _stage_of(self, atom: Atom) -> int | None:
        n = None if isinstance(atom, Literal) else self.maker.get(atom)
        return None if n is None or self.ranks[n] is None else self.stage(self.ranks[n])
