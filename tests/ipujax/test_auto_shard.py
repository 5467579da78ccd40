"""`ipu.auto_shard`: the best of all shardings of a small program, one that fits, its table, and refusals."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.errors import ArgumentError

TILES = 16


def mlp(w: Any, v: Any, x: Any) -> Any:
    return jax.nn.relu(x @ w) @ v


def shapes(rows: int, width: int) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct(s, np.float32) for s in ((64, width), (width, 64), (rows, 64)))


def cycles(specs: Any, args: Any, device: Any, mesh: Any) -> float:
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    try:
        return ipu.jit(mlp, device=device, in_shardings=shardings).lower(*args).compile().profile.cycles
    except ipu.TileMemoryError:
        return float("inf")


@pytest.mark.parametrize(("rows", "width"), [(512, 64), (16, 512)])
def test_the_best_plan_is_near_the_best_of_all(rows: int, width: int) -> None:
    mesh = ipu.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=TILES)
    args = shapes(rows, width)
    plans = ipu.auto_shard(mlp, mesh, args, device=device)
    every = product((P(), P("x"), P(None, "x")), repeat=3)
    assert plans.best().cycles <= 1.05 * min(cycles(specs, args, device, mesh) for specs in every)


def test_a_plan_fits_where_one_does() -> None:
    args = shapes(16, 16384)  # 8 MB of weights, on chips of 5 MB
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=8)
    plans = ipu.auto_shard(mlp, ipu.make_mesh((4,), ("x",)), args, device=device)
    assert plans.best().fits


def test_rows_are_ready_to_paste() -> None:
    plans = ipu.auto_shard(
        lambda p: p["w"] * 2, ipu.make_mesh((2,), ("x",)), ({"w": jax.ShapeDtypeStruct((8, 8), np.float32)},)
    )
    best = plans.best()
    assert jax.tree.map(lambda s: s.spec, best.in_shardings) == eval(best.code, {"P": P})
    assert str(plans).splitlines()[0].startswith("in_shardings")
    assert len(plans) == len(list(plans)) == 3


def test_settings_of_the_function_are_those_of_its_plans() -> None:
    mesh, args = ipu.make_mesh((2,), ("x",)), shapes(16, 64)
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=TILES)

    @functools.wraps(mlp)
    def twice(w: Any, v: Any, x: Any) -> Any:
        return mlp(w, v, mlp(w, v, x))

    jitted = ipu.jit(twice, device=device, donate_argnums=2, options=ipu.Options(byte_cost=100))
    best = ipu.auto_shard(jitted, mesh, args).best()
    settings = {"donate_argnums": 2, "options": ipu.Options(byte_cost=100), "in_shardings": best.in_shardings}
    assert best.cycles == ipu.jit(twice, device=device, **settings).profile(*args).cycles


@pytest.mark.parametrize("name", ["replicas", "static_argnums", "in_shardings", "out_shardings"])
def test_settings_that_no_plan_keeps_are_refused(name: str) -> None:
    mesh = ipu.make_mesh((2,), ("x",))
    value = NamedSharding(mesh, P()) if "shardings" in name else 2
    jitted = ipu.jit(mlp, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=TILES), **{name: value})
    with pytest.raises(ArgumentError, match=rf"ipu\.auto_shard does not keep {name} of ipu\.jit"):
        ipu.auto_shard(jitted, mesh, shapes(16, 64))


def test_meshes_larger_than_the_device_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"mesh of ipu\.auto_shard is larger than the device[\s\S]*num_ipus=4"):
        ipu.auto_shard(mlp, ipu.make_mesh((4,), ("x",)), shapes(16, 64), device=ipu.IPUModel(num_ipus=2))


def test_arguments_are_needed() -> None:
    with pytest.raises(ArgumentError, match="needs arguments to split"):
        ipu.auto_shard(mlp, ipu.make_mesh((2,), ("x",)), ())
    with pytest.raises(ArgumentError, match=r"positional arguments in a tuple[\s\S]*got: ShapeDtypeStruct"):
        ipu.auto_shard(mlp, ipu.make_mesh((2,), ("x",)), shapes(16, 64)[0])  # type: ignore[arg-type]
