"""Devices: their properties, the device of a function, effects and refusals of `CPU`."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from tests.lowering.helpers import assert_rounded_alike

X = jnp.arange(6.0).reshape(2, 3)


def tiles_used(fun: object) -> int:
    """Tiles of the chip that a function is compiled for."""
    return fun.lower(X).graph.target.tiles_per_ipu  # type: ignore[attr-defined]


def device(tiles: int) -> ipu.IPUModel:
    return ipu.IPUModel(tiles_per_ipu=tiles)


def double(x: jax.Array) -> jax.Array:
    return x * 2


def test_presets_and_changes() -> None:
    assert ipu.IPUModel() == ipu.IPUModel(num_ipus=1, arch="mk2") == ipu.IPUModel(1, "mk2")
    assert [ipu.IPUModel(arch=arch).target.name for arch in ("mk1", "mk2", "bow")] == ["mk1", "mk2", "bow"]
    target = ipu.IPUModel(4, "bow", bytes_per_tile=2**20).target
    assert (target.num_ipus, target.bytes_per_tile, target.num_tiles) == (4, 2**20, 4 * 1472)
    assert repr(ipu.IPUModel(4, "bow")) == "IPUModel(4 × bow, 1472 tiles)" and repr(ipu.CPU()) == "CPU()"


def test_equal_devices_are_one() -> None:
    devices = {device(4), device(4), device(6), ipu.CPU(), ipu.CPU(), ipu.IPUModel(2, tiles_per_ipu=4)}
    assert len(devices) == 4 and ipu.CPU() != device(4) and device(4) != "mk2"


def test_default_device_nests_and_ends() -> None:
    fun = ipu.jit(double)
    assert tiles_used(fun) == 1472
    with ipu.default_device(device(4)):
        assert tiles_used(fun) == 4
        with ipu.default_device(device(6)):
            assert tiles_used(fun) == 6
        assert tiles_used(fun) == 4
        assert tiles_used(ipu.jit(double, device=device(8))) == 8  # named: the default does not matter
    assert tiles_used(fun) == 1472


def test_default_device_ends_with_an_error() -> None:
    with pytest.raises(KeyError), ipu.default_device(device(4)):
        raise KeyError
    assert tiles_used(ipu.jit(double)) == 1472


def test_default_device_as_decorator() -> None:
    @ipu.default_device(device(4))
    def inside() -> int:
        return tiles_used(ipu.jit(double))

    assert [inside(), inside()] == [4, 4]


def test_default_device_belongs_to_its_thread() -> None:
    """As in JAX: another thread has its own."""
    recorded: list[int] = []
    with ipu.default_device(device(4)):
        thread = threading.Thread(target=lambda: recorded.append(tiles_used(ipu.jit(double))))
        thread.start()
        thread.join()
    assert recorded == [1472]


def test_inner_functions_follow_the_outer_ones_device() -> None:
    inner = ipu.jit(double)
    outer = ipu.jit(lambda x: inner(x) + 1, device=device(4))
    with ipu.default_device(device(6)):
        assert tiles_used(outer) == 4
        np.testing.assert_array_equal(outer(X), X * 2 + 1)


def test_cpu_gives_the_numbers_of_jax_jit() -> None:
    def fun(tree: dict[str, jax.Array], n: int) -> jax.Array:
        return jnp.tanh(tree["a"] @ tree["a"].T) * n

    ours = ipu.jit(fun, device=ipu.CPU(), static_argnums=1, donate_argnums=0)
    inputs = {"a": jnp.array(X)}
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        got = ours(inputs, 3)
    assert_rounded_alike(got, jax.jit(fun, static_argnums=1)({"a": X}, 3))


def test_cpu_donates() -> None:
    x = jnp.array(X)
    ipu.jit(double, device=ipu.CPU(), donate_argnums=0)(x)
    assert x.is_deleted()


def test_cpu_has_no_limit() -> None:
    """Without a machine, a program that fits no chip still runs."""
    large = jnp.ones((3000, 1000))
    with pytest.raises(ipu.TileMemoryError):
        ipu.jit(double, device=device(4))(large)
    with ipu.default_device(ipu.CPU()):
        np.testing.assert_array_equal(ipu.jit(double)(large), large * 2)


def test_cpu_has_no_graph() -> None:
    with pytest.raises(ipu.ArgumentError, match=r"double runs on ipu.CPU\(\)(.|\n)*test_device.py(.|\n)*ipu.IPUModel"):
        ipu.jit(double, device=ipu.CPU()).lower(X)


def test_functions_for_an_ipu_called_inside_one_for_the_cpu_are_inlined() -> None:
    inner = ipu.jit(double, device=device(4))
    np.testing.assert_array_equal(ipu.jit(lambda x: inner(x) + 1, device=ipu.CPU())(X), X * 2 + 1)


UNUSED = "double uses {} of the {} IPUs of its device; num_ipus={} is enough"


def test_ipus_that_nothing_uses_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    replicated = {"in_specs": P("replica"), "out_specs": P("replica")}
    for num_ipus, settings, warning in (
        (1, {}, None),
        (4, {}, (1, 4, 1)),
        (8, {"replicas": 3, **replicated}, (3, 8, 4)),
        (4, {"replicas": 3, **replicated}, None),
        (4, {"replicas": 4, **replicated}, None),
    ):
        fun = ipu.jit(double, device=ipu.IPUModel(num_ipus, tiles_per_ipu=4), **settings)
        caplog.clear()
        for rows in (12, 12, 24):
            fun(jnp.ones((rows, 2)))
        texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(texts) == (warning is not None), texts
        assert warning is None or texts[0].startswith(UNUSED.format(*warning))


def test_ipus_of_stages_are_used(caplog: pytest.LogCaptureFixture) -> None:
    def two_stages(x: jax.Array) -> jax.Array:
        with ipu.stage(0):
            y = jnp.sin(x)
        with ipu.stage(1):
            return y @ y.T

    ipu.jit(two_stages, device=ipu.IPUModel(2, tiles_per_ipu=4))(X)
    assert not caplog.records


def test_an_empty_array_uses_one_ipu(caplog: pytest.LogCaptureFixture) -> None:
    ipu.jit(double, device=ipu.IPUModel(2, tiles_per_ipu=4))(X[:0])
    assert "uses 1 of the 2 IPUs" in caplog.text
