"""Bubble and cycles of pipelines whose stages have a mesh, against one IPU a stage and the closed form.

    python benchmarks/sharded_pipelines.py [--stages 2 4 8 16] [--shards 1 2 4] [--micro-batches 16]

A stage is two dense layers (half precision, tensor parallelism after Megatron: one all-reduce in the forward part, one
in the backward part of each stage but the first), trained with `1f1b` in both kinds of global exchange. Shapes are
enough; nothing is run. A collective stops the IPUs of its own stage, so that, with several shards a stage,

- the bubble is at most 3 points above that of one IPU a stage;
- in buffered exchange it is within 3 points of (S − 1) / (m + S − 1), for S stages and m micro-batches;
- the step takes fewer cycles than with one IPU a stage.

Exits with 1 when a bar is missed.
Source of the closed form: Narayanan et al., arXiv 2104.04473.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.target import GlobalExchange

MOST_POINTS = 0.03
WIDTH = 256
ROWS = 128  # of a micro-batch
TILES = 64  # of an IPU


@dataclass(frozen=True)
class Row:
    """A pipeline and what its profile says."""

    exchange: GlobalExchange
    stages: int
    shards: int
    micro_batches: int
    bubble: float
    cycles: int

    @property
    def closed_form(self) -> float:
        """Bubble of the schedule, of equal stages and free exchanges."""
        return (self.stages - 1) / (self.micro_batches + self.stages - 1)

    def missed(self, base: Row) -> list[str]:
        """Bars that it misses, compared with one IPU a stage."""
        bars = {
            "bubble of one shard": self.bubble <= base.bubble + MOST_POINTS,
            "closed form": self.exchange == "lockstep" or abs(self.bubble - self.closed_form) <= MOST_POINTS,
            "cycles of one shard": self.cycles < base.cycles,
        }
        return [] if self.shards == 1 else [name for name, is_met in bars.items() if not is_met]


def measure(exchange: GlobalExchange, stages: int, shards: int, micro_batches: int) -> Row:
    """Compiles a training step and reads its profile."""
    mesh = ipu.make_mesh((shards,), ("model",), axis_types=(AxisType.Auto,))

    def split(w: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, spec)) if shards > 1 else w

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for stage, (up, down) in enumerate(weights):
            with ipu.stage(stage):
                x = jnp.tanh(x @ split(up, P(None, "model"))) @ split(down, P("model"))
        with ipu.stage(stages - 1):
            return (x.astype(jnp.float32) ** 2).mean()

    step = ipu.pipeline(jax.value_and_grad(loss), micro_batches=micro_batches, schedule="1f1b")
    device = ipu.IPUModel(num_ipus=stages * shards, tiles_per_ipu=TILES, global_exchange=exchange)
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float16)
    batch = jax.ShapeDtypeStruct((micro_batches * ROWS, WIDTH), jnp.float16)
    profile = ipu.jit(step, device=device).profile([(weight, weight)] * stages, batch)
    (pipeline,) = profile.pipelines
    return Row(exchange, stages, shards, micro_batches, pipeline.bubble_share, profile.cycles)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each pipeline; returns the number of missed bars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument(
        "--shards", type=int, nargs="+", default=[1, 2, 4], help="IPUs of a stage; 1 is always measured"
    )
    parser.add_argument("--micro-batches", type=int, default=16)
    args = parser.parse_args(argv)
    num_missed = 0
    print("exchange  stages  shards  bubble  closed form      cycles  missed")
    for exchange in get_args(GlobalExchange):
        for stages in args.stages:
            rows = [measure(exchange, stages, shards, args.micro_batches) for shards in sorted({1, *args.shards})]
            for row in rows:
                missed = row.missed(rows[0])
                num_missed += len(missed)
                figures = f"{row.bubble:8.1%}{row.closed_form:13.1%}{row.cycles:12,}"
                print(f"{exchange:8}{stages:8}{row.shards:8}{figures}  {', '.join(missed) or 'none'}", flush=True)
    print(f"{num_missed} bars missed")
    return num_missed


if __name__ == "__main__":
    sys.exit(min(1, main()))
