"""Values that operations hand on: bytes by writer and reader, through functions, loops and values that are joined."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.profile.handed_values import NO_PLACE
from ipujax.runtime.views import graph_view
from ipujax.runtime.views.graph_view import MAX_CHILDREN

ROWS, WIDTH, LAYERS = 32, 32, 6


def profile(fun, *shapes, **settings):
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return ipu.jit(fun, device=ipu.IPUModel(tiles_per_ipu=16), **settings).profile(*args)


def pairs(figures, key=lambda row: row.name.partition("/")[0]):
    """Bytes by writer and reader; a product and the sum of its partial results have one name."""
    values, rows = figures.handed_values, figures.step_costs
    columns = zip(values.writer.tolist(), values.reader.tolist(), values.num_bytes.tolist(), strict=True)
    return {(key(rows[writer]), key(rows[reader])): num_bytes for writer, reader, num_bytes in columns}


def test_an_operation_reads_what_another_has_written():
    handed = pairs(profile(lambda x, w: jnp.sort(x @ w, axis=1), (ROWS, WIDTH), (WIDTH, WIDTH)))
    assert handed["x", "dot_general"] == handed["w", "dot_general"] == 4 * ROWS * WIDTH
    assert ("x", "sort") not in handed and handed["dot_general", "sort"] == 4 * ROWS * WIDTH


def test_a_joined_value_is_read_from_all_that_wrote_parts_of_it():
    def joined(x, w):
        return jnp.cumsum(jnp.concatenate([jnp.sort(x, axis=0), x @ w]), axis=0)

    handed = pairs(profile(joined, (ROWS, WIDTH), (WIDTH, WIDTH)))
    into = {writer: num_bytes for (writer, reader), num_bytes in handed.items() if reader.startswith("cumsum")}
    assert sum(into.values()) >= 2 * 4 * ROWS * WIDTH


def layers(ws, x):
    for number, w in enumerate(ws):
        with jax.named_scope(f"layer{number}"):
            x = jnp.tanh(x @ w) + x
    return x


@pytest.fixture(scope="module")
def stack():
    """Layers that are lowered once, as a function."""
    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS
    fun = ipu.jit(lambda ws, x: layers(ws, x), device=ipu.IPUModel(tiles_per_ipu=16))
    lowered = fun.lower(ws, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))
    return lowered.compile().profile


def test_layers_of_a_function_hand_on_to_the_next_alone(stack):
    names = [f"layer{number}" for number in range(LAYERS)]
    of_layers = {pair for pair in pairs(stack, lambda row: row.origin.layer) if set(pair) <= set(names)}
    assert {pair for pair in of_layers if pair[0] != pair[1]} == set(pairwise(names))


def test_operations_have_the_places_in_which_they_first_run(stack):
    place = stack.handed_values.place
    known = place[place != NO_PLACE]
    assert sorted(known) == list(range(len(known)))
    first = {row.origin.layer: int(place[n]) for n, row in reversed([*enumerate(stack.step_costs)]) if place[n] >= 0}
    layers_in_order = sorted((name for name in first if name.startswith("layer")), key=first.__getitem__)
    assert layers_in_order == [f"layer{number}" for number in range(LAYERS)]


def test_what_a_loop_hands_on_inside_is_counted_once():
    def repeated(x, w):
        return jax.lax.fori_loop(0, 50, lambda _, x: jnp.sort(x @ w, axis=1), x)

    handed = pairs(profile(repeated, (ROWS, WIDTH), (WIDTH, WIDTH)))
    assert handed["dot_general", "sort"] == 4 * ROWS * WIDTH


def test_the_graph_has_each_operation_once_and_few_nodes_in_each():
    def many(x):
        for number in range(40):
            with jax.named_scope(f"layer{number}"):
                x = jax.lax.optimization_barrier(jnp.sin(x))
        return x

    figures = profile(many, (ROWS, WIDTH))
    view = graph_view(figures)
    seen = []
    nodes = [view.root]
    while nodes:
        node = nodes.pop()
        assert len(node.children) <= MAX_CHILDREN
        assert not node.children or sorted(node.rows) == sorted(r for child in node.children for r in child.rows)
        seen += [] if node.children else node.rows
        nodes += node.children
    with_cycles = {number for number, row in enumerate(figures.step_costs) if row.cycles}
    assert len(seen) == len(set(seen)) and with_cycles <= set(seen)
    assert [child.name for child in view.root.children] == ["x … layer11", "layer12 … layer25", "layer26 … out0"]


def test_saved_profiles_have_the_same_values(stack, tmp_path):
    stack.save(tmp_path / "stack.profile")
    values = ipu.Profile.load(tmp_path / "stack.profile").handed_values
    for name in ("writer", "reader", "num_bytes", "place"):
        assert np.array_equal(getattr(values, name), getattr(stack.handed_values, name))
