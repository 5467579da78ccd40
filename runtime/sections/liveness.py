"""What is live at every step of a program, on all tiles together, as a tree that follows the program's.

Input: an `Executable`. Output: `LivenessTree`; `liveness_section` makes JSON-able data of it. A function is shown at
each of its calls; what the caller keeps meanwhile counts in its bytes, and is listed at the call.
Source: Poplar & PopLibs user guide, "Memory use" and "Profile summary output", `showVarStorage`.
Limits: bytes are those of what lives, without gaps; a step that becomes several programs is one here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from ipujax.runtime.analysis import Liveness
from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Block, Call, Decision, Leaf, Loop, Program, is_free
from ipujax.runtime.memory import LiveItem, Occupancy, Owner, starts_and_ends
from ipujax.runtime.sections.ids import Json, Numbering
from ipujax.runtime.tensor import Variable

Items = tuple[LiveItem, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LiveNode:
    """One node of the program tree.

    Args:
        program: the node.
        name: its debug name, empty when it has none.
        live_bytes: bytes live at it, what is always live left out; None for control that is no step itself.
        live: what is live at it, largest first; what is always live, and what callers keep, left out.
        children: the nodes inside it.
    """

    program: Program
    name: str
    live_bytes: int | None = None
    live: Items = ()
    children: tuple[LiveNode, ...] = ()

    def walk(self) -> Iterator[LiveNode]:
        """This node and all inside it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, eq=False)
class LivenessTree:
    """What is live when.

    Args:
        always: what is live at every step: constants, code, stacks, and variables; largest first.
        root: the whole program.
    """

    always: Items
    root: LiveNode

    @property
    def always_bytes(self) -> int:
        """Bytes of `always`."""
        return sum(item.num_bytes for item in self.always)

    @property
    def at_peak(self) -> Items:
        """What is live at the step at which most is, what is always live left out, that of callers included."""
        return _peak(self.root)[1]

    @property
    def max_bytes(self) -> int:
        """The most that is live at any step, what is always live included."""
        return self.always_bytes + max(node.live_bytes or 0 for node in self.root.walk())


def _peak(node: LiveNode) -> tuple[int, Items]:
    """The most that is live at any step inside a node, and what that is."""
    within = max(map(_peak, node.children), key=lambda peak: peak[0], default=(0, ()))
    own_bytes = node.live_bytes or 0
    if isinstance(node.program, Call) and within[0] >= own_bytes:
        return within[0], node.live + within[1]
    return (own_bytes, node.live) if own_bytes > within[0] else within


def liveness_tree(executable: Executable) -> LivenessTree:
    """Finds what is live at every step."""
    memory = executable.memory
    through = _always_live(memory.occupancy.frames.liveness[None])
    always = [LiveItem.of(v, v.num_bytes, "constant") for v in memory.constants]
    always += [LiveItem.of(v, v.num_bytes, "variable") for v in through]
    always += [LiveItem.always(int(each.sum()), name) for name, each in memory.fixed.items() if name != "constant"]
    root = _Frame(memory.occupancy, None, through, 0).node(executable.program)
    return LivenessTree(_largest_first(always), root)


def _always_live(frame: Liveness) -> Collection[Variable]:
    """The variables that are live at every step that takes time."""
    before = list(accumulate((not is_free(step) for step in frame.steps), initial=0))
    live = Counter[Variable]()
    for interval in frame.intervals:
        live[interval.variable] += before[interval.last + 1] - before[interval.first]
    return {variable: steps for variable, steps in live.items() if steps == before[-1] > 0}


def liveness_section(executable: Executable, ids: Numbering) -> Json:
    """The tree as data: `liveVariables` are positions in `notAlwaysLiveVariables`."""
    tree = liveness_tree(executable)
    table: dict[LiveItem, int] = {}

    def data(node: LiveNode) -> Json:
        entry: Json = {"type": ids.type_of(node.program), "programs": ids.programs_of(node.program)}
        entry |= {"name": node.name} if node.name else {}
        if node.live_bytes is not None:
            numbers = [table.setdefault(item, len(table)) for item in node.live]
            entry |= {"liveBytes": node.live_bytes, "liveVariables": numbers}
        inside = [data(child) for child in node.children if ids.programs_of(child.program)]
        return entry | ({"children": inside} if inside else {})

    root = data(tree.root)
    return {
        "alwaysLiveBytes": tree.always_bytes,
        "alwaysLiveVariables": items_section(tree.always),
        "maxLiveBytes": tree.max_bytes,
        "notAlwaysLiveVariables": items_section(table),
        "programs": root,
    }


def items_section(items: Iterable[LiveItem]) -> list[Json]:
    """Things in memory as data."""
    return [
        {"name": item.name, "bytes": item.num_bytes, "category": item.category, "origin": str(item.origin)}
        for item in items
    ]


def _largest_first(items: Iterable[LiveItem]) -> Items:
    return tuple(sorted((i for i in items if i.num_bytes), key=lambda item: (-item.num_bytes, item.name)))


class _Frame:
    """One walk of a program, or of a function, in the order of its steps.

    Args:
        occupancy: buffers, and the liveness of all frames.
        owner: whose frame.
        always: variables to leave out.
        kept_bytes: what callers keep meanwhile.
    """

    def __init__(self, occupancy: Occupancy, owner: Owner, always: Collection[Variable], kept_bytes: int) -> None:
        self.occupancy, self.frame, self.always = occupancy, occupancy.frames.liveness[owner], always
        self.kept_bytes = kept_bytes
        self.starts, self.ends = starts_and_ends(self.frame)
        self.live: dict[Variable, LiveItem] = {}
        self.position = 0

    def node(self, node: Program) -> LiveNode:
        """A node and all inside it."""
        if isinstance(node, Block | Loop) and not isinstance(node, Call | Decision):  # which are no steps
            return LiveNode(node, "", children=tuple(map(self.node, node.children())) if node.child_runs else ())
        test = node.test if isinstance(node, Loop) else None  # which runs before the decision
        before = () if test is None else (self.node(test),)
        items = self.step(node)
        num_bytes = self.kept_bytes + sum(item.num_bytes for item in items)
        if isinstance(node, Call):
            inner = _Frame(self.occupancy, node.function, self.always, num_bytes)
            return LiveNode(node, node.function.name, num_bytes, items, (inner.node(node.function.body),))
        inside = node.children()[len(before) :]
        name = node.label if isinstance(node, Leaf) else ""
        return LiveNode(node, name, num_bytes, items, (*before, *map(self.node, inside)))

    def step(self, node: Program) -> Items:
        """Goes on to the next step, which is that of a node; returns what is live at it."""
        step = self.frame.steps[self.position]
        assert step is node, "steps of another program"
        for variable in self.ends[self.position]:
            self.live.pop(variable, None)
        for variable in self.starts[self.position]:
            if variable not in self.always:
                self.live[variable] = LiveItem.of(variable, variable.num_bytes, "variable")
        self.position += 1
        buffers = [LiveItem.buffer(step, int(values.sum()), name) for name, _, values in self.occupancy.buffers(step)]
        return _largest_first([*self.live.values(), *buffers])
