"""Live variables of every step of a program, on all tiles together, as a tree like the program's.

Input: an `Executable`. Output: `LivenessTree`, and JSON-able data of it. A function appears at each of its calls;
variables that stay live in its caller count in its bytes, and are listed at the call.
Source: Poplar & PopLibs user guide, "Memory use" and "Profile summary output", `showVarStorage`.
Limits: bytes are those of variables, without gaps; a step that becomes several programs is one node here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from operator import itemgetter

from ipujax.runtime.analysis import Liveness
from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Block, Call, Decision, Leaf, Loop, Program, is_free
from ipujax.runtime.memory import LiveItem, Occupancy, Owner, starts_and_ends
from ipujax.runtime.sections.ids import Json, Numbering
from ipujax.runtime.tensor import Variable

Items = tuple[LiveItem, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LiveNode:
    """Node of the program tree with its live items.

    Args:
        program: the node.
        name: its debug name, "" without one.
        live_bytes: bytes live at it without always-live ones; None for control that is not a step itself.
        live: items live at it without always-live ones and those of callers, largest first.
        children: the nodes inside it.
    """

    program: Program
    name: str
    live_bytes: int | None = None
    live: Items = ()
    children: tuple[LiveNode, ...] = ()

    def walk(self) -> Iterator[LiveNode]:
        """Yield this node and all inside it, parents first."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending += reversed(node.children)


@dataclass(frozen=True, slots=True, eq=False)
class LivenessTree:
    """Live items of a program.

    Args:
        always: items live at every step: constants, code, stacks, and variables; largest first.
        root: of the tree of steps.
    """

    always: Items
    root: LiveNode

    @property
    def always_bytes(self) -> int:
        """Bytes of `always`."""
        return sum(item.num_bytes for item in self.always)

    @property
    def at_peak(self) -> Items:
        """Items live at the step with most live bytes, with those of callers, without always-live ones."""
        return _peak(self.root)[1]

    @property
    def max_bytes(self) -> int:
        """Peak live bytes, always-live ones included."""
        return self.always_bytes + max(node.live_bytes or 0 for node in self.root.walk())


def _peak(node: LiveNode) -> tuple[int, Items]:
    """Return bytes and items of the step with most live bytes inside a node."""
    inner_bytes, inner_items = max(map(_peak, node.children), key=lambda peak: peak[0], default=(0, ()))
    node_bytes = node.live_bytes or 0
    if isinstance(node.program, Call) and inner_bytes >= node_bytes:
        # Bytes inside a function include those of its callers, its items do not: they are those at the call.
        return inner_bytes, node.live + inner_items
    return (node_bytes, node.live) if node_bytes > inner_bytes else (inner_bytes, inner_items)


def liveness_tree(executable: Executable) -> LivenessTree:
    """Return the live items of every step of a program."""
    memory = executable.memory
    variables = _always_live(memory.occupancy.frames.liveness[None])
    always = [LiveItem.of(v, v.num_bytes, "constant") for v in memory.constants]
    always += [LiveItem.of(v, v.num_bytes, "variable") for v in variables]
    fixed = ((name, int(tile_bytes.sum())) for name, tile_bytes in memory.fixed.items() if name != "constant")
    always += [LiveItem.without_variable(num_bytes, name) for name, num_bytes in fixed]
    return LivenessTree(_sort_items(always), _Frame(memory.occupancy, None, variables, {}).node(executable.program))


def _always_live(frame: Liveness) -> Collection[Variable]:
    """Return the variables that are live at every step that takes time."""
    # Intervals of a variable do not overlap, so that their steps can be counted; `timed` is a running number of steps.
    timed = list(accumulate((not is_free(step) for step in frame.steps), initial=0))
    live_steps = Counter[Variable]()
    for interval in frame.intervals:
        live_steps[interval.variable] += timed[interval.last + 1] - timed[interval.first]
    return {variable: steps for variable, steps in live_steps.items() if steps == timed[-1] > 0}


def liveness_section(executable: Executable, ids: Numbering) -> Json:
    """Return the tree as JSON-able data: `liveVariables` are positions in `notAlwaysLiveVariables`."""
    tree = executable.once(liveness_tree)
    table: dict[LiveItem, int] = {}  # positions, in the order of first use
    positions: dict[int, int] = {}  # the same by identity: steps share items, whose hash takes long
    lists: dict[int, list[int]] = {}  # by the identity of the items of a step: calls share those of a function

    def positions_of(items: Items) -> list[int]:
        for item in [item for item in items if id(item) not in positions]:
            positions[id(item)] = table.setdefault(item, len(table))
        return [positions[id(item)] for item in items]

    def data(node: LiveNode) -> Json:
        entry: Json = {"type": ids.type_of(node.program), "programs": ids.programs_of(node.program)}
        entry |= {"name": node.name} if node.name else {}
        if node.live_bytes is not None:
            if id(node.live) not in lists:
                lists[id(node.live)] = positions_of(node.live)
            entry |= {"liveBytes": node.live_bytes, "liveVariables": list(lists[id(node.live)])}
        children = [data(child) for child in node.children if ids.programs_of(child.program)]
        return entry | ({"children": children} if children else {})

    root = data(tree.root)  # fills the table
    return {
        "alwaysLiveBytes": tree.always_bytes,
        "alwaysLiveVariables": items_section(tree.always),
        "maxLiveBytes": tree.max_bytes,
        "notAlwaysLiveVariables": items_section(table),
        "programs": root,
    }


def items_section(items: Iterable[LiveItem]) -> list[Json]:
    """Return items in memory as JSON-able data."""
    return [
        {"name": item.name, "bytes": item.num_bytes, "category": item.category, "origin": str(item.origin)}
        for item in items
    ]


def _sort_items(items: Iterable[LiveItem]) -> Items:
    """Sort items with bytes, largest first; by name where equal, so that files do not depend on the order of sets."""
    return tuple(sorted((i for i in items if i.num_bytes), key=lambda item: (-item.num_bytes, item.name)))


SortKey = tuple[int, str, int]  # largest first, then by name, then by start


def _sort_key(item: LiveItem, number: int) -> SortKey:
    return -item.num_bytes, item.name, number


def _with_caller(node: LiveNode, caller_bytes: int) -> LiveNode:
    """Return the node of a function with the bytes that are live at a call of it."""
    num_bytes = None if node.live_bytes is None else caller_bytes + node.live_bytes
    children = tuple([_with_caller(child, caller_bytes) for child in node.children])
    return LiveNode(node.program, node.name, num_bytes, node.live, children)


class _Frame:
    """Walk of a program, or of a function, in the order of its steps.

    Args:
        occupancy: buffers, and the liveness of all frames.
        owner: the function of the frame; None for the program.
        always: variables to omit.
        bodies: the nodes of functions that were walked, without the bytes of callers.
    """

    def __init__(
        self, occupancy: Occupancy, owner: Owner, always: Collection[Variable], bodies: dict[Owner, LiveNode]
    ) -> None:
        self.occupancy = occupancy
        self.frame = occupancy.frames.liveness[owner]
        self.always = always
        self.bodies = bodies
        self.starts, self.ends = starts_and_ends(self.frame)  # variables, by position
        self.live: dict[Variable, tuple[SortKey, LiveItem]] = {}  # at the current step
        self.ordered: list[tuple[SortKey, LiveItem]] = []  # of `live` those with bytes, as `_sort_items` sorts them
        self.live_bytes = 0  # of all of them
        self.number = count()  # of items, in the order in which they become live
        self.position = 0  # of the next step

    def node(self, node: Program) -> LiveNode:
        """Return a node with its children, which are visited in the order of their steps."""
        if isinstance(node, Block | Loop) and not isinstance(node, Call | Decision):  # no steps themselves
            return LiveNode(node, "", children=tuple(map(self.node, node.children())) if node.child_runs else ())
        test = node.test if isinstance(node, Loop) else None  # runs before the decision, so its steps come first
        before = () if test is None else (self.node(test),)
        items, num_bytes = self.step(node)
        if isinstance(node, Call):
            function = node.function
            if function not in self.bodies:
                frame = _Frame(self.occupancy, function, self.always, self.bodies)
                self.bodies[function] = frame.node(function.body)
            body = _with_caller(self.bodies[function], num_bytes)
            return LiveNode(node, function.name, num_bytes, items, (body,))
        children = node.children()[len(before) :]
        name = node.label if isinstance(node, Leaf) else ""
        return LiveNode(node, name, num_bytes, items, (*before, *map(self.node, children)))

    def step(self, node: Program) -> tuple[Items, int]:
        """Advance to the next step, that of a node; return the items live at it, and their bytes."""
        step = self.frame.steps[self.position]
        assert step is node, "steps of another program"  # two walks of one tree that must agree
        for variable in self.ends[self.position]:
            if (entry := self.live.pop(variable, None)) is not None and entry[1].num_bytes:
                del self.ordered[bisect_left(self.ordered, entry[0], key=itemgetter(0))]
                self.live_bytes -= entry[1].num_bytes
        for variable in self.starts[self.position]:
            if variable not in self.always and variable not in self.live:
                item = LiveItem.of(variable, variable.num_bytes, "variable")
                entry = self.live[variable] = _sort_key(item, next(self.number)), item
                if item.num_bytes:
                    insort(self.ordered, entry, key=itemgetter(0))
                    self.live_bytes += item.num_bytes
        self.position += 1
        buffers = [LiveItem.buffer(step, int(values.sum()), name) for name, _, values in self.occupancy.buffers(step)]
        rows = self.ordered
        if any(item.num_bytes for item in buffers):
            rows = rows.copy()
            for item in buffers:
                if item.num_bytes:
                    insort(rows, (_sort_key(item, next(self.number)), item), key=itemgetter(0))
        return tuple([item for _, item in rows]), self.live_bytes + sum(item.num_bytes for item in buffers)
