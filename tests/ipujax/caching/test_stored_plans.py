"""Plans and costs on disk: taken by other programs, equal to computed ones, never from damaged or foreign files."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.poplin.vertex_kinds import KINDS
from ipujax.poplar import FLOAT, Input, Output, Vector, Vertex
from ipujax.runtime.tensor import flat_mapping
from ipujax.storage import PLAN, CacheDirectory, DamagedError
from ipujax.storage.stored_values import StoredValues
from ipujax.storage.value_data import NoDataError, value_data, value_of_data

LAYERS = 4
WIDTH = 24
X = jnp.ones((16, WIDTH))
WEIGHTS = [jnp.eye(WIDTH) * (n + 1) for n in range(LAYERS)]


def loss(weights: list[jax.Array], x: jax.Array, changed: int | None) -> jax.Array:
    for n, w in enumerate(weights):
        x = jnp.tanh(jax.nn.softmax(x @ w) + (jnp.sin(x) if n == changed else x))
    return x.sum()


def compiled(changed: int | None, folder: Path | str) -> ipu.Compiled:
    """Compile as in another process: with empty caches."""
    ipu.clear_caches()
    step = ipu.jit(
        lambda weights: jax.value_and_grad(loss)(weights, X, changed),
        device=ipu.IPUModel(tiles_per_ipu=16),
        options=ipu.Options(cache_dir=folder),
    )
    return step.lower(WEIGHTS).compile()


def without_seconds(program: ipu.Compiled) -> dict[str, Any]:
    """Graph profile without the seconds of its compilation."""
    return {key: value for key, value in program.profile.graph().items() if key != "optimizationInfo"}


@pytest.fixture
def computed(monkeypatch) -> Counter[str]:
    """Number of values that were computed, by function."""
    counts = Counter[str]()
    recall = StoredValues.recall

    def counted(self: StoredValues, key: Any, compute: Any) -> Any:
        def compute_counted() -> Any:
            counts[getattr(key[0], "__qualname__", key[0])] += 1
            return compute()

        return recall(self, key, compute_counted)

    monkeypatch.setattr(StoredValues, "recall", counted)
    return counts


def test_a_changed_layer_is_planned_alone(tmp_path, computed):
    compiled(None, tmp_path)
    assert min(computed["plan_convolution"], computed["_choose_plan"], computed["compute set"]) > 0
    computed.clear()
    changed = compiled(2, tmp_path)
    of_changed = computed.copy()
    compiled(2, tmp_path / "empty")
    of_all = computed - of_changed
    assert of_changed["plan_convolution"] == 0 and of_changed["_choose_plan"] < of_all["_choose_plan"]
    assert 0 < of_changed["compute set"] < of_all["compute set"]
    reference = compiled(2, "")
    assert changed.profile.summary() == reference.profile.summary()
    assert without_seconds(changed) == without_seconds(reference)
    np.testing.assert_array_equal(changed(WEIGHTS)[0], reference(WEIGHTS)[0])


def test_plans_of_all_programs_outlive_the_process(tmp_path, computed):
    compiled(2, tmp_path)
    for path in tmp_path.glob("*-program.ipujax"):
        path.unlink()
    computed.clear()
    compiled(2, tmp_path)
    assert not computed


def test_graph_of_a_program_in_the_cache_is_lowered_with_plans(tmp_path, computed):
    compiled(2, tmp_path)
    program = compiled(2, tmp_path)
    computed.clear()
    assert program.executable.graph.groups
    assert not computed


def test_plans_of_a_program_that_does_not_fit_are_stored(tmp_path, computed):
    def planned(size: int) -> Counter[str]:
        ipu.clear_caches()
        computed.clear()
        function = ipu.jit(
            lambda x: jnp.tanh(x @ x.T).sum(),
            device=ipu.IPUModel(tiles_per_ipu=2, bytes_per_tile=32 << 10),
            options=ipu.Options(cache_dir=tmp_path, byte_cost=0.0),
        )
        with pytest.raises(ipu.TileMemoryError):
            function.lower(jnp.ones((size, size))).compile()
        return computed.copy()

    first = planned(256)
    assert first["plan_convolution"] > 0 and not planned(256)


def test_damaged_plans_are_computed(tmp_path, caplog):
    profile = compiled(None, tmp_path).profile.summary()
    chance = random.Random(0)
    for path in tmp_path.iterdir():
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1
        path.write_bytes(content)
    assert compiled(None, tmp_path).profile.summary() == profile
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "is damaged" in warnings[0]


@pytest.mark.parametrize(
    "sections", [{"data": b'{"type": ["os", "stat_result"], "fields": []}'}, {"data": b"{"}, {"arrays": b""}]
)
def test_sealed_data_of_another_form_are_computed(tmp_path, sections):
    """A file with a valid checksum whose content is no value of ipujax."""
    profile = compiled(None, tmp_path).profile.summary()
    directory = CacheDirectory(str(tmp_path))
    for path in tmp_path.glob(f"*-{PLAN}.ipujax"):
        head, _ = directory.read(path.stem.partition("-")[0], PLAN)
        directory.write((head, {"arrays": value_data(())[1], **sections}))
    for path in tmp_path.glob("*-pro*.ipujax"):
        path.unlink()
    assert compiled(None, tmp_path).profile.summary() == profile


def codelet_of(vertex_cycles: int) -> type[Vertex]:
    """Codelet of one name, whatever its vertices cost."""

    class Doubled(Vertex):
        x: Input[Vector[FLOAT]]
        out: Output[Vector[FLOAT]]

        def compute(x: Any) -> Any:
            return 2 * x

        def cycles(x: Any) -> int:
            return vertex_cycles

    return Doubled


def cycles_of(vertex_cycles: int, folder: Path) -> int:
    ipu.clear_caches()
    function = ipu.jit(
        lambda x: ipu.tile_map(codelet_of(vertex_cycles), x, tiles=range(4)),
        device=ipu.IPUModel(tiles_per_ipu=16),
        options=ipu.Options(cache_dir=folder),
    )
    return function.lower(jnp.ones((4, 8))).compile().profile.phase_cycles["compute"]


def test_costs_of_changed_codelets_are_computed(tmp_path, computed):
    assert cycles_of(1000, tmp_path) - cycles_of(100, tmp_path) == 6 * 900
    computed.clear()
    cycles_of(100, tmp_path)
    assert not computed


VALUES = [
    None,
    (1, -2.5, float("inf"), "text", True, ()),
    (np.dtype("float16"), jnp.dtype("bfloat16")),
    KINDS,
    (np.arange(6).reshape(2, 3), np.zeros((0, 3), np.int32), np.array([True, False, True]), np.arange(3.0)),
    np.broadcast_to(np.int64(7), 1472),
    flat_mapping(10, np.array([0, 4]), np.array([3, 1], np.int32)),
]


def assert_same(value: Any, reference: Any) -> None:
    assert type(value) is type(reference)
    if isinstance(value, tuple):
        assert len(value) == len(reference)
        for each, other in zip(value, reference, strict=True):
            assert_same(each, other)
    elif isinstance(value, np.ndarray):
        assert value.dtype == reference.dtype and not value.flags.writeable
        np.testing.assert_array_equal(value, reference)
    elif type(value) is type(flat_mapping(1, np.array([0]), np.array([0]))):
        assert value.size == reference.size
        assert_same((value.starts, value.tiles), (reference.starts, reference.tiles))
    else:
        assert value == reference


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_value_of_its_data(value):
    data, content = value_data(value)
    assert_same(value_of_data(json.loads(json.dumps(data)), content), value)


def test_repeated_number_takes_the_memory_of_one():
    value = value_of_data(*value_data(np.broadcast_to(np.int64(7), 1472)))
    assert value.strides == (0,)


@pytest.mark.parametrize("value", [{}, [], object(), lambda x: x, print, np.array([None]), jax.nn.relu, 1j])
def test_values_of_other_types_have_no_data(value: Hashable):
    with pytest.raises(NoDataError):
        value_data((1, value))


@pytest.mark.parametrize(
    "data",
    [
        {"type": ["os", "stat_result"], "fields": []},
        {"function": ["os", "system"]},
        {"function": ["ipujax.storage.value_data", "absent"]},
        {"function": ["ipujax.absent", "f"]},
        {"type": ["ipujax.storage.value_data", "value_data"], "fields": []},
        {"type": ["ipujax.storage.sealed", "Head"], "fields": ["a"] * 9},
        {"array": "int64", "shape": [3], "stored": [3]},
        {"array": "object", "shape": [3], "stored": [3]},
        {"array": "int64", "shape": [-3], "stored": [3]},
        {"dtype": "no dtype"},
        {"other": 1},
    ],
    ids=str,
)
def test_data_of_no_value_are_refused(data):
    with pytest.raises(DamagedError, match="describes no value"):
        value_of_data([data], value_data(())[1])
