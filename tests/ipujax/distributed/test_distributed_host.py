"""`ipu.distributed` in real processes: broadcast and all-reduce on the host, and instances that disagree."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from tests.ipujax.distributed.distributed_helpers import Runner, clear_of, run

__all__ = ["run"]  # a fixture

START = """
import os
import ipujax as ipu
ipu.distributed.init()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
index = ipu.distributed.instance_index()
print(f"pid{os.getpid()}")
"""

# Every leaf is another function of the instance, so what comes out says whose it is.
TREE = """
def tree(i):
    return {
        "weights": {"w": jnp.full((3, 2), i + 0.25), "b": np.arange(4, dtype=np.int32) * (i + 1)},
        "half": [jnp.asarray([0.5 * i, -0.0, jnp.nan], jnp.bfloat16), jnp.asarray(1 + 2j * i, jnp.complex64)],
        "flags": (jnp.asarray([True, i == 1]), np.float32(i), 3 * i, None),
    }

def same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), map(jnp.asarray, jax.tree.leaves(want))):
        assert a.dtype == b.dtype and a.shape == b.shape and a.devices() == {jax.local_devices()[0]}
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (a, b)
"""


def test_distributed_smoke(run: Runner):
    source = (
        START
        + TREE
        + """
ipu.distributed.init()
d = ipu.distributed
assert (d.num_instances(), d.num_replicas(), d.local_replicas()) == (2, 6, 3)
assert index == int(os.environ["IPUJAX_INSTANCE_INDEX"])
for root in (0, 1):
    same_bits(d.broadcast(tree(index), root), tree(root))
key = d.broadcast(jax.random.key(index), 1)
assert jnp.all(jax.random.uniform(key, (3,)) == jax.random.uniform(jax.random.key(1), (3,)))
assert d.broadcast([]) == [] and d.broadcast(None) is None
numbers = {k: v for k, v in tree(index).items() if k != "half"}
for op, reduce in (("sum", np.sum), ("mean", np.mean), ("max", np.max), ("min", np.min)):
    got = d.all_reduce(numbers, op)
    want = [reduce(np.stack(x).astype(np.float64), axis=0)
            for x in zip(*(jax.tree.leaves({k: v for k, v in tree(i).items() if k != "half"}) for i in (0, 1)))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float64), b), jax.tree.leaves(got), want)
whole = {"x": np.arange(8.0).reshape(4, 2), "w": jnp.arange(3), "k": jax.random.split(jax.random.key(0), 4)}
specs = {"x": P(None, "replica"), "w": P(), "k": P("replica")}
part = d.share(whole, specs)
assert np.array_equal(part["x"], whole["x"][:, index : index + 1]) and part["w"] is whole["w"]
assert part["k"].shape == (2,) and part["k"].dtype == whole["k"].dtype
same_bits(jax.random.key_data(d.gather(part["k"])), jax.random.key_data(whole["k"]))
del part["k"], whole["k"], specs["k"]
same_bits(d.gather(part, specs), whole)
print("devices", jax.local_device_count(), float(jax.jit(jnp.sum)(jnp.ones(5))))
"""
    )
    assert run(source, "--replicas", "6", "--timeout", "60") == 0, run.err
    assert sum("devices 1 5.0" in line for line in run.out) == 2
    assert clear_of(run.printed("pid"))


def test_distributed_training_on_the_host(run: Runner):
    """Horovod's way: each instance has gradients of its own share, and all take the mean of them."""
    source = (
        START
        + """
import json
rng = np.random.default_rng(0)
x, y = rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=8).astype(np.float32)
mine = slice(4 * index, 4 * index + 4)
loss = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
grads = ipu.jit(jax.value_and_grad(loss), device=ipu.IPUModel(tiles_per_ipu=16))
w, losses = ipu.distributed.broadcast(jnp.full(3, 1.0 + index)), []
for _ in range(5):
    value, grad = ipu.distributed.all_reduce(grads(w, x[mine], y[mine]), "mean")
    w, losses = w - 0.1 * grad, [*losses, float(value)]
print("losses", json.dumps([*losses, *w.tolist()]))
"""
    )
    assert run(source) == 0, run.err
    actual = [np.array(json.loads(line.split("losses")[1]), np.float32) for line in run.out if "losses" in line]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3)).astype(np.float32)
    y = rng.normal(size=8).astype(np.float32)
    w = jnp.ones(3)
    losses = []
    for _ in range(5):
        value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        w = w - 0.1 * grad
        losses = [*losses, float(value)]
    assert len(actual) == 2 and np.array_equal(*actual)
    np.testing.assert_allclose(actual[0], [*losses, *w.tolist()], rtol=1e-6)


DISAGREEMENTS = {
    "shapes": (
        'ipu.distributed.all_reduce({"w": jnp.ones(4 + index)})',
        "instances disagree on operand['w'] of ipu.distributed.all_reduce \"mean\"",
        "got: float32[4] on instance 0; float32[5] on instance 1",
    ),
    "structures": (
        'ipu.distributed.broadcast({"w": 1.0} if index else {"w": 1.0, "b": 2.0})',
        "instances disagree on operand['b'] of ipu.distributed.broadcast from instance 0",
        "got: float32[] on instance 0; nothing on instance 1",
    ),
    "calls": (
        "ipu.distributed.broadcast(1.0) if index else ipu.distributed.all_reduce(1.0)",
        "instances are not at the same point of the program",
        'got: ipu.distributed.all_reduce "mean" on instance 0; ipu.distributed.broadcast from instance 0 on instance 1',
    ),
}


def test_distributed_disagreements_on_the_host_are_errors_on_all(run: Runner):
    """Before a collective starts; the end of the script is one."""
    catch = "except ipu.ArgumentError as error: print('case {}:', str(error).replace(chr(10), ' '))\n"
    lines = [f"try: {statement}\n{catch.format(name)}" for name, (statement, *_) in DISAGREEMENTS.items()]
    assert run(START + "".join(lines) + "for _ in range(3 - index): ipu.distributed.all_reduce(1.0)") == 1
    for name, (_, *texts) in DISAGREEMENTS.items():
        found = [line for line in run.out if f"case {name}:" in line]
        assert len(found) == 2 and all(text in line for line in found for text in texts), (name, found)
    end = 'got: ipu.distributed.all_reduce "mean" on instance 0; the end of the script on instance 1'
    assert sum(end in line for line in run.err) == 2, run.err
    assert any("try: give all instances the same number of steps" in line for line in run.err)
    assert clear_of(run.printed("pid"))


def test_distributed_init_must_come_first(run: Runner):
    source = "import jax.numpy as jnp, ipujax as ipu; jnp.ones(3).block_until_ready(); ipu.distributed.init()"
    assert run(source) == 1
    assert any("comes after JAX has started to compute" in line for line in run.err)
    assert run("import ipujax as ipu; ipu.distributed.broadcast(1.0)") == 0, run.err  # joins by itself


def test_distributed_on_a_network_with_a_proxy(run: Runner, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    assert run(START + "print(float(ipu.distributed.all_reduce(index)))", "--timeout", "60") == 0, run.err
    assert sorted(line for line in run.out if "0.5" in line) == ["[0] 0.5", "[1] 0.5"]


def test_distributed_programs_that_a_script_starts_are_no_instances(run: Runner):
    source = START + "import subprocess, sys\nsubprocess.check_call([sys.executable, '-c', sys.argv[1]])"
    alone = "import ipujax as ipu; ipu.distributed.init(); print(ipu.distributed.num_instances())"
    assert run(source, arguments=[alone]) == 0, run.err
    assert sorted(line for line in run.out if line[4:] == "1") == ["[0] 1", "[1] 1"]


def test_distributed_alone():
    ipu.distributed.init()
    assert ipu.distributed.instance_index() == 0
    assert {f() for f in (ipu.distributed.num_instances, ipu.distributed.num_replicas)} == {1}
    assert ipu.distributed.local_replicas() == 1
    tree = {"w": jnp.arange(3.0), "k": jax.random.key(3)}
    got = ipu.distributed.broadcast(tree)
    assert jnp.array_equal(got["w"], tree["w"]) and jnp.array_equal(got["k"], tree["k"])
    for op in ("mean", "sum", "max", "min"):
        assert jnp.array_equal(ipu.distributed.all_reduce(tree["w"], op), tree["w"])


def test_distributed_share_alone():
    tree = {"x": np.arange(6).reshape(2, 3), "w": 1.5}
    specs = {"x": P("replica"), "w": P()}
    assert ipu.distributed.share(tree, specs)["w"] == 1.5
    for got in (ipu.distributed.share(tree, specs)["x"], ipu.distributed.gather(tree, specs)["x"]):
        assert np.array_equal(got, tree["x"])


def test_distributed_bad_operands():
    with pytest.raises(ipu.ArgumentError, match=r"1 instances cannot share operand\['w'\] equally"):
        ipu.distributed.share({"w": 1.5})
    with pytest.raises(ipu.ArgumentError, match=r"operand\['w'\] has no dimension 1"):
        ipu.distributed.gather({"w": np.ones(3)}, P(None, "replica"))
    with pytest.raises(ipu.ArgumentError, match=r"specs of ipu\.distributed\.share do not match"):
        ipu.distributed.share((1.5,), (P(), P()))
    with pytest.raises(ipu.ArgumentError, match="unknown reduction"):
        ipu.distributed.all_reduce(1.0, "prod")
    with pytest.raises(ipu.ArgumentError, match="must be the number of an instance"):
        ipu.distributed.broadcast(1.0, 1)
    with pytest.raises(ipu.ArgumentError, match="must be the number of an instance"):
        ipu.distributed.broadcast(np.ones(3), False)  # indexed by it, arrays lost all elements
    assert ipu.distributed.broadcast(np.ones(3), np.int64(0)).shape == (3,)
    with pytest.raises(ipu.ArgumentError, match="unknown reduction"):
        ipu.distributed.all_reduce(1.0, ["mean"])
    for wrong in (2**40, np.ma.array([1.0, 2.0], mask=[0, 1])):
        with pytest.raises(ipu.ArgumentError, match="takes arrays"):
            ipu.distributed.broadcast(wrong)
    with pytest.raises(ipu.ArgumentError, match=r"str at operand\['name'\]"):
        ipu.distributed.broadcast({"name": "x"})
    with pytest.raises(ipu.ArgumentError, match="cannot take a traced operand"):
        jax.jit(ipu.distributed.all_reduce)(1.0)
    with pytest.raises(ipu.ArgumentError, match="not defined for all leaves"):
        ipu.distributed.all_reduce(1j, "max")
    with pytest.raises(ipu.ArgumentError, match="not defined for all leaves"):
        ipu.distributed.all_reduce(jax.random.key(0))


@pytest.mark.parametrize("leaving", [0, 1])
def test_exit_code_of_one_instance_is_that_of_the_run(run: Runner, leaving: int):
    """The others wait for it, and fail too: with another code, and later."""
    source = f"""
import sys
ipu.distributed.all_reduce(jnp.ones(3))
try:
    sys.exit(5)
except SystemExit:  # one that is caught is none
    ipu.distributed.all_reduce(jnp.ones(3))
if index == {leaving}:
    sys.exit(3)
ipu.distributed.all_reduce(jnp.ones(3))
"""
    assert run(START + source) == 3, run.err
    assert f"ipujax run: instance {leaving} failed with exit code 3; ending instance {1 - leaving}" in run.err


def test_exit_that_all_make_is_their_code(run: Runner):
    assert run(START + "import sys\nipu.distributed.all_reduce(jnp.ones(3))\nsys.exit(0)") == 0, run.err
    assert run(START + "import sys\nipu.distributed.all_reduce(jnp.ones(3))\nsys.exit(4)") == 4, run.err
