"""The tile interpreter against plain numpy, and each of its refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import (
    Call,
    Copy,
    Execute,
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
from ipujax.runtime.graph.vertex_group import Access, Axis, Dim, Term, VertexGroup, block, element
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.interpreter.tile_memory import (
    Actor,
    InterpreterError,
    Messages,
    TileMemory,
    from_raw,
    list_messages,
    raw_empty,
    to_raw,
)
from ipujax.runtime.tensor.mapping import even_cuts, grid, linear, on_one_tile
from ipujax.runtime.tensor.tensor import concat
from tests.runtime.helpers import machine

F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
BOOL = np.dtype(bool)
TILES = (1, 4, 7, 16)


def codelet(compute, ins, outs=(F32,), takes=()):
    """A codelet of inputs then outputs; a dtype wrapped in a list is an inout field."""
    fields = [Field(f"in{i}", "inout" if isinstance(d, list) else "in", d[0] if isinstance(d, list) else d)
              for i, d in enumerate(ins)]  # fmt: skip
    fields += [Field(f"out{i}", "out", d) for i, d in enumerate(outs)]
    return Codelet("test::Codelet", tuple(fields), compute, lambda shapes, target: np.ones(1), takes=takes)


def cut(name, extent, blocks, kind="map"):
    return Axis(name, even_cuts(extent, blocks), kind)


def group(code, axes, accesses, tiles, seed=0, origins=()):
    """A vertex group with vertices on random tiles."""
    counts = [axis.blocks for axis in axes]
    tile = np.random.default_rng(seed).integers(0, tiles, counts).astype(np.int32)
    return VertexGroup(code, tuple(axes), tuple(accesses), tile, origins)


def execute(graph, *groups, name="cs"):
    compute_set = graph.add_compute_set(name)
    for each in groups:
        graph.add_vertices(compute_set, each)
    return Execute(compute_set)


def spread(graph, shape, dtype=F32, name="v", **kwargs):
    tiles = graph.target.num_tiles
    size = int(np.prod(shape))
    return graph.add_variable(shape, dtype, name, linear(size, np.dtype(dtype).itemsize, tiles), **kwargs)


def run(graph, body, inputs, outputs, **kwargs):
    """Interprets: stream in the tensors of `inputs`, run, stream out `outputs`."""
    program = Sequence()
    values = {}
    for number, (tensor, value) in enumerate(inputs):
        stream = HostStream(f"in{number}", tensor.shape, tensor.dtype)
        values[stream] = value
        program.add(StreamIn(stream, tensor))
    program.add(body)
    streams = [HostStream(f"out{number}", t.shape, t.dtype) for number, t in enumerate(outputs)]
    for tensor, stream in zip(outputs, streams, strict=True):
        program.add(StreamOut(tensor, stream))
    results = interpret(graph, program, values, **kwargs)
    return [results[stream] for stream in streams]


def numbers(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(F32)


def unary(graph, function, source, target, blocks=3, seed=0):
    """A compute set that applies an elementwise function to a 1-d tensor."""
    axis = cut("i", source.shape[0], blocks)
    code = codelet(function, [source.dtype], [target.dtype])
    accesses = [Access(source, (element(0),)), Access(target, (element(0),))]
    return execute(graph, group(code, [axis], accesses, graph.target.num_tiles, seed))


@pytest.mark.parametrize("tiles", TILES)
def test_elementwise_between_different_mappings(tiles):
    graph = Graph(machine(tiles))
    a = spread(graph, (6, 35))
    b = graph.add_variable((6, 35), F32, "b", grid((6, 35), (1, min(tiles, 7))))
    out = graph.add_variable((6, 35), F32, "out", on_one_tile(210, tiles - 1))
    axes = [cut("i", 6, 2), cut("j", 35, 5)]
    both = (element(0), element(1))
    code = codelet(lambda x, y: x * y, [F32, F32])
    body = execute(graph, group(code, axes, [Access(t, both) for t in (a, b, out)], tiles))
    x = numbers(6, 35)
    y = numbers(6, 35, seed=2)
    (got,) = run(graph, body, [(a, x), (b, y)], [out])
    np.testing.assert_array_equal(got, x * y)


@pytest.mark.parametrize("tiles", TILES)
def test_matmul_with_partials_and_reduction(tiles):
    graph = Graph(machine(tiles))
    m = 6
    n = 5
    k = 40
    parts = 4
    a = spread(graph, (m, k), name="a")
    b = spread(graph, (k, n), name="b")
    partials = spread(graph, (parts, m, n), name="partials", monoid="add")
    out = spread(graph, (m, n), name="out")
    axes = [cut("m", m, 2), cut("n", n, 3), cut("k", k, parts, "reduce")]
    product = group(
        codelet(lambda x, y: x @ y, [F32, F32]),
        axes,
        [
            Access(a, (element(0), element(2))),
            Access(b, (element(2), element(1))),
            Access(partials, (block(2), element(0), element(1))),
        ],
        tiles,
    )
    total = group(
        codelet(lambda x: x.sum(0), [F32]),
        [cut("p", parts, 1, "reduce"), cut("m", m, 3), cut("n", n, 1)],
        [Access(partials, (element(0), element(1), element(2))), Access(out, (element(1), element(2)))],
        tiles,
    )
    x = numbers(m, k)
    y = numbers(k, n, seed=2)
    body = Sequence(execute(graph, product), execute(graph, total))
    slots, got = run(graph, body, [(a, x), (b, y)], [partials, out])
    np.testing.assert_allclose(slots[1], x[:, 10:20] @ y[10:20], rtol=1e-5)
    np.testing.assert_allclose(got, x @ y, rtol=1e-5, atol=1e-5)


def window(x, pads=None):
    """The sums of three neighbours."""
    if pads is not None:
        x = jnp.pad(x, pads[0], constant_values=7)
    return x[:-2] + x[1:-1] + x[2:]


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("takes", [(), ("pads",)])
def test_halo_with_fill(tiles, takes):
    graph = Graph(machine(tiles))
    a = spread(graph, (29,), name="a")
    out = spread(graph, (29,), name="out")
    axes = [cut("i", 29, 5), Axis("window", np.array([0, 3]), "reduce")]
    hull = Dim((Term(0), Term(1)), -1)
    code = codelet(window, [F32], takes=takes)
    body = execute(graph, group(code, axes, [Access(a, (hull,), 7.0), Access(out, (element(0),))], tiles))
    x = numbers(29)
    (got,) = run(graph, body, [(a, x)], [out])
    np.testing.assert_array_equal(got, np.asarray(window(jnp.asarray(np.pad(x, 1, constant_values=7)))))


def test_dilated_and_strided_and_reversed_reads():
    graph = Graph(machine(7))
    a = spread(graph, (6,), name="a")
    dilated = spread(graph, (16,), name="dilated")
    strided = spread(graph, (8,), name="strided")
    turned = spread(graph, (16,), name="turned")
    spreading = group(
        codelet(lambda x: x, [F32]),
        [cut("i", 16, 5)],
        [Access(a, (Dim((Term(0),), -2, 3),), -1.0), Access(dilated, (element(0),))],
        7,
    )
    picking = group(
        codelet(lambda x: x[::2], [F32]),
        [cut("i", 8, 3)],
        [Access(dilated, (element(0, 2),)), Access(strided, (element(0),))],
        7,
    )
    turning = group(
        codelet(lambda x: x[::-1], [F32]),
        [cut("i", 16, 3)],
        [Access(dilated, (element(0, -1, 15),)), Access(turned, (element(0),))],
        7,
    )
    x = numbers(6)
    body = Sequence(execute(graph, spreading), execute(graph, picking, turning))
    wide, thin, back = run(graph, body, [(a, x)], [dilated, strided, turned])
    expected = np.full(16, -1, F32)
    expected[2::3] = x[:5]
    np.testing.assert_array_equal(wide, expected)
    np.testing.assert_array_equal(thin, expected[::2])
    np.testing.assert_array_equal(back, expected[::-1])


def test_broadcast_operand_partial_grid_and_concat():
    graph = Graph(machine(4))
    a = spread(graph, (3, 8), name="a")
    b = spread(graph, (2, 8), name="b")
    bias = spread(graph, (5,), name="bias")
    out = spread(graph, (5, 8), name="out")
    accesses = [
        Access(concat([a, b], 0), (element(0), element(1))),
        Access(bias, (element(0),)),
        Access(out, (element(0), element(1))),
    ]
    full = group(codelet(lambda x, y: x + y[:, None], [F32, F32]), [cut("i", 5, 5), cut("j", 8, 2)], accesses, 4)
    upper = full.tile.copy()
    lower = full.tile.copy()
    upper[::2] = -1
    lower[1::2] = -1
    halves = [dataclasses.replace(full, tile=tile) for tile in (upper, lower)]
    x = numbers(3, 8)
    y = numbers(2, 8, seed=2)
    z = numbers(5, seed=3)
    (got,) = run(graph, execute(graph, *halves), [(a, x), (b, y), (bias, z)], [out])
    np.testing.assert_array_equal(got, np.concatenate([x, y]) + z[:, None])


def test_squeezed_dimension_out_of_the_tensor_reads_fill():
    graph = Graph(machine(4))
    a = spread(graph, (2, 6), name="a")
    out = spread(graph, (3, 6), name="out")
    axes = [Axis("row", np.arange(4)), cut("j", 6, 2)]
    accesses = [Access(a, (block(0), element(1)), 5.0), Access(out, (block(0), element(1)))]
    x = numbers(2, 6)
    body = execute(graph, group(codelet(lambda v: v + 1, [F32]), axes, accesses, 4))
    np.testing.assert_array_equal(run(graph, body, [(a, x)], [out])[0], np.vstack([x, np.full((1, 6), 5, F32)]) + 1)


def test_origins_and_shapes():
    graph = Graph(machine(4))
    out = spread(graph, (11,), I32, name="out")
    code = codelet(lambda origins, shapes: origins[0] + jnp.arange(shapes[0][0]), [], [I32], ("origins", "shapes"))
    body = execute(graph, group(code, [cut("i", 11, 3)], [Access(out, (element(0),))], 4, origins=("i",)))
    np.testing.assert_array_equal(run(graph, body, [], [out])[0], np.arange(11))


def bump(graph, counter):
    """A compute set that adds one to a scalar."""
    code = codelet(lambda x: x + 1, [[I32]], [])
    return execute(graph, group(code, [], [Access(counter, ())], graph.target.num_tiles))


def test_repeat_updates_a_buffer_in_place():
    graph = Graph(machine(4))
    buffer = spread(graph, (5, 6), name="buffer")
    counter = spread(graph, (), I32, "counter")
    code = codelet(lambda buffer, i: buffer.at[i].set(i.astype(F32)), [[F32], I32], [])
    axes = [cut("slot", 5, 1), cut("j", 6, 3)]
    store = group(code, axes, [Access(buffer, (element(0), element(1))), Access(counter, ())], 4)
    body = Repeat(4, Sequence(execute(graph, store), bump(graph, counter)))
    got, count = run(graph, body, [(buffer, np.full((5, 6), 9, F32)), (counter, np.int32(0))], [buffer, counter])
    np.testing.assert_array_equal(got[:, 0], [0, 1, 2, 3, 9])
    np.testing.assert_array_equal(got, np.repeat(got[:, :1], 6, 1))
    assert count == 4


def test_while_if_switch_call_and_empty_repeat():
    graph = Graph(machine(4))
    counter = spread(graph, (), I32, "counter")
    settings = spread(graph, (), BOOL, "more")
    taken = spread(graph, (4,), I32, "taken")

    def mark(slot):
        constant = graph.add_constant(np.asarray([slot + 10], I32), mapping=on_one_tile(1, 3))
        return Copy(constant, taken[slot : slot + 1])

    less = codelet(lambda x: x < 5, [I32], [BOOL])
    test = execute(graph, group(less, [], [Access(counter, ()), Access(settings, ())], 4))
    twice = Function(Sequence(bump(graph, counter), bump(graph, counter)))
    body = Sequence(
        RepeatWhile(test, settings, Call(twice)),
        Repeat(0, bump(graph, counter)),
        If(settings, mark(0), mark(1)),
        Switch(counter, (mark(0), mark(0)), mark(2)),
        Switch(taken[0], (mark(0), mark(3)), mark(0)),
    )
    start = np.asarray([1, 0, 0, 0], I32)
    got, count = run(graph, body, [(counter, np.int32(0)), (taken, start)], [taken, counter])
    np.testing.assert_array_equal(got, [1, 11, 12, 13])
    assert count == 6


def test_copy_of_a_transposed_view():
    graph = Graph(machine(7))
    a = spread(graph, (5, 9), name="a")
    out = spread(graph, (9, 5), name="out")
    x = numbers(5, 9)
    (got,) = run(graph, Copy(a.transpose((1, 0)), out), [(a, x)], [out])
    np.testing.assert_array_equal(got, x.T)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.int8, np.bool_, np.uint32])
def test_dtypes(dtype):
    graph = Graph(machine(4))
    dtype = np.dtype(dtype)
    a = spread(graph, (33,), dtype, "a")
    out = spread(graph, (33,), dtype, "out")
    x = (np.arange(33) % 2).astype(dtype)
    (got,) = run(graph, unary(graph, lambda v: v[::-1][::-1], a, out), [(a, x)], [out])
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys(impl):
    graph = Graph(machine(4))
    keys = jax.random.split(jax.random.key(3, impl=impl), 6)
    a = graph.add_variable((6,), keys.dtype, "a", grid((6,), (4,)))
    b = graph.add_variable((6,), keys.dtype, "b", grid((6,), (2,), 1))
    out = spread(graph, (6, 3), name="out")
    draw = codelet(lambda k: jax.random.normal(k[0], (1, 3)), [keys.dtype])
    axes = [cut("i", 6, 6), cut("j", 3, 1)]
    accesses = [Access(b, (element(0),)), Access(out, (element(0), element(1)))]
    body = Sequence(unary(graph, lambda k: k[::-1][::-1], a, b), execute(graph, group(draw, axes, accesses, 4)))
    got, drawn = run(graph, body, [(a, keys)], [b, out])
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))
    expected = [jax.random.normal(key, (3,)) for key in keys]
    np.testing.assert_allclose(drawn, expected, rtol=1e-6)
    assert from_raw(to_raw(keys), keys.dtype).dtype == keys.dtype


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_zero_size(shape):
    graph = Graph(machine(4))
    a = spread(graph, shape, name="a")
    out = spread(graph, shape, name="out")
    axes = [cut(f"i{axis}", n, 2) for axis, n in enumerate(shape)]
    dims = tuple(element(axis) for axis in range(len(shape)))
    body = execute(graph, group(codelet(lambda x: x, [F32]), axes, [Access(a, dims), Access(out, dims)], 4))
    assert run(graph, body, [(a, np.zeros(shape, F32))], [out])[0].shape == shape


def test_the_order_of_vertices_does_not_matter():
    graph = Graph(machine(4))
    a = spread(graph, (64,), name="a")
    out = spread(graph, (64,), name="out")
    body = unary(graph, jnp.sin, a, out, 16)
    x = numbers(64)
    first, second = (run(graph, body, [(a, x)], [out], seed=seed)[0] for seed in (0, 1))
    np.testing.assert_array_equal(first, second)


def test_memory_away_from_home_is_poisoned():
    graph = Graph(machine(2))
    (variable,) = graph.add_variable((3,), F32, "v", on_one_tile(3, 0)).variables()
    memory = TileMemory(graph, [variable])
    actor = Actor("test")
    elements = np.arange(3)
    memory.write(0, variable, elements, np.ones(3, F32))
    zeros = np.zeros(3, int)
    ones = np.ones(3, int)
    memory.deliver(Messages((variable,), zeros, elements, zeros, ones), actor, to_home=False)
    np.testing.assert_array_equal(memory.read(1, variable, elements, actor), 1)
    memory.retire()
    np.testing.assert_array_equal(memory.read(0, variable, elements, actor), 1)
    with pytest.raises(InterpreterError, match=r"\[not-delivered\] test reads, undelivered, .*v: float32\[3\]\)\[0\]"):
        memory.read(1, variable, elements, actor)
    np.testing.assert_array_equal(memory.contents(variable), [[1] * 3, [np.nan] * 3])


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.int32, np.bool_, jax.random.key(0).dtype])
def test_poison_is_of_the_dtype(dtype):
    bad = from_raw(raw_empty(dtype, (2,)), dtype)
    assert bad.dtype == dtype and bad.shape == (2,)
    if jnp.issubdtype(dtype, jnp.inexact):
        assert jnp.isnan(bad).all()


def test_undefined_on_purpose_may_be_read_and_is_poison():
    graph = Graph(machine(4))
    a = spread(graph, (4,), name="a")
    (got,) = run(graph, Sequence(WriteUndef(a), Copy(a[2:], a[:2])), [(a, numbers(4))], [a])
    assert np.isnan(got).all()


# --- refusals ---------------------------------------------------------------------------------------------------------


def kept(moved, keep):
    """Some of the messages."""
    return Messages(moved.variables, *(column[keep] for column in moved[1:]))


def forgetful(keep, lossy):
    """An exchange plan that keeps only some of the operands, or of the results."""

    def exchange(graph, vertices, number, results):
        moved = list_messages(graph, vertices, number, results)
        return kept(moved, keep) if results is lossy else moved

    return exchange


@pytest.mark.parametrize("keep", [slice(0), slice(1, None)])
@pytest.mark.parametrize("results", [False, True])
def test_undelivered_elements_are_refused(keep, results):
    graph = Graph(machine(7))
    a = spread(graph, (70,), name="a")
    out = spread(graph, (70,), name="out")
    body = unary(graph, jnp.sin, a, out, 7)
    with pytest.raises(InterpreterError, match=r"\[not-delivered\].*(on tile \d.*a|away from its owner.*out)"):
        run(graph, body, [(a, numbers(70))], [out], exchange=forgetful(keep, results))


def test_an_exchange_from_the_wrong_tile_is_refused():
    graph = Graph(machine(4))
    a = spread(graph, (70,), name="a")
    out = spread(graph, (70,), name="out")

    def exchange(graph, vertices, number, results):
        moved = list_messages(graph, vertices, number, results)
        return moved if results else moved._replace(source=(moved.source + 1) % 4)

    with pytest.raises(InterpreterError, match=r"\[not-delivered\] cs exchanges from or to the wrong tile"):
        run(graph, unary(graph, jnp.sin, a, out, 4), [(a, numbers(70))], [out], exchange=exchange)


def test_delivered_copies_do_not_outlive_the_compute_set():
    graph = Graph(machine(4))
    a = graph.add_variable((4,), F32, "a", on_one_tile(4, 0))
    out = graph.add_variable((4,), F32, "out", on_one_tile(4, 1))
    body = unary(graph, jnp.sin, a, out, 1, seed=0)
    calls = []
    nothing = forgetful(slice(0), False)

    def once(graph, vertices, number, results):
        calls.append(number)
        return (
            list_messages(graph, vertices, number, results)
            if len(calls) < 3
            else nothing(graph, vertices, number, results)
        )

    compute_set = body.compute_set
    graph.groups[compute_set] = [dataclasses.replace(graph.groups[compute_set][0], tile=np.array([1], np.int32))]
    with pytest.raises(InterpreterError, match=r"\[not-delivered\] vertex \[0\] .* on tile 1 .*a: float32\[4\]\)\[0\]"):
        run(graph, Sequence(body, body), [(a, numbers(4))], [out], exchange=once)


def test_undefined_reads_are_refused():
    graph = Graph(machine(4))
    a = spread(graph, (40,), name="a")
    out = spread(graph, (40,), name="out")
    body = unary(graph, jnp.sin, a, out)
    with pytest.raises(InterpreterError, match=r"\[undefined-read\] vertex .*a: float32\[40\]\)\[39\]"):
        run(graph, body, [(a[:39], numbers(39))], [out])
    with pytest.raises(InterpreterError, match=r"\[undefined-read\] StreamOut"):
        run(graph, Sequence(), [], [a])


def test_races_are_refused():
    graph = Graph(machine(4))
    a = spread(graph, (40,), name="a")
    out = spread(graph, (40,), name="out")
    twice = [cut("i", 40, 4), cut("again", 2, 2)]
    accesses = [Access(a, (element(0),)), Access(out, (element(0),))]
    body = execute(graph, group(codelet(lambda x: x, [F32]), twice, accesses, 4))
    with pytest.raises(InterpreterError, match=r"\[write-race\]"):
        run(graph, body, [(a, numbers(40))], [out])
    shifted = [Access(a, (element(0),)), Access(concat([a[1:], out[:1]]), (element(0),))]
    body = execute(graph, group(codelet(lambda x: x, [F32]), [cut("i", 40, 4)], shifted, 4))
    for seed in range(3):
        with pytest.raises(InterpreterError, match=r"\[read-write-race\]"):
            run(graph, body, [(a, numbers(40))], [out], seed=seed)


def test_a_vertex_may_write_elements_that_no_other_reads():
    graph = Graph(machine(4))
    a = spread(graph, (40,), name="a")
    x = numbers(40)
    (got,) = run(graph, unary(graph, lambda v: v + 1, a, a, 4), [(a, x)], [a])
    np.testing.assert_array_equal(got, x + 1)


def test_wrong_results_of_codelets_are_refused():
    graph = Graph(machine(4))
    a = spread(graph, (40,), name="a")
    out = spread(graph, (40,), name="out")
    for wrong in (lambda x: x[1:], lambda x: x.astype(jnp.int32)):
        with pytest.raises(InterpreterError, match=r"(?s)\[type-mismatch\].*expected: float32\[13\]|float32\[14\]"):
            run(graph, unary(graph, wrong, a, out), [(a, numbers(40))], [out])


def test_reads_and_writes_out_of_the_tensor_are_refused():
    graph = Graph(machine(4))
    a = spread(graph, (40,), name="a")
    out = spread(graph, (40,), name="out")
    code = codelet(lambda x: x, [F32])
    axis = cut("i", 40, 3)
    for reads, writes in ((1, 0), (0, 1)):
        accesses = [Access(a, (element(0, 1, reads),)), Access(out, (element(0, 1, writes),))]
        body = execute(graph, group(code, [axis], accesses, 4))
        with pytest.raises(InterpreterError, match=r"\[out-of-tensor\]|\[type-mismatch\]"):
            run(graph, body, [(a, numbers(40))], [out])


def test_constants_and_broadcasts_are_read_only():
    graph = Graph(machine(4))
    a = spread(graph, (), name="a")
    constant = graph.add_constant(np.float32(1), "one", on_one_tile(1, 2))
    with pytest.raises(InterpreterError, match=r"\[read-only-output\]"):
        run(graph, Copy(a, constant), [(a, np.float32(2))], [a])
    wide = a.broadcast_in_dim((3,), ())
    source = spread(graph, (3,))
    with pytest.raises(InterpreterError, match=r"\[read-only-output\]"):
        run(graph, Copy(source, wide), [(source, numbers(3))], [a])


def test_inputs_and_targets_are_checked():
    graph = Graph(machine(4))
    a = spread(graph, (3,))
    stream = HostStream("x", (3,), F32)
    program = StreamIn(stream, a)
    with pytest.raises(ArgumentError, match="no value for input stream x"):
        interpret(graph, program, {})
    with pytest.raises(ArgumentError, match=r"(?s)the wrong type.*float32\[3\].*float64\[3\]"):
        interpret(graph, program, {stream: np.zeros(3)})
    with pytest.raises(ArgumentError, match="small targets"):
        interpret(Graph(machine(65)), program, {stream: np.zeros(3, F32)})
