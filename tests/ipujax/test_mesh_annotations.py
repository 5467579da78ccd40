"""Annotations over a mesh have the values, shardings and calls of `jax.jit`; what cannot be partitioned is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.errors import ArgumentError, ArgumentValueError

SCRIPT = Path(__file__).parent / "mesh_annotations.py"
DEVICE = ipu.IPUModel(num_ipus=4, tiles_per_ipu=8)
MESH = ipu.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
X = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.fixture(scope="module")
def differences() -> dict[str, str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True, env=environment)
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["alike", "custom", "print", "call", "memory", "inspect"])
def test_as_jax_jit(differences: dict[str, str], kind: str) -> None:
    of_kind = {name: text for name, text in differences.items() if name.startswith(f"{kind}:")}
    assert of_kind
    assert not any(of_kind.values()), of_kind


def test_each_ipu_streams_its_block() -> None:
    held = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(MESH, P("x"), memory_kind="pinned_host"))
    changed = lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Device) * 2, jax.memory.Space.Host)  # noqa: E731
    compiled = ipu.jit(changed, device=DEVICE, donate_argnums=0).lower(held).compile()
    assert compiled.profile.streaming_memory_bytes == X.nbytes // 4
    assert not compiled.partitioning.notes.moves


def test_a_transfer_that_splits_is_refused_with_what_does() -> None:
    with pytest.raises(ArgumentError, match=r"device_put splits a value over 4[\s\S]*with_sharding_constraint"):
        run(lambda x: jax.device_put(x * 2, NamedSharding(MESH, P("x"))))


def custom(chosen: P) -> Any:
    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        return mesh, lambda x: x * 2, NamedSharding(mesh, P()), (NamedSharding(mesh, chosen),)

    function = custom_partitioning(lambda x: x * 2)
    function.def_partition(partition, sharding_rule="i j -> i j")
    return function


def run(function: Any) -> Any:
    return ipu.jit(function, device=DEVICE, in_shardings=NamedSharding(MESH, P("x")))(X)


def test_custom_partitioning_computes_the_users_blocks() -> None:
    np.testing.assert_allclose(run(custom(P())), 2 * X)
    with pytest.raises(ArgumentValueError, match=r"returns other shapes[^`]*test_mesh_annotations.py"):
        run(custom(P("x")))


def test_custom_partitioning_without_a_mesh_is_the_function() -> None:
    compiled = ipu.jit(custom(P()), device=DEVICE).lower(X).compile()
    assert not compiled.profile.fallbacks
    np.testing.assert_allclose(compiled(X), 2 * X)


def test_replicas_call_the_host_each_and_devices_of_a_mesh_once() -> None:
    shapes: list[Any] = []

    def seen(x: Any) -> Any:
        jax.debug.callback(lambda value: shapes.append(value.shape), x)
        return jnp.sin(x)

    np.testing.assert_allclose(run(seen), np.sin(X), rtol=1e-5)
    assert shapes == [(8, 4)]
    shapes.clear()
    of_replicas = ipu.jit(seen, device=DEVICE, replicas=4, in_specs=P("replica"), out_specs=P("replica"))
    np.testing.assert_allclose(of_replicas(X), np.sin(X), rtol=1e-5)
    assert shapes == 4 * [(2, 4)]


def test_results_of_float0_have_no_sharding() -> None:
    split = NamedSharding(MESH, P("x"))
    tangents = ipu.jit(
        lambda x, n: jax.grad(lambda v, k: jnp.sum(jnp.sin(v)) + 0 * k, (0, 1), allow_int=True)(x, n),
        device=DEVICE,
        in_shardings=(split, None),
        out_shardings=(split, None),
    )
    of_x, of_n = tangents(X, np.int32(3))
    np.testing.assert_allclose(of_x, np.cos(X), rtol=1e-5)
    assert of_n.dtype == jax.dtypes.float0
