"""Bytes of variables that tiles hold, measured while the tile interpreter runs, against those that are predicted.

Measured are the elements that each step of a run reads and writes, loops unrolled and calls followed. A
variable is held, on the tiles it is mapped to, from its first write to its last read before all of it is written anew,
and while a step touches it. The measure is as coarse as the prediction: a variable is held as a whole, parts of it
written in several steps overwrite nothing, and what a step reads overlaps with what it writes, but for a result that is
written over an operand: both are held in one place. Constants and buffers of messages are left out. A prediction may be
more only for what a run does not do (a branch that is not taken, a loop left at once), and where a function is called,
whose frame is there as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import ipujax as ipu
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.compile import leaf_costs
from ipujax.runtime.graph import Branch, Call, Copy, Decision, Function, Loop, Program, Repeat, Sequence, distinct
from ipujax.runtime.interpreter import interpreter
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.interpreter.tile_memory import Actor, TileMemory
from ipujax.runtime.memory import MemoryReport, memory_report
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.tensor import Variable, element_bytes
from tests.lowering.helpers import assert_same, quick_jit, run_tiles
from tests.lowering.recomputation.training_steps import STEPS, array, chain_of, dense, trained
from tests.runtime.helpers import SIZE, graph_of_variables

TILES = 4
CONTROL = Call | Branch | Loop


# --- measured ---------------------------------------------------------------------------------------------------------


@dataclass
class Touched:
    """Variables that a step of a run reads, and the elements that it writes."""

    reads: set[Variable] = field(default_factory=set)
    writes: dict[Variable, np.ndarray] = field(default_factory=dict)


class Watch:
    """All steps of a run, in the order in which they ran, and the bytes of each variable on each tile."""

    def __init__(self) -> None:
        self.steps: list[Touched] = []
        self.bytes_of: dict[Variable, np.ndarray] = {}
        self.places: dict[Variable, Variable] = {}

    def held(self, variable: Variable) -> np.ndarray:
        """The steps during which a variable is held, bool[steps]."""
        held = np.zeros(len(self.steps), bool)
        is_read_later = False
        touching = [n for n, step in enumerate(self.steps) if variable in step.reads or variable in step.writes]
        first = next((0 if variable in self.steps[n].reads else n for n in touching), len(self.steps))
        for n in reversed(range(first, len(self.steps))):
            step = self.steps[n]
            written = step.writes.get(variable, np.zeros(1, bool))
            held[n] = is_read_later or variable in step.reads or written.any()
            is_read_later = variable in step.reads or (is_read_later and not written.all())
        return held

    def peak_bytes(self) -> np.ndarray:
        """The most that each tile holds at once, int64[tiles]."""
        held: dict[Variable, np.ndarray] = {}
        for v in self.bytes_of:
            place = self.places.get(v, v)
            held[place] = self.held(v) | held.get(place, np.zeros(len(self.steps), bool))
        return sum(np.outer(steps, self.bytes_of[place]) for place, steps in held.items()).max(0)


@contextmanager
def watching() -> Iterator[Watch]:
    """Records the steps of the interpreter; writes before the first step are left out."""
    watch = Watch()

    class Memory(TileMemory):
        def __init__(self, graph: Any, variables: Any, replica: int = 0) -> None:
            super().__init__(graph, variables, replica)
            for v in (v for v in variables if not v.is_constant):
                on_tile = np.bincount(self.home(v), minlength=graph.target.num_tiles)
                watch.bytes_of[v] = on_tile * element_bytes(v.dtype)

        def share(self, memory: Mapping[Variable, Variable]) -> None:
            watch.places.update(memory)
            super().share(memory)

        def read(self, tiles: Any, variable: Variable, elements: np.ndarray, actor: Actor) -> np.ndarray:
            if elements.size:
                watch.steps[-1].reads.add(variable)
            return super().read(tiles, variable, elements, actor)

        def write(self, tiles: Any, variable: Variable, elements: np.ndarray, values: np.ndarray) -> None:
            if watch.steps:
                watch.steps[-1].writes.setdefault(variable, np.zeros(variable.size, bool))[elements] = True
            super().write(tiles, variable, elements, values)

    class Machine(interpreter._Machine):
        def step(self, program: Program) -> None:
            watch.steps.append(Touched())
            super().step(program)

        def choice(self, node: Decision) -> int:
            watch.steps.append(Touched())
            return super().choice(node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "TileMemory", Memory)
        patch.setattr(interpreter, "_Machine", Machine)
        yield watch


# --- predicted --------------------------------------------------------------------------------------------------------


def predicted(report: MemoryReport) -> np.ndarray:
    """The peak of each tile, of variables alone, int64[tiles]."""
    occupancy = report.occupancy
    return Occupancy(occupancy.graph, occupancy.frames, costs={}).peak(None).total


def peaks(fun: Callable[..., Any], args: tuple[Any, ...], **how: Any) -> tuple[Any, Any, bool]:
    """Measured and predicted bytes of each tile, and True if the program is one step after the other."""
    device = ipu.IPUModel(num_ipus=how.pop("num_ipus", 1), tiles_per_ipu=TILES)
    compiled = ipu.jit(fun, device=device, **how).lower(*args).compile()
    program = compiled.lowered.planned.lowered
    report = compiled.memory_analysis()
    with watching() as watch:
        assert_same(run_tiles(program, args), jax.tree.leaves(quick_jit(fun)(*args)), 1e-3, 1e-5, "interpreter")
    measured = watch.peak_bytes()
    assert measured.any() and (measured <= report.shared_bytes).all()
    return measured, predicted(report), not any(isinstance(node, CONTROL) for node in distinct(program.program))


# --- one step after the other -----------------------------------------------------------------------------------------

X = array(8, 4)
ROWS = np.array([3, 1, 4, 1], np.int32)
LAYERS = [array(4, 6), array(6, 8), array(8, 3)]
STRAIGHT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "network": (lambda ws, x: jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]), (LAYERS, X)),
    "softmax": (lambda x: jax.nn.softmax(x @ x.T) @ x, (X,)),
    "convolution": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (array(1, 2, 6, 6), array(3, 2, 3, 3))),
    "in place": (lambda x, u: lax.dynamic_update_slice(x, u, (2, 0)).at[1].add(3.0), (X, array(2, 4))),
    "rows": (lambda x, i: (x[i].sum(0), x.at[i].add(1.0)), (X, ROWS)),
    "parts": (lambda a, b: jnp.concatenate([a, b])[3:11] * 2 + jnp.flip(b, 0), (X, array(8, 4, seed=1))),
    "order": (lambda x: (jnp.sort(x, 0), jnp.cumsum(x, 1)), (X,)),
    "random": (lambda n, x: x * jax.random.bernoulli(jax.random.key(n), 0.5, x.shape), (np.uint32(3), X)),
    "second order": (STEPS["second order"].fun, ([array(4, 4, seed=n) for n in range(2)], X)),
}


@pytest.mark.parametrize("name", STRAIGHT)
def test_a_straight_program_takes_the_predicted_bytes(name: str) -> None:
    measured, expected, is_straight = peaks(*STRAIGHT[name])
    assert is_straight
    np.testing.assert_array_equal(measured, expected)


@pytest.mark.parametrize("mode", ["none", "all", "standard"])
def test_a_training_step_takes_the_predicted_bytes(mode: str) -> None:
    step = trained(chain_of(dense))
    options = ipu.Options(recompute=mode)
    measured, expected, is_straight = peaks(step, (LAYERS, array(16, 4)), options=options, donate_argnums=0)
    assert is_straight
    np.testing.assert_array_equal(measured, expected)


# --- loops, branches and calls ----------------------------------------------------------------------------------------


def until_one(n: jax.Array, x: jax.Array) -> Any:
    """A loop of as many iterations as its data says."""

    def body(state: Any) -> Any:
        n, x = state
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), jnp.sin(x) @ x.T @ x / 32

    return lax.while_loop(lambda state: state[0] > 1, body, (n, x))


def nested(x: jax.Array) -> Any:
    """Branches in a loop, and a loop in one of them."""

    def body(x: jax.Array, i: jax.Array) -> Any:
        x = lax.cond(
            i % 2 == 0, lambda x: jnp.tanh(x @ x.T @ x), lambda x: lax.fori_loop(0, i, lambda k, x: x + k, x), x
        )
        return x, x.sum()

    return lax.scan(body, x, jnp.arange(4))


def chosen(i: jax.Array, x: jax.Array) -> jax.Array:
    """One of three branches."""
    return lax.switch(i, [jnp.sin, lambda x: jnp.sort(x, 0) @ x.T @ x, lambda x: jnp.cumsum(x, 0)], x)


def pipelined(recompute: str) -> Callable[..., Any]:
    """A training step of four layers on two IPUs."""

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for number, w in enumerate(ws):
            with ipu.stage(number // 2):
                x = dense(w, x)
        with ipu.stage(1):
            return (x**2).mean()

    return ipu.pipeline(jax.value_and_grad(loss), micro_batches=4, recompute=recompute)


SQUARES = [array(4, 4, seed=n) for n in range(4)]
CONTROLLED: dict[str, tuple[Any, ...]] = {
    "while": (until_one, (np.int32(3), X), {}),
    "while, left at once": (until_one, (np.int32(1), X), {}),
    "nested": (nested, (X,), {}),
    **{f"switch, branch {n}": (chosen, (np.int32(n), X), {}) for n in range(3)},
    "scan": (STEPS["scan"].fun, (np.stack(SQUARES), X), {}),
    "layers": (STEPS["residual"].fun, (SQUARES, X), {}),
    "layers again": (STEPS["residual"].fun, (SQUARES, X), {"options": ipu.Options(recompute="all")}),
    "micro-batches": (STEPS["micro-batches"].fun, (SQUARES, array(3, 8, 4)), {}),
    "pipeline": (pipelined("none"), (SQUARES, array(16, 4)), {"num_ipus": 2}),
    "pipeline again": (pipelined("all"), (SQUARES, array(16, 4)), {"num_ipus": 2}),
}


@pytest.mark.parametrize("name", CONTROLLED)
def test_a_program_never_holds_more_than_is_predicted(name: str) -> None:
    fun, args, how = CONTROLLED[name]
    measured, expected, is_straight = peaks(fun, args, **how)
    assert not is_straight and (measured <= expected).all(), (measured, expected)
    assert measured.max() > expected.max() / 3


_pairs = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1])
_ranges = st.sampled_from([(0, SIZE), (0, SIZE // 2), (SIZE // 2, SIZE)])


@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_random_copies(data: st.DataObject, is_straight: bool) -> None:
    """Of variables that are written again and again, in whole or in part, before they are read and after."""
    graph, tensors = graph_of_variables()
    functions: list[Function] = []

    def block(depth: int) -> Sequence:
        parts = list[Program]()
        for kind in data.draw(st.lists(st.integers(0, 0 if is_straight else 3), max_size=8 if is_straight else 4)):
            if kind == 1 and depth:
                parts.append(Repeat(data.draw(st.integers(0, 3)), block(depth - 1)))
            elif kind == 2 and depth:
                functions.append(Function(block(depth - 1), f"f{len(functions)}"))
                parts.append(Call(functions[-1]))
            elif kind == 3 and functions:
                parts.append(Call(data.draw(st.sampled_from(functions))))
            else:
                (source, destination) = data.draw(_pairs)
                (start, stop) = data.draw(_ranges)
                parts.append(Copy(tensors[source][start:stop], tensors[destination][start:stop]))
        return Sequence(*parts)

    program = block(2)
    with watching() as watch:
        interpret(graph, program, {}, memory={})
    measured = watch.peak_bytes() if watch.steps else np.zeros(TILES)
    expected = predicted(memory_report(graph, program, EffectsOf(graph), leaf_costs(graph, program)))
    assert (measured == expected).all() if is_straight else (measured <= expected).all()


def test_measured_live_ranges_of_a_variable() -> None:
    """By hand, of one variable of two elements: the steps are r(ead), w(ritten), 0 and 1 the elements written."""
    v = Variable((2,), np.dtype("float32"), "v")
    for steps, held in (
        ("w..r..", "####.."),
        (".w.w.r", ".#.###"),
        (".0.1.r", ".#####"),
        ("w.r.0.", "###.#."),
        ("wr.w.r", "##.###"),
        ("w.b..r", "######"),
        ("..r...", "###..."),
        ("..0r..", "..##.."),
        ("......", "......"),
    ):
        watch = Watch()
        watch.bytes_of[v] = np.array([8])
        for step in steps:
            reads = {v} if step in "rb" else set[Variable]()
            elements = {"w": (1, 1), "b": (1, 1), "0": (1, 0), "1": (0, 1)}
            writes = {v: np.array(elements[step], bool)} if step in elements else {}
            watch.steps.append(Touched(reads, writes))
        assert "".join(".#"[n] for n in watch.held(v).astype(int)) == held, steps
        assert watch.peak_bytes().tolist() == [8 if "#" in held else 0]
