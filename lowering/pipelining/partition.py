"""Partition of the jaxpr of one micro-batch into the parts that a pipeline's tasks run.

Input: an inlined jaxpr of which some equations are named after stages, and how micro-batches go through it. Output: a
`Partition`: a forward part for each stage, a backward part for each in training, and equations that are the same for
all micro-batches. Run in order, the parts compute the jaxpr.

    shared          equations that depend on nothing that differs between micro-batches
    F0 F1 … F(S−1)  forward parts; each reads values of parts before it
    B(S−1) … B1 B0  backward parts

An equation named after a stage belongs to its part. Others go with their operands, those of a gradient not before the
backward parts; equations of arguments alone go with their first use. Sums of gradients from several stages (weights
that are used in several) are left to the end, so that each stage has an accumulator of its own.

Limits: the next value of a state is computed by the stage that uses the state, on the way forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ipujax.lowering.ipus import check_flow, named_stage, variables
from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var, eliminate_dead_code
from ipujax.lowering.jaxpr import EquationNumbers, stage_name, substituted
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.segments import dependence
from ipujax.lowering.schedules import BACKWARD, FORWARD, Kind
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError


class TaskKind(NamedTuple):
    """Stage and kind of the tasks that run one part, one for each micro-batch."""

    stage: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Part:
    """The equations of one kind of task of a stage."""

    task: TaskKind
    eqns: tuple[JaxprEqn, ...]

    def outputs(self) -> set[Var]:
        """Variables that its equations define."""
        return {var for eqn in self.eqns for var in eqn.outvars}


class SharedEquation(NamedTuple):
    """An equation that is the same for all micro-batches, and the stage that computes it, once."""

    eqn: JaxprEqn
    stage: int


@dataclass(frozen=True, slots=True)
class Partition:
    """The parts of a micro-batch."""

    jaxpr: ClosedJaxpr  # the partitioned jaxpr, without dead equations
    numbers: tuple[int, ...]  # of each stage, by which it is named: ascending, and some may be left out
    training: bool  # whether there are backward parts
    shared: tuple[SharedEquation, ...]
    parts: tuple[Part, ...]  # in an order in which they can run; some may be empty
    # For each result its terms: values of which it is the sum, one of each stage if several add to it.
    results: tuple[tuple[Atom, ...], ...]
    carried: Mapping[Var, int]  # the stage that holds each input that is a state

    @property
    def num_stages(self) -> int:
        """Number of stages; below, a stage is its position among them."""
        return len(self.numbers)


def partition(jaxpr: ClosedJaxpr, spec: PipelineSpec) -> Partition:
    """Partitions the jaxpr of one micro-batch; refuses checkpoints and states that span stages."""
    body = eliminate_dead_code(jaxpr.jaxpr)
    return _with_equal_values_once(_Partitioner(ClosedJaxpr(body, jaxpr.consts), spec).run())


def _with_equal_values_once(partition: Partition) -> Partition:
    """Drops equations that compute a value again which their stage has, such as the mask of a second layer.

    They are of those that all micro-batches share.
    """
    numbers = EquationNumbers()
    shared: list[SharedEquation] = []
    # By number of equal computations, stage and operands: the results of the first equation.
    first_outvars: dict[tuple[int, int, tuple[Var, ...]], list[Var]] = {}
    replaced: dict[Var, Var] = {}  # by result of a dropped equation, the equal one of the first

    def reading_first(eqn: JaxprEqn) -> JaxprEqn:
        """The equation, which reads results of first equations in place of those of dropped ones."""
        reads_none = replaced.keys().isdisjoint(variables(eqn.invars))
        return eqn if reads_none else eqn.replace(invars=[substituted(atom, replaced) for atom in eqn.invars])

    for eqn, stage in partition.shared:
        eqn = reading_first(eqn)
        key = numbers.of(eqn), stage, tuple(variables(eqn.invars))
        if key in first_outvars:
            replaced.update(zip(eqn.outvars, first_outvars[key], strict=True))
            continue
        shared.append(SharedEquation(eqn, stage))
        # A dropped result has no variable that an equal equation's could be replaced by.
        if not any(isinstance(var, DropVar) for var in eqn.outvars):
            first_outvars[key] = eqn.outvars
    parts = tuple(replace(part, eqns=tuple(map(reading_first, part.eqns))) for part in partition.parts)
    return replace(
        partition,
        shared=tuple(shared),
        parts=parts,
        results=tuple(tuple(substituted(atom, replaced) for atom in row) for row in partition.results),
    )


class _Partitioner:
    """Partitions one jaxpr of S stages.

    The rank of an equation is the position of its part: F0 … F(S−1) have ranks 0 … S−1, B(S−1) … B0 have S … 2S−1.
    Equations that are the same for all micro-batches have none.
    """

    def __init__(self, jaxpr: ClosedJaxpr, spec: PipelineSpec) -> None:
        """Finds of each equation what follows from the jaxpr alone; `_rank` assigns the ranks.

        Args:
            jaxpr: one micro-batch, without dead equations.
            spec: which operands differ between micro-batches, and which results are the next values of states.
        """
        self.jaxpr = jaxpr
        self.spec = spec
        self.body = jaxpr.jaxpr
        numbers = [named_stage(eqn) for eqn in self.body.eqns]
        check_flow(self.body, numbers)
        # The user's numbers of stages may have gaps; from here on a stage is its position among them.
        self.numbers = tuple(sorted({number for number in numbers if number is not None}))
        self.num_stages = len(self.numbers)
        # By the number of the equation: its stage, None if it has no name; whether it computes the same for all
        # micro-batches; and the position of its part, see above.
        self.named_stages = [None if number is None else self.numbers.index(number) for number in numbers]
        self.is_shared = dependence(self.body, spec).is_same
        self.ranks: list[int | None] = [None] * len(self.body.eqns)
        # By variable: numbers of the equation that defines it, and of those that read it.
        self.defining_eqn: dict[Var, int] = {var: n for n, eqn in enumerate(self.body.eqns) for var in eqn.outvars}
        self.users: dict[Var, list[int]] = {}
        for n, eqn in enumerate(self.body.eqns):
            for var in variables(eqn.invars):
                self.users.setdefault(var, []).append(n)

    def run(self) -> Partition:
        """Return the equations of each stage, forward then backward, and the terms of results."""
        carried = self._holders_of_states()
        self._rank(carried)
        left_out, results = self._split_sums()
        stages = self.num_stages
        eqns_of_rank: list[list[JaxprEqn]] = [[] for _ in range(2 * stages)]
        for n, (eqn, rank) in enumerate(zip(self.body.eqns, self.ranks, strict=True)):
            if rank is not None and n not in left_out:
                eqns_of_rank[rank].append(eqn)
        task_of_rank = [TaskKind(stage, FORWARD) for stage in range(stages)]
        task_of_rank += [TaskKind(stage, BACKWARD) for stage in reversed(range(stages))]
        parts = tuple(Part(task, tuple(eqns)) for task, eqns in zip(task_of_rank, eqns_of_rank, strict=True))
        training = any(eqns_of_rank[stages:])  # ranks of backward parts
        return Partition(
            jaxpr=self.jaxpr,
            numbers=self.numbers,
            training=training,
            shared=self._shared(),
            parts=parts if training else parts[:stages],
            results=tuple(results),
            carried=carried,
        )

    def _shared(self) -> tuple[SharedEquation, ...]:
        """Equations computed once for all micro-batches, each with its stage: that of its name, or of its first use."""
        stages: dict[int, int] = {}
        for n, named in reversed(list(enumerate(self.named_stages))):  # users before what they use
            if self.is_shared[n]:
                uses = [m for var in self.body.eqns[n].outvars for m in self.users.get(var, ())]
                user_stages = [stages[m] if self.is_shared[m] else self.stage(self.ranks[m]) for m in uses]
                stages[n] = named if named is not None else min(user_stages, default=0)
        return tuple(SharedEquation(self.body.eqns[n], stages[n]) for n in sorted(stages))

    def _holders_of_states(self) -> dict[Var, int]:
        """The stage that holds each state, handed on by micro-batches: of its next value, else of its first use."""
        holders = {}
        for operand, result in self.spec.carries:
            state = self.body.invars[operand]
            next_value = self.body.outvars[result]
            n = self.defining_eqn.get(next_value) if isinstance(next_value, Var) else None
            stage_of_next_value = self._forward_stage(n) if n is not None else None
            user_stages = [stage for m in self.users.get(state, ()) if (stage := self.named_stages[m]) is not None]
            holders[state] = stage_of_next_value if stage_of_next_value is not None else min(user_stages, default=0)
        return holders

    def _forward_stage(self, n: int) -> int | None:
        """The latest of the stages that name equation `n` and the equations that it depends on; None without any.

        Equations that all micro-batches share are passed by: they are computed before the pipeline, in no stage.
        """
        visited: set[int] = set()
        pending = [n]
        latest = None
        while pending:
            m = pending.pop()
            if m in visited or self.is_shared[m]:
                continue
            visited.add(m)
            stage = self.named_stages[m]
            if stage is not None and (latest is None or stage > latest):
                latest = stage
            pending += [
                self.defining_eqn[var] for var in variables(self.body.eqns[m].invars) if var in self.defining_eqn
            ]
        return latest

    def stage(self, rank: int | None) -> int:
        """The stage of a rank."""
        assert rank is not None, "every equation that differs between micro-batches has a rank"
        return rank if rank < self.num_stages else 2 * self.num_stages - 1 - rank

    def _rank(self, carried: Mapping[Var, int]) -> None:
        """Assigns a part to each equation that differs between micro-batches, by its rank: the position of the part.

        Forward parts of all stages come first, then the backward ones from the last stage on. `carried` has the stage
        of each state.
        """
        for n in range(len(self.body.eqns)):
            if not self.is_shared[n]:
                self.ranks[n] = self._rank_by_operands(n, carried)
        # Equations of arguments alone have no rank yet: they go with their first use, so users get theirs first.
        for n in reversed(range(len(self.ranks))):
            if self.ranks[n] is None and not self.is_shared[n]:
                user_ranks = [self.ranks[m] for var in self.body.eqns[n].outvars for m in self.users.get(var, ())]
                self.ranks[n] = min((rank for rank in user_ranks if rank is not None), default=0)
        self._check_states(carried)

    def _rank_by_operands(self, n: int, carried: Mapping[Var, int]) -> int | None:
        """The rank of equation `n`, the position of its part: that of its stage, but none before its operands.

        None if neither is known. `carried` has the stage of each state, which is the rank of its forward part too.
        """
        eqn = self.body.eqns[n]
        is_backward = stage_name(eqn).is_backward
        stage = self.named_stages[n]
        read = variables(eqn.invars)
        operand_ranks = [self.ranks[self.defining_eqn[var]] for var in read if var in self.defining_eqn]
        # A forward equation stays in its stage: `_check_states` refuses a state that another one holds.
        if stage is None or is_backward:
            operand_ranks += [carried[var] for var in read if var in carried]
        min_rank = max((rank for rank in operand_ranks if rank is not None), default=None)
        if stage is None:
            return max(min_rank, self.num_stages) if min_rank is not None and is_backward else min_rank
        stage_rank = 2 * self.num_stages - 1 - stage if is_backward else stage
        self._refuse_recomputation(eqn, stage_rank)
        return stage_rank if min_rank is None else max(stage_rank, min_rank)

    def _refuse_recomputation(self, eqn: JaxprEqn, stage_rank: int) -> None:
        """Refuses an equation whose operand is recomputed in a part after that of its stage, `stage_rank`."""
        definitions = [self.defining_eqn[var] for var in variables(eqn.invars) if var in self.defining_eqn]
        late_eqns = [
            self.body.eqns[n] for n in definitions if (rank := self.ranks[n]) is not None and rank > stage_rank
        ]
        recomputed = next((late_eqn for late_eqn in late_eqns if stage_name(late_eqn).is_recomputed), None)
        if recomputed is not None:
            number = self.numbers[self.stage(stage_rank)]
            raise ArgumentError(
                f"a jax.checkpoint spans stages: stage {number} needs what another recomputes",
                where=source_line(recomputed) or None,
                expected="checkpoint inside stages: each recomputes its own values before its gradients",
                got=f"{recomputed.primitive.name} recomputed in another stage, used by {eqn.primitive.name}",
                hint="with ipu.stage(i): h = jax.checkpoint(block)(h)",
            )

    def _check_states(self, carried: Mapping[Var, int]) -> None:
        """Refuses a state that one stage uses and another replaces, as micro-batches overlap."""
        for operand, result in self.spec.carries:
            state = self.body.invars[operand]
            following = self.body.outvars[result]
            n = self.defining_eqn.get(following) if isinstance(following, Var) else None
            rank = self.ranks[n] if n is not None else None
            users = self.users.get(state, ())
            # The stage of a state is the rank of the forward part that should compute its next value.
            early_users = [m for m in users if (r := self.ranks[m]) is not None and r < carried[state]]
            is_computed_elsewhere = rank is not None and rank != carried[state]
            if is_computed_elsewhere or early_users:
                eqn = self.body.eqns[early_users[0] if early_users else n or 0]
                use = "used before" if early_users else "computed after"
                raise ArgumentError(
                    "state carried from one micro-batch to the next crosses stages of the pipeline",
                    where=source_line(eqn) or None,
                    expected="state that is used and replaced in one stage, on the way forward",
                    got=f"state of stage {self.numbers[carried[state]]}, {use} it by {eqn.primitive.name}",
                    hint="compute its next value inside the ipu.stage that uses it",
                )

    def _split_sums(self) -> tuple[set[int], list[tuple[Atom, ...]]]:
        """Splits results that are sums of gradients of several stages, as of a weight that several use.

        Returns:
            The additions that are left out, and the terms of each result: values of one stage each, which are reduced
            over micro-batches before they are added.
        """
        removed: set[int] = set()
        num_results_of = Counter(variables(self.body.outvars))

        def addends(atom: Atom) -> Sequence[Atom]:
            """The operands of an addition of gradients that nothing else reads; none of another value."""
            n = None if isinstance(atom, Literal) else self.defining_eqn.get(atom)
            # A shared equation, of values that all micro-batches have in common, belongs to no stage.
            if n is None or self.is_shared[n] or self.body.eqns[n].primitive.name != "add_any":
                return ()
            has_one_use = len(self.users.get(atom, ())) + num_results_of[atom] == 1  # type: ignore[arg-type, index]
            return self.body.eqns[n].invars if has_one_use else ()

        def stages_of_terms(atom: Atom) -> set[int | None]:
            """Stages of the values that a tree of such additions adds up; of a value that is no sum its own."""
            return set().union(*map(stages_of_terms, addends(atom))) or {self._stage_of(atom)}

        def terms(atom: Atom) -> tuple[Atom, ...]:
            """The terms of a result, each of one stage; notes the additions of terms of several stages as removed."""
            stages = stages_of_terms(atom)
            # A term that is the same for all micro-batches has no stage, and no part to be reduced in.
            if len(stages) == 1 or None in stages:
                return (atom,)
            removed.add(self.defining_eqn[atom])  # type: ignore[index]
            return tuple(term for addend in addends(atom) for term in terms(addend))

        pairs = zip(self.spec.reduce, self.body.outvars, strict=True)
        return removed, [terms(atom) if kind in ("mean", "sum") else (atom,) for kind, atom in pairs]

    def _stage_of(self, atom: Atom) -> int | None:
        n = None if isinstance(atom, Literal) else self.defining_eqn.get(atom)
        return None if n is None or self.ranks[n] is None else self.stage(self.ranks[n])
