"""Replicas among processes: the numbers of one process, errors before anything hangs, and nothing left of a killed run.

Programs run twice: in one instance that holds all replicas, which other tests compare with plain JAX, and in several.
All of them are one script: to start JAX costs more than most.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.ipujax.distributed.distributed_helpers import PATIENCE_SECONDS, Runner, clear_of, in_sessions, run

__all__ = ["run"]  # a fixture

START = """
import os, sys
import ipujax as ipu
d = ipu.distributed
d.init()
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

index, N = d.instance_index(), d.num_replicas()
print("pid", os.getpid())
DEVICES = {"model": ipu.IPUModel(num_ipus=N, tiles_per_ipu=16), "cpu": ipu.CPU()}

def share(x, dim=0):
    return np.split(np.asarray(x), d.num_instances(), dim)[index]

def expect(error, text, do):
    try:
        do()
    except error as found:
        assert text in str(found), found
    else:
        raise AssertionError(f"no {text}")
"""

# Momentum on a small network, with dropout: keys, donated arguments, replicas that differ.
TRAIN = """
def loss(params, x, y, key):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    kept = jax.random.bernoulli(jax.random.fold_in(key, lax.axis_index("replica")), 0.9, hidden.shape)
    return jnp.mean((jnp.where(kept, hidden, 0) @ params["w2"] - y) ** 2)

@ipu.jit(device=DEVICES[device], replicas=N, in_specs=(P(), P(), P("replica"), P("replica"), P()),
         out_specs=(P(), P(), P(), P("replica")), donate_argnums=(0, 1), options=ipu.Options(exact_splits=exact))
def step(params, momentum, x, y, key):
    own, grads = jax.value_and_grad(loss)(params, x, y, key)
    mean, grads = lax.pmean((own, grads), "replica")
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.02 * m, params, momentum), momentum, mean, own[None]

rng = np.random.default_rng(0)
x = rng.normal(size=(4 * N, 5)).astype(np.float32)
y = np.sin(x.sum(1, keepdims=True))
start = {"w1": rng.normal(size=(5, 7)), "b1": np.zeros(7), "w2": rng.normal(size=(7, 1))}
params = d.broadcast(jax.tree.map(lambda a: jnp.asarray(a + index, jnp.float32), start))
momentum = jax.tree.map(jnp.zeros_like, params)
means, owns = [], []
for number in range(steps):
    last, key = params, jax.random.fold_in(jax.random.key(0), number)
    params, momentum, mean, own = step(params, momentum, share(x), share(y), key)
    kept = [name for name, held in last.items() if not held.is_deleted()]
    assert not kept, f"step {number} was to delete {kept}"
    assert all(len(held.devices()) == 1 for held in jax.tree.leaves((params, mean, own)))
    means.append(mean)
    owns.append(own)
    print("step", number)
save(means=np.stack(means), owns=np.stack(owns), **params)
"""


# `None` in arguments and results; each call compares values that are not split, from any source.
NONE = """
@ipu.jit(device=DEVICES["cpu"], replicas=N, in_specs=(P(), P("replica"), None, {"a": None, "b": P()}),
         out_specs=({"w": P(), "scale": None}, P()), donate_argnums=0)
def step(state, x, mask, rest):
    assert mask is state["scale"] is rest["a"] is None
    w = state["w"] - 0.1 * lax.pmean(jnp.mean(x * state["w"]), "replica") * rest["b"]
    return {"w": w, "scale": None}, mask

whole = np.arange(24.0, dtype=np.float32).reshape(8, 3)
state, x, want = {"w": jnp.ones(3), "scale": None}, share(whole), np.ones(3)
for n in range(4):
    want = want - 0.1 * np.mean(whole * want) * n
    state, mask = step(state, x, None, {"a": None, "b": np.float32(n)})
    if n == 2 and index:
        state = jax.tree.map(np.array, state)  # as from a checkpoint: equal, but not what the call returned
assert mask is state["scale"] is None
np.testing.assert_allclose(state["w"], want, rtol=1e-5)
# A weakly typed array yields to the type of the other operand, as in one process.
scaled = ipu.jit(lambda x, scale: x * scale, device=DEVICES["cpu"], replicas=N, in_specs=(P("replica"), P()),
                 out_specs=P("replica"))(jnp.ones(N // d.num_instances(), jnp.bfloat16), jnp.asarray(2.0))
assert scaled.dtype == jnp.bfloat16
save(w=state["w"])
"""


# Every kind of collective, also in control flow; values of all kinds of arguments and results.
COLLECTIVES = """
def every_kind(x, table, scale, key, count, *, bias):
    r = lax.axis_index("replica")
    pairs = [(i, (i + 1) % N) for i in range(N)]
    halves = [[i for i in range(N) if i % 2 == side] for side in (0, 1)]
    def body(carry, row):
        carry = carry + lax.pmean(row * (r + 1), "replica")
        return carry, lax.psum(carry, "replica")
    carry, pushed = lax.scan(body, jnp.zeros(3), x[:2])
    total = lax.psum(x.sum(), "replica")
    chosen = lax.cond(total > 0, lambda: lax.pmax(x.sum(), "replica"), lambda: lax.pmin(x.sum(), "replica"))
    turned, times = lax.while_loop(lambda s: lax.pmax(s[0].sum(), "replica") < 100.0,
                                   lambda s: (s[0] + lax.psum(jnp.abs(x[0]), "replica"), s[1] + 1), (jnp.abs(x[1]), 0))
    wide = jnp.broadcast_to(x.sum(0), (2 * N, 3)) * (r + 1.0)
    same = {
        "sum": lax.psum(x, "replica"), "max": lax.pmax(x.astype(jnp.int32), "replica"), "total": total,
        "chosen": chosen, "gathered": lax.all_gather(x[0], "replica"), "carry": carry, "times": times,
        "noise": jax.random.normal(key, (2,)) * scale + bias, "count": count + 1,
    }
    own = {
        "ring": lax.ppermute(x[0], "replica", pairs)[None], "part": lax.ppermute(x[0], "replica", pairs[:1])[None],
        "scattered": lax.psum_scatter(wide, "replica", tiled=True),
        "swapped": lax.all_to_all(wide, "replica", 0, 1, tiled=True),
        "index": r[None], "pushed": pushed[None], "turned": turned[None], "flag": (x.sum() > 0)[None],
        "halves": lax.psum(x[0], "replica", axis_index_groups=halves)[None],
        "own noise": jax.random.uniform(jax.random.fold_in(key, r), (1, 2)),
    }
    return same, own, table * 2

specs = dict(replicas=N, in_specs=(P("replica"), P(None, "replica")), out_specs=(P(), P("replica"), P(None, "replica")))
specs["in_specs"] += (P(), P(), P())
rng = np.random.default_rng(0)
x, table = rng.normal(size=(3 * N, 3)).astype(np.float32), np.arange(6 * N, dtype=np.float16).reshape(3, 2 * N)
saved = {}
for name, device in DEVICES.items():
    fun = ipu.jit(every_kind, device=device, **specs)
    for turn in range(2):
        args = share(x), jnp.asarray(share(table, 1)), 2.5, jax.random.key(turn), jnp.asarray(3)
        same, own, cut = fun(*args, bias=jnp.full(2, 0.5))
    saved |= {f"{name} same {k}": v for k, v in same.items()} | {f"{name} own {k}": v for k, v in own.items()}
    saved[f"{name} cut"] = cut
save(**saved)
"""


# An optimiser of which each replica, and so each instance, keeps its part; stages on two IPUs a replica; accumulation.
SHARDED = """
import optax

def loss(params, x, y):
    with ipu.stage(0):
        hidden = jnp.tanh(x @ params["w1"])
    with ipu.stage(1):
        return jnp.mean((hidden @ params["w2"] - y) ** 2)

optimizer = ipu.optim.shard(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), replicas=N, min_elements=8)
rng = np.random.default_rng(0)
x = rng.normal(size=(8 * N, 5)).astype(np.float32)
y = np.sin(x.sum(1, keepdims=True))
params = {"w1": rng.normal(size=(5, 7)), "w2": rng.normal(size=(7, 1))}
params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), params)
whole = optimizer.init(params)
specs = ipu.optim.shard_specs(whole)
state = d.share(whole, specs)

@ipu.jit(device=ipu.IPUModel(num_ipus=2 * N, tiles_per_ipu=16), replicas=N, donate_argnums=(0, 1),
         in_specs=(P(), specs, P("replica"), P("replica")), out_specs=(P(), specs, P()))
def step(params, state, x, y):
    grad = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4, batch_argnums=(1, 2))
    value, grads = grad(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, lax.pmean(value, "replica")

losses = []
for _ in range(10):
    params, state, value = step(params, state, *d.share((x, y)))
    losses.append(value)
held = ipu.optim.unshard(d.gather(state, specs))
save(losses=np.stack(losses), **params, **{f"state {n}": leaf for n, leaf in enumerate(jax.tree.leaves(held))})
"""


# A mesh of two IPUs in each replica: weights split over it, rows over the replicas, and results split over both.
MESH = """
MESH = jax.sharding.AbstractMesh((2,), ("model",))

def layer(w, x):
    part = lambda w, x: lax.psum_scatter(x @ w, "model", scatter_dimension=1, tiled=True)
    return jax.shard_map(part, mesh=MESH, in_specs=(P("model"), P(None, "model")), out_specs=P(None, "model"))(w, x)

@ipu.jit(device=ipu.IPUModel(num_ipus=2 * N, tiles_per_ipu=8), replicas=N, in_specs=(P(), P("replica")),
         out_specs=(P(), P(), P("replica"), P(None, "replica")), donate_argnums=0)
def step(w, x):
    value, grads = jax.value_and_grad(lambda w: jnp.mean(layer(w, jnp.tanh(layer(w, x))) ** 2))(w)
    mean, grads = lax.pmean((value, grads), "replica")
    rows = layer(w, x)
    return w - 0.1 * grads, mean, rows, rows.T

rng = np.random.default_rng(0)
x, w = rng.normal(size=(2 * N, 6)).astype(np.float32), d.broadcast(jnp.asarray(rng.normal(size=(6, 6)), jnp.float32))
for _ in range(3):
    w, mean, rows, columns = step(w, share(x))
save(w=w, mean=mean, **dict(zip(("rows", "columns"), d.gather((rows, columns), (P("replica"), P(None, "replica"))))))
"""


# --- the stages of a function -----------------------------------------------------------------------------------------

STAGES = """
@ipu.jit(device=DEVICES["model"], replicas=N, in_specs=(P(), P("replica")), out_specs=(P(), P("replica")))
def fun(w, x):
    return lax.pmean(jnp.sum(x * w), "replica"), x + w

w, x = jnp.arange(3.0), share(np.arange(6.0 * N, dtype=np.float32).reshape(2 * N, 3))
shape = jax.ShapeDtypeStruct((2 * N // d.num_instances(), 3), jnp.float32)
compiled = fun.lower(jax.ShapeDtypeStruct((3,), jnp.float32), shape).compile()
assert compiled.memory_analysis().max_tile_bytes > 0
first, second = compiled(w, x), fun(w, x)
for a, b in zip(first, second):
    np.testing.assert_allclose(a, b, rtol=1e-6)
expect(ipu.ArgumentError, "another shape or dtype of its argument x", lambda: compiled(w, x[:1]))
alone = ipu.jit(lambda x: jnp.sum(x) + index, device=ipu.IPUModel(tiles_per_ipu=16))
assert alone(jnp.ones(3 + index)) == 3 + 2 * index, "a function of one replica is an instance's own business"
if d.num_instances() > 1:
    expect(ipu.ArgumentError, "their run cannot be profiled", lambda: compiled.profile_call(w, x))
    expect(ipu.ArgumentError, "no transformation of JAX can trace", lambda: jax.grad(lambda w: fun(w, x)[0])(w))
    expect(ipu.ArgumentError, "cannot be split over its 2 replicas", lambda: fun(w, x[:3]))
    odd = ipu.jit(lambda x: x, device=DEVICES["model"], replicas=3)
    expect(ipu.ArgumentError, "3 replicas of <lambda> cannot be shared equally by 2 instances", lambda: odd(w))
    prints = lambda x: (jax.debug.callback(print, x), x)[1]
    calling = ipu.jit(prints, device=DEVICES["model"], replicas=N)
    expect(ipu.IpuError, "", lambda: calling(w))
save(mean=first[0], own=first[1], cycles=np.asarray(compiled.profile.cycles))
"""


# Momentum in the memory of the host.
HOSTED = """
host = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

@ipu.jit(device=DEVICES["model"], replicas=N, in_specs=(P(), P("replica")), out_specs=P())
def step(momentum, x):
    mean = lax.pmean(x.sum(0), "replica")
    return jax.device_put(jax.device_put(momentum, DEVICE) * 0.9 + mean, HOST)

momentum = jax.device_put(np.ones((4, 3), np.float32), host)
x = share(np.arange(6 * N, dtype=np.float32).reshape(2 * N, 3))
shape = jax.ShapeDtypeStruct((4, 3), np.float32, sharding=host)
assert step.lower(shape, x).compile().profile.streaming_memory_bytes == 96
for _ in range(2):
    momentum = step(momentum, x)
assert momentum.sharding.memory_kind == "pinned_host"
save(momentum=np.asarray(momentum))
"""


PROGRAMS: dict[str, tuple[dict[str, object], str]] = {
    "training": ({"steps": 200, "device": "model", "exact": False}, TRAIN),
    "training in plain JAX": ({"steps": 200, "device": "cpu", "exact": False}, TRAIN),
    # Collectives then run as their rounds of copies between replicas.
    "the very splits of the machine": ({"steps": 3, "device": "model", "exact": True}, TRAIN),
    "none": ({}, NONE),
    "collectives": ({}, COLLECTIVES),
    "sharded optimiser and pipeline": ({}, SHARDED),
    "mesh in each replica": ({}, MESH),
    "stages of a function": ({}, STAGES),
    "state on the host": ({}, HOSTED),
}
ALL = """
import functools
def save_as(name, **arrays):
    np.savez(f"{sys.argv[1]}.{name}.{index}.npz", **arrays)
for name, (settings, program) in PROGRAMS.items():
    exec(program, {**globals(), **settings, "save": functools.partial(save_as, name)})
"""


def results(run: Runner, folder: Path, instances: int, *names: str) -> dict[str, list[dict[str, np.ndarray]]]:
    """Arrays that each instance saved in programs of four replicas."""
    base = str(folder / f"by{instances}")
    source = f"{START}PROGRAMS = { ({name: PROGRAMS[name] for name in names})!r}\n{ALL}"
    assert run(source, "--replicas", "4", arguments=[base], instances=instances) == 0, run.err
    assert clear_of(run.printed("pid"))
    return {name: [dict(np.load(f"{base}.{name}.{index}.npz")) for index in range(instances)] for name in names}


def whole(parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """An array from the parts of all instances, which are equal to the bit if they are not split."""
    split = [axis for axis, (part, of_all) in enumerate(zip(parts[0].shape, shape, strict=True)) if part != of_all]
    assert split or all(np.array_equal(part, parts[0], equal_nan=part.dtype.kind == "f") for part in parts)
    return np.concatenate(parts, split[0]) if split else parts[0]


@pytest.mark.parametrize(("instances", "names"), [(2, tuple(PROGRAMS)), (4, ("the very splits of the machine",))])
def test_distributed_numbers_are_those_of_one_process(
    run: Runner, tmp_path: Path, instances: int, names: tuple[str, ...]
):
    one = results(run, tmp_path, 1, *names)
    several = results(run, tmp_path, instances, *names)
    assert all(one[name][0] for name in names)
    for name in names:
        for key, want in one[name][0].items():
            got = whole([arrays[key] for arrays in several[name]], want.shape)
            assert got.dtype == want.dtype and got.shape == want.shape, (name, key)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=f"{key} of {name}")


# --- instances that disagree ------------------------------------------------------------------------------------------

FUNCTION = """
@ipu.jit(device=DEVICES["model"], replicas=N, in_specs=(P(), P("replica")), static_argnums=2)
def step(params, batch, power=1):
    return lax.pmean(jnp.sum(params["w"] * batch ** power), "replica")
params, batch = {"w": jnp.ones(3)}, jnp.ones((2, 3))
"""
DISAGREEMENTS = {
    "shapes": (
        "step(params, jnp.ones((2 + 2 * index, 3)))",
        "instances disagree on batch of step",
        "got: float32[2,3] on instance 0; float32[4,3] on instance 1",
    ),
    "dtypes": (
        'step({"w": jnp.ones(3, jnp.int32 if index else jnp.float32)}, batch)',
        "instances disagree on params['w'] of step",
        "got: float32[3] on instance 0; int32[3] on instance 1",
    ),
    "values": (
        'step({"w": jnp.ones(3) * index}, batch)',
        "instances disagree on the values of params['w'] of step",
        "params = ipu.distributed.broadcast(params)",
    ),
    "values of a later call": (
        'for n in range(5): step({"w": jnp.arange(3.0) + n * (n == 3) * index}, batch); print("called", n)',
        "instances disagree on the values of params['w'] of step",
        "on instance 0; checksum",
    ),
    "values given by name": (
        'call = ipu.jit(lambda x, *, scale: lax.psum(x * scale, "replica"), device=DEVICES["cpu"], replicas=N)\n'
        "call(1.0, scale=jnp.float32(2)), call(1.0, scale=jnp.float32(2 + index))",
        "instances disagree on the values of scale",
        "got: 2.0 on instance 0; 3.0 on instance 1",
    ),
    "settings": (
        "step(params, batch, 1 + index)",
        "instances disagree on static argument power of step",
        "got: 1 on instance 0; 2 on instance 1",
    ),
    "programs": (
        'ipu.jit(lambda x: lax.psum(x * (index + 2.5), "replica"), device=DEVICES["model"], replicas=N)(1.0)',
        "instances disagree on equation",
        "try: the function must be the same on all instances",
    ),
    "constants": (
        'ipu.jit(lambda x: lax.psum(x * rows, "replica"), device=DEVICES["model"], replicas=N)(1.0)',
        "instances disagree on value 0 that it closes over",
        "try: the function must be the same on all instances",
    ),
    "functions": (
        "step(params, batch) if index else ipu.distributed.all_reduce(1.0)",
        "instances are not at the same point of the program",
        'got: ipu.distributed.all_reduce "mean" on instance 0; step on instance 1',
    ),
}


DISAGREE = """
rows = jnp.arange(4.0) + index
for name, statement in STATEMENTS.items():
    try:
        exec(statement)
    except ipu.ArgumentError as error:
        print(f"case {name}:", str(error).replace(chr(10), " "))
"""


def test_distributed_disagreements_are_errors_on_all(run: Runner):
    """Before anything is computed; processes that catch them go on together, until one ends early."""
    statements = {name: statement for name, (statement, *_) in DISAGREEMENTS.items()}
    source = f"{START}{FUNCTION}STATEMENTS = {statements!r}\n{DISAGREE}\nfor _ in range(5 - index): step(params, batch)"
    assert run(source, "--replicas", "2", "--timeout", "100") == 1, run.err
    for name, (_, *texts) in DISAGREEMENTS.items():
        lines = [line for line in run.out if f"case {name}:" in line]
        assert len(lines) == 2 and all(text in line for line in lines for text in texts), (name, lines)
    assert sorted(set(run.printed("called"))) == [0, 1, 2]
    end = "got: step on instance 0; the end of the script on instance 1"
    assert sum(end in line for line in run.err) == 2, run.err
    assert clear_of(run.printed("pid"))


def test_distributed_long_programs_are_compared_too(run: Runner):
    """Before XLA compiles them."""
    chain = """
def chain(x):
    for n in range(4000):
        x = lax.cond(x > 0, lambda x: x + 1, lambda x: x - 1, x) if n == 3000 + index else jnp.sin(x) * 1.5
    return x
ipu.jit(chain, device=DEVICES["cpu"], replicas=N)(0.5)
"""
    assert run(START + chain, "--replicas", "2", "--timeout", "200") == 1
    assert any("instances disagree on equation" in line for line in run.err)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_distributed_killed_instances_leave_nothing(run: Runner):
    """One instance is killed, at a random step or before the first, five times."""
    rng = random.Random(0)
    source = f"{START}steps, device, exact, save = 100000, 'model', False, print\n{TRAIN}"
    for turn in range(5):
        process = run.start(source, "--replicas", "4")
        assert process.stdout is not None and process.stderr is not None
        pids: dict[int, int] = {}
        after = rng.choice([-1, rng.randrange(400)])  # -1: as soon as both are there
        while len(pids) < 2 or after >= 0:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            if "pid" in line:
                pids[int(line[1])] = int(line.split("pid")[1])
            elif f"step {after}" in line:
                break
        victim = rng.randrange(2)
        assert len(in_sessions(pids.values())) >= 2
        time.sleep(rng.random() / 10)
        os.kill(pids[victim], signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 128 + signal.SIGKILL, (turn, err)
        assert f"ipujax run: instance {victim} was killed by signal 9 (SIGKILL)" in err, (turn, err)
        assert "has been deleted" not in err, "the other one says why it failed, not that its arguments are gone"
        assert clear_of(pids.values()), turn


def test_distributed_stuck_instance_ends_all(run: Runner):
    steps = "import time\nfor n in range(10):\n    if n == 5 and index: time.sleep(10000)\n    step(params, batch)"
    source = START + FUNCTION + steps
    assert run(source, "--replicas", "2", "--timeout", "25") == 124  # on a busy machine imports are silent for long
    assert any("instance 0: last sign of life" in line and "it came to step" in line for line in run.err), run.err
    assert any("in <module>" in line and line.startswith("[1]") for line in run.err), "where it is"
    assert clear_of(run.printed("pid"))
