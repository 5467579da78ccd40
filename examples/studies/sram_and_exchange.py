"""Looks for the front of memory against exchange width: machines that no other beats, for training steps of six models.

    python examples/studies/sram_and_exchange.py --processes 4 --folder sweeps

A chip has room for more memory on a tile or for a wider exchange. The example costs a training step on machines of
several sizes of both, each with the best of all plans (`ipu.sweep`, plan="best"), and prints the machines on the front:
those of which no other has less memory, a narrower exchange and fewer cycles. It also prints how many per cent fewer
cycles one per cent more of the exchange gives (`ipu.sensitivities`). Nothing is run.

With a folder, costs are kept there as they come, so that a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import ipujax as ipu

RATE = 0.1
Params = dict[str, Any]
BATCH, WIDTH, STEPS, CLASSES = 32, 64, 16, 16


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    """An array of which only the shape is known."""
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


# --- models: losses of parameters and a batch -------------------------------------------------------------------------


def perceptron(p: Params, x: jax.Array) -> jax.Array:
    """Three layers, and a sum of squares."""
    return jnp.mean((jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"]) @ p["c"]) ** 2)


def autoencoder(p: Params, x: jax.Array) -> jax.Array:
    """A narrow layer, from which the input is to be found again."""
    return jnp.mean((jax.nn.sigmoid(jnp.tanh(x @ p["a"]) @ p["b"]) - x) ** 2)


def convolution(p: Params, x: jax.Array) -> jax.Array:
    """Two layers of 3 × 3 kernels over images."""
    for kernel in (p["a"], p["b"]):
        x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return jnp.mean(x.mean((1, 2)) ** 2)


def recurrence(p: Params, x: jax.Array) -> jax.Array:
    """A recurrent cell over a sequence."""
    cell = lambda h, row: (jnp.tanh(row @ p["a"] + h @ p["b"]), None)  # noqa: E731
    return jnp.mean(lax.scan(cell, jnp.zeros((BATCH, WIDTH)), x)[0] ** 2)


def attention(p: Params, x: jax.Array) -> jax.Array:
    """A layer of attention of all positions to all."""
    query, key, value = (x @ p[name] for name in "abc")
    return jnp.mean((jax.nn.softmax(query @ key.T / WIDTH**0.5) @ value) ** 2)


def classifier(p: Params, x: jax.Array) -> jax.Array:
    """One layer, whose largest result is to be the first."""
    return -jnp.mean(jax.nn.log_softmax(x @ p["a"])[:, 0])


MODELS: dict[str, tuple[Callable[[Params, jax.Array], jax.Array], Params, jax.ShapeDtypeStruct]] = {
    "perceptron": (perceptron, {name: shape(WIDTH, WIDTH) for name in "abc"}, shape(BATCH, WIDTH)),
    "autoencoder": (autoencoder, {"a": shape(WIDTH, 8), "b": shape(8, WIDTH)}, shape(BATCH, WIDTH)),
    "convolution": (convolution, {"a": shape(3, 3, 4, 16), "b": shape(3, 3, 16, 16)}, shape(4, 8, 8, 4)),
    "recurrence": (recurrence, {name: shape(WIDTH, WIDTH) for name in "ab"}, shape(STEPS, BATCH, WIDTH)),
    "attention": (attention, {name: shape(WIDTH, WIDTH) for name in "abc"}, shape(BATCH, WIDTH)),
    "classifier": (classifier, {"a": shape(WIDTH, CLASSES)}, shape(BATCH, WIDTH)),
}


class Step:
    """A training step of a model, which processes can import by the model's name."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.__name__ = f"{model}_step"

    def __call__(self, params: Params, x: jax.Array) -> Params:
        gradients = jax.grad(MODELS[self.model][0])(params, x)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and self.model == other.model

    def __hash__(self) -> int:
        return hash(self.model)


# --- study ------------------------------------------------------------------------------------------------------------


def front(model: str, args: argparse.Namespace, executor: Any) -> ipu.Sweep:
    """Sweeps a model over memory and exchange; prints and returns the machines on the front."""
    _, params, batch = MODELS[model]
    step = ipu.jit(Step(model), device=ipu.IPUModel(tiles_per_ipu=args.tiles), donate_argnums=0)
    grid = {"bytes_per_tile": [int(kib * 1024) for kib in args.memory], "exchange_bytes_per_cycle": args.exchange}
    path = None if args.folder is None else args.folder / f"{model}.jsonl"
    sweep = ipu.sweep(step, params, batch, grid=grid, plan="best", executor=executor, path=path)
    best = sweep.pareto("cycles", "bytes_per_tile", "exchange_bytes_per_cycle")
    elasticity = ipu.sensitivities(step, params, batch)["exchange_bytes_per_cycle"]
    fitting = sum(row["fits"] for row in sweep)
    print(f"{model}: {fitting} of {len(sweep)} machines fit, elasticity to the exchange {elasticity:+.2f}")
    for row in best:
        kib = row["bytes_per_tile"] / 1024
        print(
            f"    {kib:>6.0f} KiB a tile  {row['exchange_bytes_per_cycle']:>5.1f} B/cycle  {row['cycles']:>9,} cycles"
        )
    return best


def main(argv: Sequence[str] | None = None) -> dict[str, ipu.Sweep]:
    """Runs the study; returns the front of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--memory", nargs="+", type=float, default=[16, 32, 64, 624], help="KiB of a tile")
    parser.add_argument("--exchange", nargs="+", type=float, default=[2, 4, 8, 16], help="bytes a cycle and tile")
    parser.add_argument("--tiles", type=int, default=64, help="tiles of the chip")
    parser.add_argument("--processes", type=int, default=0, help="to compile in; 0 for this one alone")
    parser.add_argument("--folder", type=Path, help="where costs are kept")
    args = parser.parse_args(argv)
    if args.folder is not None:
        args.folder.mkdir(exist_ok=True)
    pool = ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) if args.processes else nullcontext()
    with pool as executor:
        return {model: front(model, args, executor) for model in args.models}


if __name__ == "__main__":
    main()
