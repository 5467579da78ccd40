"""The verifier lets sound programs pass, and agrees with the tile interpreter on any."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph.program import (
    Call,
    Copy,
    Function,
    HostStream,
    If,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
    Switch,
    WriteUndef,
)
from ipujax.runtime.graph.vertex_group import Access, Axis, Dim, Term, block, element
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.interpreter.tile_memory import InterpreterError
from ipujax.runtime.tensor.mapping import Flat, even_cuts, on_one_tile
from tests.runtime.verify.verifier_helpers import BOOL, F32, I32, UNARY, Builder, along, codelet

# --- programs that must pass ------------------------------------------------------------------------------------------


def test_matmul_with_partials_passes():
    b = Builder()
    x = b.given(6, 8)
    y = b.given(8, 4, name="y")
    partials = b.variable(2, 6, 4)
    out = b.variable(6, 4)
    axes = [Axis("m", even_cuts(6, 2)), Axis("n", even_cuts(4, 1)), Axis("k", even_cuts(8, 2), "reduce")]
    dims = (element(0), element(2)), (element(2), element(1)), (block(2), element(0), element(1))
    accesses = [Access(t, d) for t, d in zip((x, y, partials), dims, strict=True)]
    b.run(b.group(codelet("in", "in", "out"), axes, *accesses))
    axes = [Axis("p", even_cuts(2, 1), "reduce"), axes[0], axes[1]]
    dims = (element(0), element(1), element(2)), (element(1), element(2))
    b.run(b.group(UNARY, axes, Access(partials, dims[0]), Access(out, dims[1])))
    b.program.add(StreamOut(out, HostStream("out", (6, 4), F32)))
    b.verify()


def test_halo_with_fill_and_reversed_output_pass():
    b = Builder()
    x = b.given(8)
    y = b.variable(8)
    axes = [Axis("i", even_cuts(8, 3)), Axis("w", np.array([0, 3]), "reduce")]
    b.run(b.group(UNARY, axes, Access(x, (Dim((Term(0), Term(1)), -1),), 0.0), along(y, 7, -1)))
    b.verify()


def test_index_outside_the_tensor_passes_without_a_vertex():
    b = Builder()
    x = b.given(6)
    y = b.variable(6)
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 4))], along(x), along(y), tile=[0, 1, 2, -1]))
    b.verify()


def test_one_vertex_along_an_axis_that_outputs_lack_passes():
    b = Builder()
    axes = [Axis("i", even_cuts(8, 2)), Axis("k", even_cuts(6, 2))]
    access = Access(b.given(8, 6), (element(0), element(1)))
    b.run(b.group(UNARY, axes, access, along(b.variable(8)), tile=[[0, -1], [-1, 1]]))
    b.verify()


def test_groups_that_write_parts_of_one_variable_pass():
    b = Builder()
    x = b.given(4, 3)
    y = b.given(4, 5, name="y")
    out = b.variable(4, 8)
    axes = [[Axis("i", even_cuts(4, 2)), Axis("j", even_cuts(n, 2))] for n in (3, 5)]
    both = (element(0), element(1))
    parts = zip(axes, (x, y), (out[:, :3], out[:, 3:]), strict=True)
    b.run(*(b.group(UNARY, a, Access(s, both), Access(d, both)) for a, s, d in parts))
    b.program.add(StreamOut(out, HostStream("out", (4, 8), F32)))
    b.verify()


def test_in_place_passes():
    b = Builder()
    x = b.given(8)
    y = b.given(8, name="y")
    b.run(b.unary(x, x), b.group(codelet("inout", "in"), [Axis("i", even_cuts(8, 4))], along(y), along(y)))
    b.run(b.group(UNARY, [Axis("i", even_cuts(4, 2))], along(x[4:]), along(x[:4])))
    b.verify()


def test_interleaved_halves_of_two_groups_pass():
    b = Builder()
    x = b.given(8)
    y = b.variable(8)
    axis = Axis("i", even_cuts(8, 4))
    even = [0, -1, 2, -1]
    odd = [-1, 1, -1, 3]
    b.run(*(b.group(UNARY, [axis], along(x), along(y), tile=tile) for tile in (even, odd)))
    b.program.add(StreamOut(y, HostStream("out", (8,), F32)))
    b.verify()


def test_piecewise_definitions_pass():
    b = Builder()
    x = b.given(8)
    y = b.variable(8)
    z = b.variable(8)
    b.program.add(If(b.given(dtype=BOOL, name="p"), Copy(x[:4], y[:4]), Call(Function(Copy(x[4:], y[:4])))))
    b.program.add(Repeat(2, Sequence(Copy(x[4:], y[4:]), Copy(y, z))))
    first = Copy(x, z)
    second = Sequence(Copy(x[:2], z[:2]), Copy(x[2:], z[2:]))
    b.program.add(Switch(b.given(dtype=I32, name="s"), (first, second), first))
    b.program.add(RepeatWhile(b.compute_set(), b.given(dtype=BOOL, name="q"), Copy(z, y)))
    for tensor in (y, z):
        b.program.add(StreamOut(tensor, HostStream("out", (8,), F32)))
    b.verify()


def test_a_buffer_left_undefined_on_purpose_passes():
    b = Builder()
    buffer = b.variable(8)
    b.program.add(WriteUndef(buffer))
    b.program.add(Repeat(3, b.compute_set(b.group(codelet("inout"), [Axis("i", even_cuts(8, 2))], along(buffer)))))
    b.verify()


def test_each_vertex_on_its_own_ipu_passes():
    b = Builder(4, 2)
    x = b.given(64)
    y = b.variable(64)
    tiles = np.arange(8)
    for tensor in (x, y):
        b.graph.set_tile_mapping(tensor.variables()[0], Flat(64, tiles * 8, tiles))
    b.run(b.unary(x, y, 8, tile=tiles[::-1] ^ 3))
    b.graph.set_tile_mapping(y.variables()[0], on_one_tile(64, 6))
    b.program.add(Copy(x, y))
    with pytest.raises(VerifyError, match="cross-ipu"):
        b.verify()
    b = Builder(4, 2)
    x = b.given(64)
    y = b.variable(64)
    for tensor in (x, y):
        b.graph.set_tile_mapping(tensor.variables()[0], Flat(64, tiles * 8, tiles))
    b.run(b.unary(x, y, 8, tile=[3, 2, 1, 0, 7, 6, 5, 4]))
    b.program.add(Copy(x[:8], y[56:]))
    b.verify()


# --- against the tile interpreter -------------------------------------------------------------------------------------

SIZE = 12


@st.composite
def accesses(draw, axis, tensors):
    """A slice of a tensor as long as the axis, forwards or backwards, whole or strided, or one all vertices share."""
    n = axis.extent
    tensor = draw(st.sampled_from(tensors))
    coeff = draw(st.sampled_from([1, 1, 1, -1]))
    step = draw(st.sampled_from([1, 1, 2])) if 2 * n <= SIZE else 1
    start = draw(st.integers(0, SIZE - n * step))
    if draw(st.integers(0, 5)) == 0:
        return Access(tensor[start : start + n], (Dim((), draw(st.integers(0, n - 1))),))
    view = tensor[start : start + n * step : step]
    return Access(view, (element(0, coeff, 0 if coeff == 1 else n - 1),))


@st.composite
def programs(draw):
    """Two compute sets of two groups each on two variables, of which one may be half undefined."""
    b = Builder()
    x = b.given(SIZE)
    y = b.variable(SIZE)
    defined = draw(st.sampled_from([0, 7, SIZE]))
    b.program.add(StreamIn(HostStream("half", (defined,), F32), y[:defined]))
    for _ in range(2):
        groups = []
        for _ in range(draw(st.integers(1, 2))):
            axis = Axis("i", even_cuts(draw(st.integers(1, 6)), draw(st.integers(1, 4))))
            directions = draw(st.sampled_from([("in", "out"), ("inout",), ("in", "out", "out"), ("inout", "in")]))
            tile = [draw(st.sampled_from([-1, 0, 1, 2, 3])) for _ in range(axis.blocks)]
            connected = [draw(accesses(axis, (x, y))) for _ in directions]
            groups.append(b.group(codelet(*directions), [axis], *connected, tile=tile))
        b.run(*groups)
    b.program.add(StreamOut(x, HostStream("x", (SIZE,), F32)))
    return b


@settings(max_examples=75, derandomize=True)
@given(programs(), st.integers(0, 3))
def test_agrees_with_the_interpreter(b, seed):
    streams = [node.stream for node in b.program.children() if isinstance(node, StreamIn)]
    inputs = {stream: np.ones(stream.shape, F32) for stream in streams}
    caught = {}
    for name, run in (
        ("verifier", b.verify),
        ("interpreter", lambda: interpret(b.graph, b.program, inputs, seed=seed)),
    ):
        try:
            run()
            caught[name] = None
        except (VerifyError, InterpreterError) as error:
            caught[name] = error.rule
    assert (caught["verifier"] is None) == (caught["interpreter"] is None), caught
