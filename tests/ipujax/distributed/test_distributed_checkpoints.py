"""Checkpoints by Orbax, restored on another number of processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ipujax.distributed.distributed_helpers import Runner, run

__all__ = ["run"]  # a fixture

# Six steps, or three and a checkpoint, or three from it. Each replica keeps its part of the optimiser's state.
TRAIN = """
import sys
import ipujax as ipu
ipu.distributed.init()
import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp
from jax import lax
from jax.sharding import PartitionSpec as P

d, N = ipu.distributed, 4
folder, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
optimizer = ipu.optim.shard(optax.adam(1e-2), replicas=N, min_elements=8)

def loss(params, x, y):
    with ipu.stage(0):
        hidden = jnp.tanh(x @ params["w1"])
    with ipu.stage(1):
        return jnp.mean((hidden @ params["w2"] - y) ** 2)

rng = np.random.default_rng(0)
x = rng.normal(size=(4 * N, 6)).astype(np.float32)
y = np.sin(x.sum(1, keepdims=True))
params = jax.tree.map(jnp.float32, {"w1": rng.normal(size=(6, 8)), "w2": rng.normal(size=(8, 1))})
state = optimizer.init(params)
specs = ipu.optim.shard_specs(state)
whole = {"params": params, "state": state}
if first:
    with ocp.StandardCheckpointer() as checkpointer:
        whole = checkpointer.restore(f"{folder}/step{first}", jax.tree.map(np.asarray, whole))
params, state = whole["params"], d.share(whole["state"], specs)

@ipu.jit(device=ipu.IPUModel(num_ipus=2 * N, tiles_per_ipu=16), replicas=N,
         in_specs=(P(), specs, P("replica"), P("replica")), out_specs=(P(), specs))
def step(params, state, x, y):
    grads = ipu.pipeline(jax.grad(loss), micro_batches=2, batch_argnums=(1, 2))(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

for _ in range(first, last):
    params, state = step(params, state, *d.share((x, y)))
whole = jax.tree.map(np.asarray, {"params": params, "state": d.gather(state, specs)})
if last == 6:
    leaves = {str(n): leaf for n, leaf in enumerate(jax.tree.leaves(whole))}
    np.savez(f"{folder}/{d.num_instances()}.{d.instance_index()}.npz", **leaves)
else:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/step{last}", whole)
"""


@pytest.mark.parametrize(("saving", "restoring"), [(2, 1), (1, 2)])
def test_distributed_checkpoint_is_restored_on_another_number_of_processes(
    run: Runner, tmp_path: Path, saving: int, restoring: int
):
    pytest.importorskip("orbax.checkpoint")
    for instances, first, last in ((saving, 0, 3), (restoring, 3, 6), (saving, 0, 6)):
        arguments = [str(tmp_path), str(first), str(last)]
        assert run(TRAIN, "--timeout", "200", arguments=arguments, instances=instances) == 0, run.err
    want = dict(np.load(tmp_path / f"{saving}.0.npz"))
    assert len(want) > 4
    for index in range(restoring):
        got = dict(np.load(tmp_path / f"{restoring}.{index}.npz"))
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-6, atol=1e-6)
