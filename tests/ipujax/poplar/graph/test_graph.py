"""Hand-written graphs: variables, tile mapping by slices, clones, initial values, and names for the host.

The oracle of a tile mapping is an array of the tile of every element, kept by plain numpy indexing.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ipujax import poplar
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.runtime.compile import compile
from ipujax.runtime.errors import GraphError, MappingError, TargetError, VerifyError
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph as RuntimeGraph
from ipujax.runtime.graph.program import Copy, Execute, Sequence
from ipujax.runtime.target.presets import preset
from ipujax.runtime.target.target import Target
from ipujax.runtime.tensor.mapping import Flat, owners
from ipujax.runtime.tensor.tensor import Tensor
from tests.ipujax.poplar.helpers import TILES, run_both, small_graph


def add(graph: poplar.Graph, a: Tensor, b: Tensor, prog: Sequence) -> Tensor:
    """An operation of the libraries."""
    return elementwise(Builder(graph, prog, "add"), Op("add", jnp.add, a.dtype), [a, b])


# --- variables --------------------------------------------------------------------------------------------------------


def test_variables_accept_the_argument_orders_of_poplar_and_of_the_runtime():
    graph = small_graph()
    v1 = graph.add_variable(poplar.FLOAT, [4, 2], "v1")
    v2 = graph.add_variable((4, 2), poplar.HALF, "v2")
    assert (v1.shape, v1.dtype, v2.shape, v2.dtype) == ((4, 2), np.float32, (4, 2), np.float16)
    assert v1.variables()[0].origin.line.startswith("test_graph.py:")
    assert isinstance(graph, RuntimeGraph)


def test_constants_hold_their_values():
    graph = small_graph()
    c1 = graph.add_constant(poplar.FLOAT, [4], [1.0, 1.5, 2.0, 2.5], "c1")
    c2 = graph.add_constant(poplar.INT, [2, 3], 7, "c2")
    c3 = graph.add_constant(np.arange(3), "c3")
    values = [t.variables()[0].value for t in (c1, c2, c3)]
    np.testing.assert_array_equal(values[0], np.float32([1.0, 1.5, 2.0, 2.5]))
    np.testing.assert_array_equal(values[1], np.full((2, 3), 7, np.int32))
    np.testing.assert_array_equal(values[2], np.arange(3))
    with pytest.raises(GraphError, match=r"values of constant c4[\s\S]*expected: 4 or one[\s\S]*got: 3"):
        graph.add_constant(poplar.FLOAT, [4], [1, 2, 3], "c4")


@pytest.mark.parametrize("bad", [("float", 3.5), (poplar.FLOAT, [-1])])
def test_refuses_a_non_type_or_non_shape(bad):
    with pytest.raises(GraphError, match=r"test_graph.py:"):
        small_graph().add_variable(*bad, "v")


def test_a_clone_has_the_mapping_of_its_tensor():
    graph = small_graph()
    v = graph.add_variable(poplar.FLOAT, [4, 2], "v")
    for i in range(4):
        graph.set_tile_mapping(v[i], i)
    copy = graph.clone(v.transpose()[:, 1:])
    assert copy.shape == (2, 3) and copy.variables()[0] is not v.variables()[0]
    np.testing.assert_array_equal(owners(graph.mappings[copy.variables()[0]]), [1, 2, 3, 1, 2, 3])
    with pytest.raises(MappingError, match="is mapped to no tile"):
        graph.clone(graph.add_variable(poplar.INT, [2], "nowhere"))


def test_initial_values_of_slices_add_up():
    graph = small_graph()
    v = graph.add_variable(poplar.INT, [2, 3], "v")
    graph.set_initial_value(v[0], [1, 2, 3])
    graph.set_initial_value(v[1, ::-1], [4, 5, 6])
    np.testing.assert_array_equal(graph.initial_values[v.variables()[0]], [[1, 2, 3], [6, 5, 4]])
    with pytest.raises(GraphError, match="expected: 3 or one"):
        graph.set_initial_value(v[0], [1, 2])
    with pytest.raises(GraphError, match="is a constant"):
        graph.set_initial_value(graph.add_constant(poplar.INT, [1], 3), 4)


# --- tile mapping -----------------------------------------------------------------------------------------------------


def test_a_variable_is_mapped_once_all_of_its_elements_are():
    graph = small_graph()
    v = graph.add_variable(poplar.FLOAT, [4], "v")
    variable = v.variables()[0]
    for i in range(3):
        graph.set_tile_mapping(v[i], i)
        assert not graph.is_mapped(v) and variable not in graph.mappings
    graph.set_tile_mapping(v[3], 3)
    assert isinstance(graph.mappings[variable], Flat)
    np.testing.assert_array_equal(owners(graph.mappings[variable]), [0, 1, 2, 3])
    graph.set_tile_mapping(v[1:3], 7)
    np.testing.assert_array_equal(owners(graph.mappings[variable]), [0, 7, 7, 3])
    assert dict(graph.mappings)[variable] is graph.mappings[variable]


@settings(max_examples=60)
@given(st.data())
def test_mapping_by_slices_equals_numpy_assignment(data):
    graph = small_graph()
    shape = (3, 4, 2)
    v = graph.add_variable(poplar.FLOAT, shape, "v")
    expected = np.full(shape, 5)
    graph.set_tile_mapping(v, 5)
    for _ in range(data.draw(st.integers(1, 5))):
        cut = tuple(
            slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))), data.draw(st.integers(1, 2)))
            for n in shape
        )
        tile = data.draw(st.integers(0, TILES - 1))
        perm = data.draw(st.permutations(range(3)))
        graph.set_tile_mapping(v[cut].transpose(perm), tile)
        expected[cut] = tile
    np.testing.assert_array_equal(owners(graph.mappings[v.variables()[0]]), expected.reshape(-1))
    intervals = graph.get_tile_mapping(v)
    back = np.full(v.size, -1)
    for tile, tile_intervals in enumerate(intervals):
        for begin, end in tile_intervals:
            assert np.all(back[begin:end] == -1)
            back[begin:end] = tile
    np.testing.assert_array_equal(back, expected.reshape(-1))
    other = graph.add_variable(poplar.FLOAT, shape, "other")
    graph.set_tile_mapping(other, intervals)
    assert graph.get_tile_mapping(other) == intervals


def test_a_tensor_of_several_variables_is_mapped_with_a_tile_for_each_element():
    graph = small_graph()
    a, b = (graph.add_variable(poplar.FLOAT, [3], name) for name in "ab")
    graph.set_tile_mapping(poplar.concat([a, b.reverse(0)]), np.array([0, 1, 2, 3, 4, 5]))
    assert graph.get_tile_mapping(b)[:6] == [[], [], [], [(2, 3)], [(1, 2)], [(0, 1)]]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (8, r"tile the target lacks[\s\S]*0 … 7[\s\S]*got: 8"),
        (-1, r"tile the target lacks[\s\S]*got: -1"),
        ([[(0, 3)]], "leaves element 3 out"),
        ([[(0, 3)], [(2, 4)]], r"maps element 2 twice[\s\S]*tile 0 and \(2, 4\) on tile 1"),
        ([[(0, 5)]], "outside of the tensor"),
        ([[]] * 9, "names tiles the target lacks"),
        (np.array([0, 1]), r"expected: 4 tiles[\s\S]*got: 2"),
    ],
)
def test_bad_mappings_name_the_tensor_and_the_line(mapping, message):
    graph = small_graph()
    v = graph.add_variable(poplar.FLOAT, [4], "precious")
    with pytest.raises(MappingError, match=message) as caught:
        graph.set_tile_mapping(v, mapping)
    assert "precious" in str(caught.value) and "test_graph.py:" in str(caught.value.where)


def test_refuses_an_unmapped_variable_by_name_and_line():
    graph = small_graph()
    v, w = (graph.add_variable(poplar.FLOAT, [4], name) for name in ("v", "w"))
    graph.set_tile_mapping(v, 0)
    graph.set_tile_mapping(w[:3], 0)
    with pytest.raises(VerifyError, match=r"unmapped-variable.*w: float32"):
        run_both(graph, Sequence(Copy(v, w)), {v: np.ones(4)}, [w])
    with pytest.raises(GraphError, match=r"operand Variable\(w: float32\[4\]\) is mapped in part: element 3 of it has"):
        add(graph, v, w, Sequence())


def test_library_operations_accept_the_graph():
    graph = small_graph()
    prog = Sequence()
    v, w = (graph.add_variable(poplar.FLOAT, [40], name) for name in ("v", "w"))
    for i in range(8):
        graph.set_tile_mapping(v[i * 5 : i * 5 + 5], i)
    graph.set_tile_mapping(w, 3)
    total = add(graph, v, w, prog)
    x = np.arange(40.0, dtype=np.float32)
    y = np.ones(40, np.float32)
    (got,) = run_both(graph, prog, {v: x, w: y}, [total])
    np.testing.assert_array_equal(got, x + y)


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_views_have_the_names_of_poplar():
    graph = small_graph()
    v = graph.add_variable(poplar.FLOAT, [3, 4], "v")
    x = np.arange(12).reshape(3, 4)
    same = {
        v.slice(1, 3): x[1:3],
        v.slice(1, 3, axis=1): x[:, 1:3],
        v.slice([0, 1], [2, 4]): x[0:2, 1:4],
        v.broadcast(2, 0): np.tile(x, (2, 1)),
        v.broadcast(3, 1): np.tile(x, (1, 3)),
        v.expand([0, 2, 2]): x.reshape(1, 3, 4, 1, 1),
        v.dim_shuffle([1, 0]): x.T,
        v.sub_sample(2, 1): x[:, ::2],
        v.reverse(0): x[::-1],
        v.flatten(): x.reshape(-1),
        poplar.concat([v, v], 1): np.concatenate([x, x], 1),
    }
    for view, expected in same.items():
        np.testing.assert_array_equal(np.broadcast_to(view.flat_indices()[1], view.shape), expected)
    assert (v.rank(), v.dim(1), v.num_elements(), v.element_type()) == (2, 4, 12, poplar.FLOAT)


# --- names for the host -----------------------------------------------------------------------------------------------


def test_names_of_handles_streams_and_remote_buffers_are_unique():
    graph = small_graph()
    v = graph.add_variable(poplar.FLOAT, [4], "v")
    graph.create_host_write("v-write", v)
    graph.create_host_read("v-read", v)
    into = graph.add_host_to_device_fifo("in", poplar.FLOAT, 30)
    out = graph.add_device_to_host_fifo("out", poplar.INT, 30)
    remote = graph.add_remote_buffer("far", poplar.HALF, 10, repeats=3)
    assert graph.host_writes == {"v-write": v} and graph.host_reads == {"v-read": v}
    assert graph.streams == {"in": into, "out": out} and into.direction == "host_to_device" and out.num_bytes == 120
    assert graph.remote_buffers == {"far": remote} and (remote.num_elements, remote.repeats) == (10, 3)
    for duplicate in (
        lambda: graph.create_host_write("v-write", v),
        lambda: graph.add_device_to_host_fifo("in", poplar.FLOAT, 1),
        lambda: graph.add_remote_buffer("far", poplar.HALF, 1),
    ):
        with pytest.raises(GraphError, match=r"two .* handles are called"):
            duplicate()


# --- devices ----------------------------------------------------------------------------------------------------------


def test_a_model_makes_a_device_with_the_getters_of_a_target():
    device = poplar.IPUModel("ipu1", num_ipus=2).create_device()
    target = device.get_target()
    assert isinstance(target, Target) and target == poplar.Target.of(preset("mk1", 2))
    assert (target.get_num_ipus(), target.get_tiles_per_ipu(), target.get_num_tiles()) == (2, 1216, 2432)
    assert (target.get_num_worker_contexts(), target.get_exchange_bytes_per_cycle()) == (6, 4)
    assert (target.get_vector_width(poplar.HALF), target.get_data_path_width()) == (4, 64)
    assert (target.get_bytes_per_tile(), target.get_tile_clock_frequency()) == (256 * 1024, 1.6e9)
    assert target.replace(tiles_per_ipu=4).get_num_tiles() == 8
    assert (device.attach(), device.attach(), device.is_attached) == (True, False, True)
    device.detach()
    assert device.attach()


def test_the_manager_lists_a_device_of_each_preset():
    manager = poplar.DeviceManager()
    assert [d.get_target().get_target_arch_string() for d in manager.get_devices()] == ["mk1", "mk2", "bow"]
    assert manager.get_device(2).get_id() == 2 and manager.get_num_devices() == 3
    with pytest.raises(TargetError, match="no device 3"):
        manager.get_device(3)
    with pytest.raises(TargetError, match="no IPU 'ipu3'"):
        poplar.IPUModel("ipu3").create_device()


def test_the_cpu_is_one_tile_with_one_worker():
    device = poplar.Device.create_cpu_device()
    target = device.get_target()
    assert (target.get_num_tiles(), target.get_num_worker_contexts(), target.get_target_type()) == (1, 1, "CPU")
    graph = poplar.Graph(device)
    v, w = (graph.add_variable(poplar.FLOAT, [4], name) for name in "vw")
    for tensor in (v, w):
        graph.set_tile_mapping(tensor, 0)
    (got,) = run_both(graph, Sequence(Copy(v, w)), {v: np.ones(4)}, [w])
    np.testing.assert_array_equal(got, jnp.ones(4))


def test_refuses_compute_sets_of_another_graph():
    graph = small_graph()
    other = small_graph()
    stranger = other.add_compute_set("stranger")
    with pytest.raises(GraphError, match="compute set stranger is not of this graph"):
        graph.add_vertex(stranger, "Any")
    with pytest.raises(VerifyError, match="unknown-compute-set"):
        compile(graph, Sequence(Execute(stranger)))
