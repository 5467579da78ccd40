"""The parts of a program for reports: stages of pipelines, and layers of a model.

Input: `Figures`. Output of a pipeline: texts, rows of shares of the run, and `TaskView`, of bounded size.

Output of layers: a tree of `LayerNode`s, whose cycles include those of the layers inside them, and `LayerKind`s.
Layers are of one kind if their paths differ in numbers alone: `block[3]/attention` and `block[7]/attention`. A name
without a number is of the kind of those with one: Keras names layers `dense`, `dense_1`, `dense_2`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from ipujax.runtime.profile import STAGE_PHASES, Figures, LayerCost, PipelineCost, StageCost
from ipujax.runtime.profile.stage_figures import NO_STAGE
from ipujax.runtime.tensor import PARTS as PARTS_OF_STEP

PARTS = (*PARTS_OF_STEP, "")
PART_LABELS = {"": "other"}
_NUMBER = re.compile(r"\d+")
_LAST_NUMBER = re.compile(r"_\d+(?=/|$)")
_ANY_NUMBER = re.compile(rf"(?P<last>{_LAST_NUMBER.pattern})|\d+")
_OUTLIER = 1.15  # times the median of its kind: a layer with more is named, unless the others differ as much
_SPREAD = 3  # times the median deviation of its kind


@dataclass(slots=True)
class LayerNode:
    """Layer; its figures include those of the layers inside it.

    Args:
        name: the last name of its path.
        path: names of the layers around it and its name, joined by "/"; "" for the model.
        parts: busy cycles of all IPUs by part of training.
        flops: operations on floating-point numbers.
        moved_bytes: bytes that arrive on tiles or the host.
        always_bytes: of variables that are live during the whole run.
        peak_bytes: of these and of variables that are live at the peak.
        limiting_cycles: cycles on the limiting IPU.
        lines: lines of source of the layer without those inside it, most expensive first.
        children: the layers inside it by name, in program order; numbered ones by number.
    """

    name: str
    path: str
    parts: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    moved_bytes: int = 0
    always_bytes: int = 0
    peak_bytes: int = 0
    limiting_cycles: int = 0
    lines: tuple[str, ...] = ()
    children: dict[str, LayerNode] = field(default_factory=dict)

    @property
    def cycles(self) -> int:
        """Busy cycles of all parts of training."""
        return sum(self.parts.values())

    @property
    def own_cycles(self) -> int:
        """Busy cycles without those of the layers inside it."""
        return self.cycles - sum(child.cycles for child in self.children.values())

    def walk(self) -> Iterator[LayerNode]:
        """Yield this layer and all inside it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def layer_tree(layers: Sequence[LayerCost]) -> LayerNode:
    """Build the tree of a profile's layers; its root is the model."""
    root = LayerNode("the whole program", "")
    for row in layers:
        node = root
        _add(node, row)
        for name in row.layer.split("/"):
            path = f"{node.path}/{name}" if node.path else name
            node = node.children.setdefault(name, LayerNode(name, path))
            _add(node, row)
        node.lines = tuple(dict.fromkeys((*node.lines, *row.lines)))
    for node in list(root.walk()):
        node.children = _in_order(node.children)
    return root


def _in_order(children: dict[str, LayerNode]) -> dict[str, LayerNode]:
    """Sort names that differ in numbers alone by these, at the place of the first."""
    # A function that several layers call is in the program once: its first call may not be the first layer.
    kinds = list(dict.fromkeys(_NUMBER.sub("*", name) for name in children))
    order = {kind: n for n, kind in enumerate(kinds)}
    return dict(sorted(children.items(), key=lambda item: (order[_NUMBER.sub("*", item[0])], _numbers(item[0]))))


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(name)))


def _add(node: LayerNode, row: LayerCost) -> None:
    node.parts[row.part] += row.cycles
    node.flops += row.flops
    node.moved_bytes += row.moved_bytes
    node.always_bytes += row.always_bytes
    node.peak_bytes += row.peak_bytes
    node.limiting_cycles += row.limiting_cycles


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers whose paths differ in numbers alone.

    Args:
        path: of the layer; of several, with `*` for numbers.
        nodes: the layers, in program order.
    """

    path: str
    nodes: tuple[LayerNode, ...]

    @property
    def cycles(self) -> int:
        """Busy cycles of all layers of the kind."""
        return sum(node.cycles for node in self.nodes)

    @property
    def own_cycles(self) -> int:
        """Busy cycles of all layers of the kind, without those of the layers inside them."""
        return sum(node.own_cycles for node in self.nodes)

    @property
    def parts(self) -> Counter[str]:
        """Busy cycles of all layers of the kind, by part of training."""
        return sum((node.parts for node in self.nodes), Counter[str]())

    @property
    def median_cycles(self) -> float:
        """Median of the layers' busy cycles."""
        return float(median(node.cycles for node in self.nodes))

    @property
    def outlier(self) -> LayerNode | None:
        """Costliest layer of three or more, if it takes at least 1.15 times their median and most others are alike."""
        if len(self.nodes) < 3:
            return None
        middle = self.median_cycles
        largest = max(self.nodes, key=lambda node: node.cycles)
        deviation = median(abs(node.cycles - middle) for node in self.nodes)
        return largest if largest.cycles - middle >= max((_OUTLIER - 1) * middle, _SPREAD * deviation) else None

    @property
    def excess_part(self) -> str:
        """Part of training with most of what its costliest layer takes beyond the median; "" if that is all of it."""
        parts = [part for part in PARTS if any(node.parts[part] for node in self.nodes)]
        largest = max(self.nodes, key=lambda node: node.cycles)

        def excess(part: str) -> float:
            return largest.parts[part] - float(median(node.parts[part] for node in self.nodes))

        return max(parts, key=excess) if len(parts) > 1 else ""


def layer_kinds(root: LayerNode) -> tuple[LayerKind, ...]:
    """Group the layers of a tree in kinds, most expensive first; of equal ones, the outer kind first."""
    members: dict[str, list[LayerNode]] = defaultdict(list)
    for node in root.walk():
        if node.path:
            members[_NUMBER.sub("*", _LAST_NUMBER.sub("", node.path))].append(node)
    kinds = [LayerKind(_path_of_kind(nodes), tuple(nodes)) for nodes in members.values()]
    return tuple(sorted(kinds, key=lambda kind: -kind.cycles))  # stable: parents come first in `walk`


def _path_of_kind(nodes: Sequence[LayerNode]) -> str:
    """Return the path of some layers, with `*` for numbers but those of a word, as `conv2d`, which all have."""
    if len(nodes) == 1:
        return nodes[0].path
    numbers_of_words = zip(*(_numbers(_LAST_NUMBER.sub("", node.path)) for node in nodes), strict=True)
    are_equal = [len(set(numbers)) == 1 for numbers in numbers_of_words]
    # Of `dense` and `dense_1` the longer path has the place of the number.
    longest = max((node.path for node in nodes), key=lambda path: len(_NUMBER.sub("*", path)))
    words = iter(are_equal)

    def shared_text(match: re.Match[str]) -> str:
        return "_*" if match["last"] else match[0] if next(words) else "*"

    return _ANY_NUMBER.sub(shared_text, longest)


def tree_of(profile: Figures) -> LayerNode:
    """Return the tree of layers of a profile.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    return layer_tree(profile.layers)


MAX_TASKS = 8_000  # that are drawn
MAX_LINKS = 2_000
SLOW = 1.5  # times the median: a micro-batch that takes longer is named
STAGE_HEAD = ("stage", "IPU", *STAGE_PHASES, "fill", "steady", "drain", "waits for", "slow micro-batch")
STAGE_NOTE = (
    "Shares of the run. Forward, backward and recomputed are its tasks; exchange and sync are between tasks; host is "
    "host exchange in the pipeline, arguments that before and after; outside is other work before and after it, such "
    "as the update; fill, steady and drain are parts of idle."
)


@dataclass(frozen=True, slots=True, eq=False)
class TaskView:
    """Tasks of pipelines for a chart; arrays are int64[tasks].

    Args:
        num_ipus: IPUs of one replica.
        cycles: length of the run.
        ipu: of each task.
        stage: of each task.
        kind: position in `TASK_KINDS`.
        micro_batch: of each task.
        start: cycle at which its work begins.
        end: cycle at which it ends.
        busy: cycles that its IPU works in it.
        waited: cycles that its IPU is idle before it or in it.
        labels: stage, kind and micro-batch in words.
        links: (writer, reader) of a value, tasks on different IPUs, int64[links, 2].
        num_omitted: tasks that are not drawn.
        num_omitted_links: links between drawn tasks that are not drawn.
    """

    num_ipus: int
    cycles: int
    ipu: np.ndarray
    stage: np.ndarray
    kind: np.ndarray
    micro_batch: np.ndarray
    start: np.ndarray
    end: np.ndarray
    busy: np.ndarray
    waited: np.ndarray
    labels: tuple[str, ...]
    links: np.ndarray
    num_omitted: int
    num_omitted_links: int


def task_view(profile: Figures, max_tasks: int = MAX_TASKS, max_links: int = MAX_LINKS) -> TaskView:
    """Return the first tasks of a run and the first links between them.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    trace = profile.tasks
    num_tasks = min(len(trace), max_tasks)
    links = trace.links()
    links = links[(links < num_tasks).all(1)]  # both ends are drawn
    links = links[np.argsort(trace.start[links[:, 1]], kind="stable")]  # by time, so that the last are omitted
    return TaskView(
        num_ipus=profile.target.num_ipus,
        cycles=profile.cycles,
        ipu=trace.ipu[:num_tasks],
        stage=trace.stage[:num_tasks],
        kind=trace.kind[:num_tasks],
        micro_batch=trace.micro_batch[:num_tasks],
        start=trace.start[:num_tasks],
        end=trace.end[:num_tasks],
        busy=trace.busy[:num_tasks],
        waited=trace.waited[:num_tasks],
        labels=tuple(map(trace.label, range(num_tasks))),
        links=links[:max_links],
        num_omitted=len(trace) - num_tasks,
        num_omitted_links=max(0, len(links) - max_links),
    )


def pipeline_sentence(pipeline: PipelineCost) -> str:
    """Describe a pipeline: schedule, stages, micro-batches, cycles and bubble."""
    ipus = f"{pipeline.num_ipus:,} IPU{'s' if pipeline.num_ipus > 1 else ''}"
    text = f"Pipeline {pipeline.name}: {pipeline.schedule}, {pipeline.num_stages:,} stages on {ipus}, "
    text += f"{pipeline.micro_batches:,} micro-batches."
    if not pipeline.is_traced:
        return f"{text} It has too many tasks to follow them one by one, so waits are not told apart."
    text += f" From its first task to its last it takes {pipeline.cycles:,} cycles."
    return f"{text} {bubble_sentence(pipeline)}"


def bubble_sentence(pipeline: PipelineCost) -> str:
    """Compare the bubble of a traced pipeline with the ideal bubble of its schedule."""
    equal = "equal stages" if pipeline.num_stages == pipeline.num_ipus else "IPUs of equal work"
    return (
        f"Its bubble is {pipeline.bubble_share:.1%} of that time ({pipeline.bubble_cycles:,} cycles an IPU); with "
        f"{equal} and free exchanges {pipeline.schedule} with {pipeline.micro_batches:,} micro-batches has "
        f"{pipeline.ideal_share:.1%}."
    )


def stage_cells(row: StageCost, run_cycles: int, has_several_pipelines: bool) -> tuple[str, ...]:
    """Return the cells of a stage in a table with the columns `STAGE_HEAD`."""
    cycles = max(1, run_cycles)
    shares = [*(row.phases[name] for name in STAGE_PHASES), row.fill_cycles, row.steady_cycles, row.drain_cycles]
    awaited = "none"
    if row.waits_for != NO_STAGE:
        awaited = f"stage {row.waits_for}: {row.waits_for_cycles / cycles:.1%}"
    slow = "all alike"
    if row.slow_micro_batch >= 0:
        slow = f"{row.slow_micro_batch}: {row.slow_ratio:.1f} × the others ({row.slow_kind.replace('_', ' of ')})"
    name = f"{row.pipeline}: {row.stage}" if has_several_pipelines else f"{row.stage}"
    return (name, f"{row.ipu}", *(f"{share / cycles:.1%}" for share in shares), awaited, slow)
