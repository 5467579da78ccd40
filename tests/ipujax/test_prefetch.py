"""`ipu.prefetch`: the same batches in order, prepared ahead, their time, and errors at the batch that raises them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu


def test_batches_come_in_order_and_ahead() -> None:
    made = []
    may_go_on = threading.Event()

    def batches() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            if number == 2:
                may_go_on.set()
            yield number

    ahead = ipu.prefetch(batches(), depth=2)
    assert next(ahead) == 0
    assert may_go_on.wait(5)  # two more are made, while none is asked for
    assert list(ahead) == [1, 2, 3, 4] and made == [0, 1, 2, 3, 4]
    assert list(ahead) == []


@pytest.mark.parametrize("depth", [0, 2])
def test_a_source_may_fill_one_array_again(depth: int) -> None:
    buffer = np.zeros(3, np.float32)

    def batches() -> Iterator[dict[str, Any]]:
        for number in range(5):
            buffer[:] = number
            yield {"x": buffer, "n": number}

    read = []
    for batch in ipu.prefetch(batches(), depth):
        time.sleep(0.002)  # the device computes, the thread prepares
        read.append((batch["x"][0], batch["n"]))
    assert read == [(n, n) for n in range(5)]


def test_an_exception_comes_where_its_batch_would() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("no such file")

    ahead = ipu.prefetch(batches())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="no such file"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_drops_prepared_batches() -> None:
    ahead = ipu.prefetch(iter(range(10)), depth=3)
    assert next(ahead) == 0
    ahead.close()
    assert list(ahead) == []


SECONDS = 0.01  # that a slow source takes for a batch


def slow(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(SECONDS)
        yield number


def test_none_is_prepared_ahead_at_depth_0() -> None:
    made = []
    batches = ipu.prefetch((made.append(number) or number for number in range(3)), depth=0)
    assert next(batches) == 0 and made == [0]
    assert list(batches) == [1, 2] and list(batches) == []


def test_a_loop_waits_for_a_slow_source() -> None:
    batches = ipu.prefetch(slow(4), depth=0)
    assert list(batches) == [0, 1, 2, 3]
    host = batches.host
    assert host.batches == 4 and not host.is_ahead
    assert 4 * SECONDS <= host.prepared_seconds <= host.waited_seconds


def test_a_loop_does_not_wait_for_prepared_batches() -> None:
    made = []
    all_made = threading.Event()

    def source() -> Iterator[int]:
        for number in slow(4):
            made.append(number)
            yield number
        all_made.set()

    batches = ipu.prefetch(source(), depth=4)
    assert next(batches) == 0
    assert all_made.wait(5)
    first = batches.host.waited_seconds
    assert list(batches) == [1, 2, 3]
    host = batches.host
    assert host.is_ahead and host.batches == 4 and host.prepared_seconds >= 4 * SECONDS
    assert first >= SECONDS and host.waited_seconds - first < 3 * SECONDS


@pytest.mark.parametrize("clock_hz", [1.0, 1e9])
def test_a_profile_names_the_slower_of_host_and_device(clock_hz: float) -> None:
    """A loop on a device that takes minutes, and on one that takes microseconds."""
    step = ipu.jit(lambda x: x + 1, device=ipu.IPUModel(tiles_per_ipu=4, clock_hz=clock_hz))
    batches = ipu.prefetch((jnp.full(8, number) for number in slow(3)), depth=1)
    for batch in batches:
        step(batch)
    static = step.lower(jax.ShapeDtypeStruct((8,), jnp.int32)).compile().profile
    profile = static.with_host(batches.host)
    assert profile.is_host_bound == (clock_hz == 1e9) and static.host is None
    assert ("Bound by:         host" if profile.is_host_bound else "Bound by:         device") in profile.summary()
    with pytest.raises(ipu.ProfileError, match="with_host"):
        assert static.is_host_bound


@pytest.mark.parametrize("depth", [-1, 1.5, True])
def test_refuses_a_non_depth(depth: Any) -> None:
    with pytest.raises(ipu.ArgumentError, match="a whole number from 0"):
        ipu.prefetch([1], depth=depth)


def test_refuses_what_is_no_iterable() -> None:
    with pytest.raises(ipu.ArgumentError, match=r"batches of ipu.prefetch[\s\S]*got: 3"):
        ipu.prefetch(3)  # type: ignore[arg-type]


def test_an_error_of_the_users_own_iterable_stays() -> None:
    class Batches:
        def __iter__(self) -> Iterator[int]:
            raise TypeError("of the user's own")

    with pytest.raises(TypeError, match=r"^of the user's own"):
        ipu.prefetch(Batches())
