"""The program of a pipeline: each part of the model once, called when the schedule says so.

Input: a `StagedPipeline` and the tensors of its operands. Output: tensors of its results, and in the program

    shared      equations that are the same for all micro-batches; parameters on the IPUs that use them; zeroed
                accumulators
    blocks      ramp-up, Repeat of the steady state, ramp-down: for each slot loads of micro-batches from the host, the
                calls of its tasks, copies of their results to other IPUs, stores of stacked results on the host
    results     accumulators of several stages added, sums divided

A part is a function. It reads its micro-batch, values that other IPUs sent and the stash of its stage, see
`part_values`; it pushes to the stash, accumulates and counts. Layouts do not depend on the schedule, so that all
schedules split sums alike and give the same bits, except for sums over stages of one IPU, which have one accumulator.

Source: PopART's pipeline transform, whose stashes are rings with counters too (reference parallel.md §2.1).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from ipujax.lowering.host_rows import TaskMoves
from ipujax.lowering.ipus import Ipus, variables
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var
from ipujax.lowering.layout import map_linearly, mapping_like
from ipujax.lowering.passes import fuser
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.pipelining.part_results import PartResults, PartRowSum, loop_sums, reductions
from ipujax.lowering.pipelining.part_values import Arrival, HandedOn, PartBuilder, PartInputs, Pipeline, Send
from ipujax.lowering.pipelining.partition import TaskKind
from ipujax.lowering.pipelining.parts import StagePart
from ipujax.lowering.pipelining.staged import StagedPipeline, Term
from ipujax.lowering.popops import assign, new_state
from ipujax.lowering.recomputation import ChainTrade
from ipujax.lowering.schedules import SchedulePlan, Slot
from ipujax.runtime.graph import (
    BYTE_COST_CYCLES,
    Builder,
    Call,
    Copy,
    Function,
    PipelineTask,
    Program,
    Repeat,
    Sequence as ProgramSequence,
)
from ipujax.runtime.tensor import Tensor, concat


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRun:
    """The part of a program that runs a pipeline.

    Args:
        program: its blocks: from its first task to its last.
        plan: its schedule.
        ipus: the IPU of each stage.
        tasks: the kind of task that each function is.
        trades: trade-offs of recomputation in its stages.
    """

    program: ProgramSequence
    plan: SchedulePlan
    ipus: tuple[int, ...]
    tasks: Mapping[Function, TaskKind]
    trades: tuple[ChainTrade, ...] = ()


def lower_pipeline(ipus: Ipus, staged: StagedPipeline, operands: Sequence[Tensor]) -> tuple[list[Tensor], PipelineRun]:
    """Adds a pipeline to the program of `ipus`.

    Args:
        ipus: the IPUs.
        staged: the pipeline.
        operands: its operands, on any IPU.

    Returns:
        Its results, each on the IPU that `staged` names, and the part of the program that runs it.
    """
    invars = staged.partition.jaxpr.jaxpr.invars
    pipeline = Pipeline(staged, ipus, dict(zip(invars, operands, strict=True)))
    same = _same_values(pipeline)
    states = _add_states(pipeline)
    moves: TaskMoves[TaskKind] = TaskMoves()
    handed = HandedOn(pipeline, {variable for state in states.values() for variable in state.variables()})
    inputs = PartInputs(pipeline, same, staged.fully_viewed(same), states, handed, moves)
    results = PartResults(pipeline, states, handed, moves, reductions(staged.spec.micro_batches))
    fuse = fuser()
    functions: dict[TaskKind, Function] = {}
    for part in staged.parts:
        builder = _lower_part(part, pipeline, inputs, results, fuse)
        for move in moves.loads.get(part.task, ()):
            map_linearly(builder.view, move.row)
        builder.count()
        if builder.body.children():
            functions[part.task] = ipus.graph.add_function(builder.body, builder.name)
    _place_initial_states(pipeline, states)
    blocks = _Blocks(pipeline, functions, handed.sends, moves).all_tasks()
    for step in (*moves.first(), blocks, *moves.last()):
        ipus.prog.add(step)
    tasks = {function: task for task, function in functions.items()}
    run = PipelineRun(blocks, staged.plan, staged.ipus, tasks, staged.trades)
    return [results.result(number) for number in range(len(staged.spec.reduce))], run


def _same_values(pipeline: Pipeline) -> dict[Var, Tensor]:
    """Values that are the same for all micro-batches: operands, constants, and what is computed once from them."""
    partition = pipeline.staged.partition
    body = partition.jaxpr.jaxpr
    same = {var: x for var, x in pipeline.operands.items() if pipeline.staged.roles[var] == "same"}
    for var, value in zip(body.constvars, partition.jaxpr.consts, strict=True):
        same[var] = pipeline.ipus.graph.add_constant(value, "constant")
    for eqn, stage in partition.shared:
        results = pipeline.ipus.equation(eqn, same, pipeline.staged.ipus[stage])
        same.update(zip(variables(eqn.outvars), results, strict=True))
    return same


def _add_states(pipeline: Pipeline) -> dict[Var, Tensor]:
    """Adds a variable for each state, on the IPU of the stage that holds it."""
    states = {}
    for number, (var, stage) in enumerate(pipeline.staged.partition.carried.items()):
        ipu = pipeline.staged.ipus[stage]
        initial = pipeline.ipus.copy_to(pipeline.operands[var], ipu)
        builder = Builder(pipeline.ipus.view(ipu), pipeline.prog, pipeline.name)
        states[var] = new_state(builder, initial, number)
    return states


def _place_initial_states(pipeline: Pipeline, states: Mapping[Var, Tensor]) -> None:
    """Maps the initial values of states like the states, if they are unmapped: then their copy needs no exchange."""
    for var, stage in pipeline.staged.partition.carried.items():
        view = pipeline.ipus.view(pipeline.staged.ipus[stage])
        initial = pipeline.operands[var]
        map_linearly(view, states[var])
        mapping = mapping_like(view, states[var])
        is_unmapped = initial.is_whole_variable and pipeline.ipus.variable_ipu(initial.variables()[0]) is None
        if is_unmapped and mapping is not None:
            view.set_tile_mapping(initial.variables()[0], mapping)


def _lower_part(
    part: StagePart,
    pipeline: Pipeline,
    inputs: PartInputs,
    results: PartResults,
    fuse: Callable[[ClosedJaxpr], ClosedJaxpr],
) -> PartBuilder:
    """Builds the program of a part: it reads its inputs, computes, hands values on and updates results and states.

    Also adds to `inputs.handed` what the part hands on, and to `results` what it reduces.
    """
    staged = pipeline.staged
    ipu = staged.ipus[part.stage]
    stage, kind = part.task
    name = f"{pipeline.name}/stage {staged.partition.numbers[stage]} {kind.name.lower()}"
    builder = PartBuilder(part, pipeline.ipus.view(ipu), pipeline.prog, name)
    invars = staged.inputs_of(part)
    in_groups = dict(zip(part.jaxpr.invars, grouped_inputs(part.jaxpr), strict=True))
    env = {var: inputs.read(var, builder, in_groups.get(var, False)) for var in invars}
    other_terms = _lower_equations(env, pipeline, results, builder, fuse)
    states = staged.states_of(part)
    env.update({var: results.states[var] for var in states})
    # States are handed on before they are replaced.
    for var in (*states, *variables(part.jaxpr.outvars), *invars):
        inputs.hand_on(var, env[var], builder)
    for term in other_terms:
        results.add_term(term, inputs.value(term.atom, env, builder), builder)
    if states:
        following = [inputs.value(staged.next_of_state[var], env, builder) for var in states]
        assign(builder.inside, following, [results.states[var] for var in states])
    return builder


def _lower_equations(
    env: dict[Var, Tensor],
    pipeline: Pipeline,
    results: PartResults,
    builder: PartBuilder,
    fuse: Callable[[ClosedJaxpr], ClosedJaxpr],
) -> list[Term]:
    """Lowers the equations of a part, and adds each term to its result as soon as it is computed.

    So the gradients of one layer are dead before those of the next are computed; in a loop over layers too, in plans of
    less memory.

    Args:
        env: tensor of each input; results of equations are added.
        pipeline: the pipeline.
        results: gets the terms.
        builder: the part.
        fuse: fuses the equations.

    Returns:
        The terms that no equation computes, as inputs that are results.
    """
    terms = pipeline.staged.terms_of(builder.part)
    # Each row costs supersteps in each iteration, so a plan for speed alone adds stacks as a whole.
    is_for_speed = pipeline.ipus.graph.byte_cost_cycles <= BYTE_COST_CYCLES
    num_terms = Counter(term.atom for term in terms if isinstance(term.atom, Var))  # one value may be several results
    sums = {
        term.atom: term
        for term in terms
        if isinstance(term.atom, Var) and num_terms[term.atom] == 1 and results.is_new_sum(term, builder)
    }
    unfused, stacks = loop_sums(builder.part.jaxpr, () if is_for_speed else sums)
    body = fuse(ClosedJaxpr(unfused, ())).jaxpr
    row_sums = {stack: PartRowSum(results, sums[var], builder) for var, stack in stacks.items()}
    terms = [term for term in terms if term.atom not in stacks]
    computed = {var for eqn in body.eqns for var in variables(eqn.outvars)}
    pending = {term: term.atom for term in terms if isinstance(term.atom, Var) and term.atom in computed}
    pending_vars = set(pending.values())

    def add_terms(eqn: JaxprEqn) -> None:
        if pending_vars.isdisjoint(variables(eqn.outvars)):
            return
        for term, var in pending.items():
            if var in eqn.outvars:
                results.add_term(term, env[var], builder)

    read_later = [*body.outvars, *pipeline.staged.next_of_state.values()]
    pipeline.ipus.lowering(builder.ipu).equations(
        body.eqns, env, builder.body, read_later, add_terms, row_sums=row_sums
    )
    env.update({var: env[stack] for var, stack in stacks.items()})
    return [term for term in terms if not isinstance(term.atom, Var) or term.atom not in pending_vars]


class _CopiedPair(NamedTuple):
    """A tensor that is copied, and where to."""

    source: Tensor
    destination: Tensor


class _Blocks:
    """Calls of the functions of parts and copies of their results, in the order of the schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        functions: Mapping[TaskKind, Function],
        sends: Mapping[TaskKind, Sequence[Send]],
        moves: TaskMoves[TaskKind],
    ) -> None:
        """Takes what the parts have left to the schedule.

        Args:
            pipeline: the pipeline.
            functions: function of each part that has a program.
            sends: values that go to other stages after a part has run.
            moves: loads from the host before a part, and stores there after it.
        """
        self._pipeline = pipeline
        self._functions = functions
        self._sends = sends
        self._moves = moves
        self._arriving: dict[TaskKind, list[Arrival]] = defaultdict(list)  # by the task that reads them
        for send in self._all_sends():
            self._arriving[send.reader].append(send.arrival)
        links = [(task, send.reader) for task, sends_of_task in sends.items() for send in sends_of_task]
        self._marks = pipeline.staged.marks(pipeline.name, functions, links)
        # Nodes that several slots have: equal nodes are analysed once.
        self._copies: dict[tuple[int, ...], Program] = {}  # see `_copy`
        self._calls: dict[Function, Call] = {}  # see `_call`
        self._flats: dict[int, Tensor] = {}  # by the identity of the tensor, see `_flat`

    def all_tasks(self) -> ProgramSequence:
        """The program from the first task to the last: ramp-up, steady state and ramp-down."""
        blocks = ProgramSequence()
        # An iteration of a block advances each rotation of landing variables by entire rounds, so that all are alike.
        period = lcm(*(len(send.arrival.landing) for send in self._all_sends()))
        for block in self._pipeline.staged.plan.blocks_by(period):
            steps = ProgramSequence()
            for slot in block.slots:
                self._add_slot(slot, steps)
            if steps.children():
                origin = self._pipeline.ipus.graph.origin
                blocks.add(Repeat(block.count, steps, origin) if block.count > 1 else steps)
        return blocks

    def _all_sends(self) -> list[Send]:
        return [send for sends in self._sends.values() for send in sends]

    def _add_slot(self, slot: Slot, steps: ProgramSequence) -> None:
        """Adds the tasks that IPUs run at the same time, between loads before them and sends and stores after them."""
        of_slot = ((task, TaskKind(task.stage, task.kind)) for task in slot)
        tasks = [(task, kind) for task, kind in of_slot if kind in self._functions]
        for step in self._moves.before(kind for _, kind in tasks):
            steps.add(step)
        for task, kind in tasks:
            for arrival in self._arriving[kind]:
                if len(arrival.landing) > 1:  # the part reads one variable, the others are in rotation
                    landed = arrival.landing[task.micro_batch % len(arrival.landing)]
                    steps.add(self._copy([_CopiedPair(landed, arrival.read)]))
            steps.add(self._call(self._functions[kind], self._marks[kind]))
        self._add_sends([(send, task.micro_batch) for task, kind in tasks for send in self._sends.get(kind, ())], steps)
        for step in self._moves.after(kind for _, kind in tasks):
            steps.add(step)

    def _add_sends(self, sends: Sequence[tuple[Send, int]], steps: ProgramSequence) -> None:
        """Adds copies of the results of a slot's tasks, in as few exchanges as possible, and then their receivers.

        `sends` has the micro-batch of each.
        """
        groups: dict[object, list[_CopiedPair]] = {}
        is_buffered = self._pipeline.ipus.graph.target.global_exchange == "buffered"
        for send, micro_batch in sends:
            crosses_ipus = send.source_ipu != send.destination_ipu
            # In lockstep all IPUs exchange at once; else a copy delays only the two IPUs of its link.
            link = (send.source_ipu, send.destination_ipu) if is_buffered and crosses_ipus else None
            key = send.value.dtype, crosses_ipus, link
            landing = send.arrival.landing
            groups.setdefault(key, []).append(_CopiedPair(send.value, landing[micro_batch % len(landing)]))
        for pairs in groups.values():
            steps.add(self._copy(pairs))
        for send, _ in sends:
            if send.arrival.receive is not None:
                steps.add(self._call(send.arrival.receive))

    def _call(self, function: Function, mark: PipelineTask | None = None) -> Call:
        """The call of a function, marked as a task or not; the same node each time."""
        if function not in self._calls:
            self._calls[function] = Call(function, self._pipeline.ipus.graph.origin, mark)
        return self._calls[function]

    def _copy(self, pairs: Sequence[_CopiedPair]) -> Program:
        """One copy of several tensors; the same node if the same tensors are copied again."""
        key = tuple(id(tensor) for pair in pairs for tensor in pair)  # sends and arrivals keep them alive
        if key not in self._copies:
            sources, destinations = zip(*pairs, strict=True)
            if len(pairs) > 1:
                sources = (concat([self._flat(x) for x in sources]),)
                destinations = (concat([self._flat(x) for x in destinations]),)
            self._copies[key] = Copy(
                sources[0], destinations[0], f"{self._pipeline.name}/exchange", self._pipeline.ipus.graph.origin
            )
        return self._copies[key]

    def _flat(self, tensor: Tensor) -> Tensor:
        """A sent or received tensor as one dimension, which has a part in many copies."""
        if id(tensor) not in self._flats:
            self._flats[id(tensor)] = tensor.reshape((tensor.size,))
        return self._flats[id(tensor)]
