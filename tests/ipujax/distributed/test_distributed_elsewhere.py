"""Processes that `jax.distributed` joins, without `ipujax run`, are refused where they would compute apart."""

from __future__ import annotations

import socket
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.distributed.instance import check_alone

TWO = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
X = np.ones((2, 4), np.float32)
SPECS: dict[str, Any] = {"in_specs": (P("replica"),), "out_specs": P()}
REFUSED = "would compute apart from the other processes of jax.distributed"


def mean(x: Any) -> Any:
    return jax.lax.pmean(x.sum(), "replica")


def total(x: Any) -> Any:
    return (2 * x).sum()


def mesh(kind: AxisType) -> Any:
    return ipu.make_mesh((2,), ("a",), axis_types=(kind,))


def split(x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh(AxisType.Auto), P("a"))).sum()


def mapped(x: Any) -> Any:
    return jax.shard_map(lambda x: jax.lax.psum(x, "a"), mesh=mesh(AxisType.Auto), in_specs=P("a"), out_specs=P())(x)


def staged(x: Any) -> Any:
    with ipu.stage(0):
        y = jnp.sin(x)
    with ipu.stage(1):
        return jnp.cos(y).sum()


# Functions and arguments that replicas, or IPUs of a mesh, take part in.
TOGETHER: dict[str, Callable[[], Any]] = {
    "replicas": lambda: ipu.jit(mean, device=TWO, replicas=2, **SPECS),
    "one replica with an axis": lambda: ipu.jit(mean, device=TWO, replicas=1, **SPECS),
    "numbers alone": lambda: ipu.jit(mean, device=ipu.CPU(), replicas=2, **SPECS),
    "shardings": lambda: ipu.jit(total, device=TWO, in_shardings=NamedSharding(mesh(AxisType.Explicit), P("a"))),
    "constraint": lambda: ipu.jit(split, device=TWO),
    "shard_map": lambda: ipu.jit(mapped, device=TWO),
}
ALONE: dict[str, Callable[[], Any]] = {
    "function": lambda: ipu.jit(total, device=TWO),
    "pipeline": lambda: ipu.jit(ipu.pipeline(staged, micro_batches=2, reduce="sum"), device=TWO),
    "number": lambda: ipu.jit(total, device=ipu.CPU()),
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that joins this process to others, as far as it can tell."""

    def join(count: int) -> None:
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(jax, "process_count", lambda: count)

    return join


@pytest.mark.parametrize("name", TOGETHER)
def test_what_communicates_is_refused(name: str, joined: Callable[[int], None]) -> None:
    early = TOGETHER[name]()
    early.trace(X)
    compiled = None if early.device == ipu.CPU() else early.lower(X).compile()
    joined(2)
    for fun in (early, TOGETHER[name](), early):
        with pytest.raises(ipu.ArgumentError, match=rf"{REFUSED}.*\n(?s:.*)process 0 of 2.*\n  try: ipujax run --inst"):
            fun(X)
    if compiled is not None:
        for call in (compiled, compiled.profile_call):
            with pytest.raises(ipu.ArgumentError, match=REFUSED):
                call(X)
        assert compiled.profile.cycles > 0
    if "replica" in name:
        with pytest.raises(ipu.ArgumentError, match=REFUSED):
            jax.grad(TOGETHER[name]())(X)
    joined(1)
    assert np.isfinite(early(X)).all()


@pytest.mark.parametrize("name", ALONE)
def test_functions_of_one_process_compute(name: str, joined: Callable[[int], None]) -> None:
    right = ALONE[name]()(X)
    joined(2)
    np.testing.assert_array_equal(ALONE[name]()(X), right)


@pytest.mark.parametrize(
    "name", ["init", "instance_index", "local_replicas", "num_instances", "num_replicas", "all_reduce", "broadcast"]
)
def test_all_functions_of_distributed_are_refused(name: str, joined: Callable[[int], None]) -> None:
    arguments = (X,) if name in ("all_reduce", "broadcast") else ()
    joined(3)
    with pytest.raises(ipu.ArgumentError, match=rf"ipu\.distributed {REFUSED}(?s:.*)process 0 of 3"):
        getattr(ipu.distributed, name)(*arguments)
    joined(1)
    assert getattr(ipu.distributed, name)(*arguments) is None or name != "init"


def test_the_check_costs_nothing_in_a_call() -> None:
    seconds = min(timeit.repeat(lambda: check_alone("f"), number=1000, repeat=5)) / 1000
    assert seconds < 3e-6  # measured: 0.1 µs; a call takes 36


_SCRIPT = """
import sys
import numpy as np
{before}
from jax.sharding import PartitionSpec as P
import ipujax as ipu

def step(w, x):
    value, g = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return jax.lax.pmean(w - 0.1 * g, "replica")

settings = dict(device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=4), in_specs=(P(), P("replica")), out_specs=P())
fun = ipu.jit(step, replicas=2, **settings)
shapes = jax.ShapeDtypeStruct((4,), np.float32), jax.ShapeDtypeStruct((8, 4), np.float32)
{after}
x = np.full((8, 4), 1.0 + jax.process_index(), np.float32)
for action in (ipu.distributed.init, ipu.distributed.num_replicas, lambda: fun(np.ones(4, np.float32), x)):
    try:
        action()
    except ipu.IpuError as error:
        print("refused", error.got)
print(ipu.jit(lambda x: x.sum())(x), jax.process_count())
"""
_INITIALIZE = 'import jax; jax.distributed.initialize("127.0.0.1:{port}", {count}, int(sys.argv[1]))'


def _run(folder: Path, before: str, after: str, count: int) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    initialize = _INITIALIZE.format(port=port, count=count)
    texts = {"before": before.format(initialize=initialize), "after": after.format(initialize=initialize)}
    (folder / "script.py").write_text(_SCRIPT.format(**texts))
    command = [sys.executable, "script.py"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(n)], cwd=folder, **pipes) for n in range(count)]
    return [process.communicate(timeout=120)[0] for process in processes]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{initialize}", ""),
        ("import jax", "{initialize}"),
        ("import jax", "fun.lower(*shapes).compile()\n{initialize}"),
    ],
    ids=["before the import", "before the call", "after the lowering"],
)
def test_two_processes_refuse_whatever_the_order(before: str, after: str, tmp_path: Path) -> None:
    first, second = _run(tmp_path, before, after, 2)
    assert first.splitlines() == ["refused process 0 of 2, started otherwise"] * 3 + ["32.0 2"]
    assert second.splitlines() == ["refused process 1 of 2, started otherwise"] * 3 + ["64.0 2"]


def test_a_single_process_may_initialize(tmp_path: Path) -> None:
    assert _run(tmp_path, "{initialize}", "", 1) == ["32.0 1\n"]
