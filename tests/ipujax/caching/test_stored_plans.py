"""Plans and costs on disk: taken by other programs, equal to computed ones, never from damaged or foreign files."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.poplin.product_plan import plan_convolution
from ipujax.lowering.poplin.spec import ConvSpec, Dims
from ipujax.lowering.poplin.tile_plan import Grid, Plan, is_plan_of
from ipujax.lowering.poplin.vertex_kinds import KINDS, VertexKind
from ipujax.poplar import FLOAT, Input, Output, Vector, Vertex
from ipujax.runtime.files import DamagedError
from ipujax.runtime.graph import Language
from ipujax.runtime.target import preset
from ipujax.storage import PLAN
from ipujax.storage.stored_values import NoDataError, StoredValues, value_data, value_of_data
from tests.sealed_parts import put_together, section, taken_apart

LAYERS = 4
WIDTH = 24
X = jax.device_put(np.ones((16, WIDTH), np.float32))
WEIGHTS = [jax.device_put(np.eye(WIDTH, dtype=np.float32) * (n + 1)) for n in range(LAYERS)]


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

    def counted(self: StoredValues, key: Any, compute: Any, *rest: Any) -> Any:
        def compute_counted() -> Any:
            counts[getattr(key[0], "__qualname__", key[0])] += 1
            return compute()

        return recall(self, key, compute_counted, *rest)

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


FORGED = {
    "a call": {"data": section({"function": ["subprocess", "call"]})},
    "a class": {"data": section({"type": ["os", "stat_result"], "fields": []})},
    "a number": {"data": section(3)},
    "nothing": {"data": section(None)},
    "a list": {"data": section([[], []])},
    "no JSON": {"data": zlib.compress(b"{")},
    "no bytes": {"arrays": b""},
    "arrays": {"arrays": zlib.compress(bytes(8))},
}


@pytest.mark.parametrize("name", FORGED)
def test_sealed_data_of_another_form_are_computed(tmp_path, name):
    """Files with a valid checksum whose contents are no value of the key."""
    profile = compiled(None, tmp_path).profile.summary()
    for path in tmp_path.glob(f"*-{PLAN}.ipujax"):
        head, sections = taken_apart(path)
        path.write_bytes(put_together(head, sections | FORGED[name]))
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


SPEC = ConvSpec(Dims(1, 2, 3, 4, (5,), (1,)), (5,), (1,), (1,), (1,), *[jnp.dtype("bfloat16")] * 4)
PLAN_OF_SPEC = plan_convolution(SPEC, preset("mk2"))
VALUES = [
    (None, NoneType),
    (None, Plan | None),
    ((1, -2.5, float("inf"), "text", True, ()), tuple[int, float, float, str, bool, tuple[int, ...]]),
    ((np.dtype("float16"), jnp.dtype("bfloat16")), tuple[np.dtype[Any], ...]),
    (KINDS, tuple[VertexKind, ...]),
    ("assembly", Language),
    ((np.arange(6).reshape(2, 3), np.zeros((0, 3), np.int32), np.array([True, False])), tuple[np.ndarray, ...]),
    (np.broadcast_to(np.int64(7), 1472), np.ndarray),
    (PLAN_OF_SPEC, Plan),
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
    else:
        assert value == reference


@pytest.mark.parametrize(("value", "kind"), VALUES, ids=range(len(VALUES)))
def test_value_of_its_data(value, kind):
    data, content = value_data(value, kind)
    assert_same(value_of_data(json.loads(json.dumps(data)), content, kind), value)


def test_repeated_number_takes_the_memory_of_one():
    value = value_of_data(*value_data(np.broadcast_to(np.int64(7), 1472), np.ndarray), np.ndarray)
    assert value.strides == (0,)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({}, dict),
        ([], list[int]),
        (object(), object),
        (print, Callable),
        (np.array([None]), np.ndarray),
        (1j, complex),
        (1, float),
        (True, int),
        (1 << 63, int),
        ((1, "a"), tuple[int, ...]),
        ((1, 2), tuple[int]),
        (None, int),
        ("C", Language),
        (dataclasses.replace(PLAN_OF_SPEC, steps=2.0), Plan),
        (dataclasses.replace(KINDS[0], name="other"), VertexKind),
    ],
)
def test_values_of_other_types_have_no_data(value: Any, kind: Any):
    with pytest.raises(NoDataError):
        value_data(value, kind)


ARRAY = value_data(np.arange(3), np.ndarray)
OF_ARRAYS = [
    ["int64", [3], False, 1],
    ["int64", [4], False],
    ["int64", [-3], False],
    ["int64", [True], False],
    ["int64", [3.0], False],
    ["int64", [1 << 40], True],
    ["int64", [1] * 40, False],
    ["int64", [3], 0],
    ["int64", 3, False],
    ["object", [3], False],
    ["bool", [24], False],
    ["int64", [2], False],
    "int64",
]


@pytest.mark.parametrize("data", OF_ARRAYS, ids=str)
def test_arrays_of_other_sizes_are_refused(data):
    with pytest.raises(DamagedError, match="describes no value"):
        value_of_data(data, ARRAY[1], np.ndarray)


def test_large_arrays_of_one_number_take_no_memory():
    with pytest.raises(DamagedError, match="describes no value"):
        value_of_data(["int64", [1 << 28], True], bytes(8), np.ndarray)
    assert value_of_data(["int64", [1 << 26], True], bytes(8), np.ndarray).strides == (0,)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (1.0, int),
        (True, int),
        (1, bool),
        ("1", int),
        (1 << 63, int),
        (1.5, float),
        ("nan", float),
        ("0x1p99999", float),
        ("one", float),
        (1, str),
        (0, NoneType),
        ("no dtype", np.dtype[Any]),
        (["float32"], np.dtype[Any]),
        (len(KINDS), VertexKind),
        (-1, VertexKind),
        (False, VertexKind),
        ("ConvPartial1x1Out", VertexKind),
        ("C", Language),
        ([1], tuple[int, int]),
        ({"0": 1}, tuple[int, ...]),
        ([], Plan),
        ({"type": ["subprocess", "call"], "fields": []}, Plan),
        ({"function": ["os", "system"]}, Plan | None),
        ([1] * 16, Plan),
    ],
    ids=str,
)
def test_data_of_no_value_are_refused(data, kind):
    with pytest.raises(DamagedError, match=r"describes no value|a tuple of"):
        value_of_data(data, b"", kind)


CHANGES = {
    "another convolution": {"spec": dataclasses.replace(SPEC, extents=Dims(1, 2, 3, 4, (6,), (1,)))},
    "another rank": {"spec": dataclasses.replace(SPEC, in_field=(5, 5))},
    "blocks of nothing": {"splits": Dims(0, 1, 1, 1, (1,), (1,))},
    "more blocks than elements": {"splits": Dims(1, 3, 1, 1, (1,), (1,))},
    "more dimensions": {"splits": Dims(1, 1, 1, 1, (1, 1), (1,))},
    "no grains": {"grains": Dims(1, 1, 1, 0, (1,), (1,))},
    "large grains": {"grains": Dims(1, 1, 1, 1 << 40, (1,), (1,))},
    "steps": {"steps": 1 << 40},
    "an axis": {"step_axis": 9},
    "a kind that does not apply": {"kind": KINDS[-2]},
    "negative bytes": {"temp_bytes": -1},
    "a grid of other blocks": {"aligned_grid": Grid((np.array([0, 1]),) * 6, np.zeros((1,) * 6, np.int32))},
}


@pytest.mark.parametrize("name", CHANGES)
def test_plans_that_cannot_be_those_of_a_convolution(name):
    target = preset("mk2")
    assert is_plan_of(PLAN_OF_SPEC, SPEC, target)
    assert not is_plan_of(dataclasses.replace(PLAN_OF_SPEC, **CHANGES[name]), SPEC, target)


def test_plans_for_more_tiles_than_there_are():
    assert PLAN_OF_SPEC.tiles_used > 1 and not is_plan_of(PLAN_OF_SPEC, SPEC, preset("mk2").replace(tiles_per_ipu=1))


def test_plans_that_lead_to_an_error_are_computed_again(tmp_path, monkeypatch):
    expected = without_seconds(compiled(None, tmp_path))
    plans = len(list(tmp_path.glob("*-plan.ipujax")))
    for path in tmp_path.glob("*-program.ipujax"):
        path.unlink()
    with monkeypatch.context() as patch:
        # As of a file with a right checksum, and numbers that no compiler computes.
        patch.setattr("ipujax.storage.stored_values._value_of", lambda file, kind, is_valid: ())
        assert without_seconds(compiled(None, tmp_path)) == expected
    assert len(list(tmp_path.glob("*-plan.ipujax"))) < plans
    assert without_seconds(compiled(None, tmp_path)) == expected


def test_an_error_without_stored_plans_keeps_them(tmp_path):
    compiled(None, tmp_path)
    plans = sorted(tmp_path.glob("*-plan.ipujax"))
    ipu.clear_caches()
    step = ipu.jit(
        lambda weights, large: (jax.value_and_grad(loss)(weights, X, None), large + 1),
        device=ipu.IPUModel(tiles_per_ipu=16),
        options=ipu.Options(cache_dir=tmp_path),
    )
    with pytest.raises(ipu.TileMemoryError):
        step.lower(WEIGHTS, jax.ShapeDtypeStruct((8192, 8192), jnp.float32)).compile()
    assert set(plans) <= set(tmp_path.glob("*-plan.ipujax"))
