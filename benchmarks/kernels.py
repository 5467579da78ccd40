"""Times one layer on the simulated machine: LSTM, 2D convolution, matrix product or attention, with synthetic data.

    python -m benchmarks.kernels lstm --hidden 512 --steps 25 --batch 64 --train
    python -m benchmarks.kernels conv2d --side 56 --channels 64 --filters 64 --dtype float16
    python -m benchmarks.kernels matmul --sweep columns 256 512 1024 --csv matmul.csv --plot matmul.png

Prints items a second, FLOP/s against the peak of the machine for the dtype, and the cycles of each phase. A sweep has a
line for each value of one option, and writes them as CSV and as a plot. With several IPUs each has a replica with its
own batch; in training their gradients are averaged. Only the program and its cost are computed, no results. Data are on
the IPU: the cycles of host exchange are printed, but are no part of the rates.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu

_PASSES = 3  # of products in training: forward, and a gradient for each operand
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kernel:
    """A layer.

    Args:
        apply: from parameters and the batch to the result.
        parameters: shapes by name.
        item: shape of one item of the batch.
        flops: floating-point operations of an item, forward.
    """

    apply: Callable[[dict[str, Any], Any], Any]
    parameters: Shapes
    item: tuple[int, ...]
    flops: int


@dataclass(frozen=True)
class Measurement:
    """Cost of one step."""

    items_per_second: float
    flops_per_second: float
    peak_share: float
    compute: int
    exchange: int
    global_exchange: int
    sync: int
    host_exchange: int
    tile_bytes: int


def lstm(args: argparse.Namespace) -> Kernel:
    """A layer over a sequence; the item is [steps, inputs]."""
    hidden = args.hidden
    inputs = args.inputs

    def cell(params: dict[str, Any], state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        h, c = state
        i, f, g, o = jnp.split(x @ params["input"] + h @ params["recurrent"] + params["bias"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def apply(params: dict[str, Any], batch: Any) -> Any:
        zeros = jnp.zeros((len(batch), hidden), batch.dtype)
        return lax.scan(lambda state, x: cell(params, state, x), (zeros, zeros), batch.swapaxes(0, 1))[1]

    shapes = {"input": (inputs, 4 * hidden), "recurrent": (hidden, 4 * hidden), "bias": (4 * hidden,)}
    return Kernel(apply, shapes, (args.steps, inputs), args.steps * 2 * 4 * hidden * (inputs + hidden))


def conv2d(args: argparse.Namespace) -> Kernel:
    """A convolution of stride 1, zeros around; the item is [side, side, channels]."""

    def apply(params: dict[str, Any], batch: Any) -> Any:
        return lax.conv_general_dilated(
            batch, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    kernel = args.kernel, args.kernel, args.channels, args.filters
    flops = 2 * args.side**2 * args.kernel**2 * args.channels * args.filters
    return Kernel(apply, {"kernel": kernel}, (args.side, args.side, args.channels), flops)


def matmul(args: argparse.Namespace) -> Kernel:
    """A dense layer without a bias; the item is a row."""
    shapes = {"weight": (args.inner, args.columns)}
    return Kernel(lambda params, batch: batch @ params["weight"], shapes, (args.inner,), 2 * args.inner * args.columns)


def attention(args: argparse.Namespace) -> Kernel:
    """Self-attention with its four projections; the item is [tokens, channels]."""
    tokens = args.tokens
    channels = args.channels
    heads = args.heads

    def apply(params: dict[str, Any], batch: Any) -> Any:
        q, k, v = jnp.split((batch @ params["projection"]).reshape(len(batch), tokens, heads, -1), 3, -1)
        scores = jnp.einsum("bthc,bshc->bhts", q, k) * (channels // heads) ** -0.5
        mixed = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v)
        return mixed.reshape(batch.shape) @ params["out"]

    shapes = {"projection": (channels, 3 * channels), "out": (channels, channels)}
    flops = 2 * tokens * channels * (4 * channels + 2 * tokens)
    return Kernel(apply, shapes, (tokens, channels), flops)


KERNELS: dict[str, tuple[Callable[[argparse.Namespace], Kernel], dict[str, int]]] = {
    "lstm": (lstm, {"inputs": 256, "hidden": 256, "steps": 25}),
    "conv2d": (conv2d, {"side": 28, "channels": 64, "filters": 64, "kernel": 3}),
    "matmul": (matmul, {"inner": 1024, "columns": 1024}),
    "attention": (attention, {"tokens": 128, "channels": 256, "heads": 4}),
}


def measured(args: argparse.Namespace) -> Measurement:
    """Compiles a step for the shapes of its arguments."""
    kernel = KERNELS[args.name][0](args)
    device = ipu.IPUModel(num_ipus=args.ipus, arch=args.arch)
    shapes = {name: jax.ShapeDtypeStruct(shape, args.dtype) for name, shape in kernel.parameters.items()}
    batch = jax.ShapeDtypeStruct((args.batch * args.ipus, *kernel.item), args.dtype)

    def train(params: dict[str, Any], x: Any) -> Any:
        def loss(params: dict[str, Any], x: Any) -> Any:
            return jnp.sum(jnp.square(kernel.apply(params, x)), dtype=jnp.float32)

        gradients, upstream = jax.grad(loss, (0, 1))(params, x)
        return (lax.pmean(gradients, "replica") if args.ipus > 1 else gradients), upstream

    replicated: dict[str, Any] = {}
    if args.ipus > 1:
        out = (P(), P("replica")) if args.train else P("replica")
        replicated = {"replicas": args.ipus, "in_specs": (P(), P("replica")), "out_specs": out}
    if args.name == "lstm" and args.ipus > 1 and not args.train:
        replicated["out_specs"] = P(None, "replica")  # its result has the steps first
    step = ipu.jit(train if args.train else kernel.apply, device=device, **replicated)
    profile = step.lower(shapes, batch).compile().profile
    phases = profile.phase_cycles
    target = profile.target
    seconds = (sum(phases.values()) - phases["host_exchange"]) / target.clock_hz
    flops = kernel.flops * args.batch * args.ipus * (_PASSES if args.train else 1) / seconds
    macs = target.fp16_amp_macs_per_cycle if args.dtype == "float16" else target.fp32_amp_macs_per_cycle
    peak = 2 * macs * target.tiles_per_ipu * target.clock_hz * args.ipus
    names = ("compute", "exchange", "global_exchange", "sync", "host_exchange")
    cycles = {name: int(phases[name]) for name in names}
    items = args.batch * args.ipus / seconds
    return Measurement(items, flops, flops / peak, tile_bytes=int(profile.memory.max_tile_bytes), **cycles)


def parser() -> argparse.ArgumentParser:
    """The command line: a kernel with its sizes, and the options of all kernels."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--batch", type=int, default=16, help="items of a replica")
    shared.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    shared.add_argument("--arch", default="mk2")
    shared.add_argument("--ipus", type=int, default=1, help="replicas, one an IPU")
    shared.add_argument("--train", action="store_true", help="forward and backward; else inference")
    shared.add_argument("--sweep", nargs="+", metavar=("option", "value"), help="an option and its values")
    shared.add_argument("--csv", type=Path, help="file for the lines of a sweep")
    shared.add_argument("--plot", type=Path, help="picture of a sweep")
    result = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    kernels = result.add_subparsers(dest="name", required=True)
    for name, (_, sizes) in KERNELS.items():
        kernel = kernels.add_parser(name, parents=[shared])
        for size, default in sizes.items():
            kernel.add_argument(f"--{size}", type=int, default=default)
    return result


def swept(args: argparse.Namespace, error: Callable[[str], Any]) -> tuple[str, list[int]]:
    """The option of a sweep and its values; the batch alone if there is no sweep."""
    if args.sweep is None:
        if args.csv or args.plot:
            error("--csv and --plot need --sweep")
        return "batch", [args.batch]
    option, *values = args.sweep
    options = ["batch", "ipus", *KERNELS[args.name][1]]
    if option not in options or not values or not all(value.isdigit() and int(value) for value in values):
        error(f"--sweep needs one of {', '.join(options)} and its values, positive whole numbers")
    return option, [int(value) for value in values]


def save_plot(path: Path, title: str, option: str, values: Sequence[int], rows: Sequence[Measurement]) -> None:
    """FLOP/s as a share of the peak, and cycles by phase, over the values of a sweep."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.5), layout="constrained")
    rate, cycles = figure.subplots(1, 2)
    rate.plot(values, [100 * row.peak_share for row in rows], marker="o")
    rate.set(title=title, xlabel=option, ylabel="% of peak FLOP/s", ylim=(0, None))
    names = ("compute", "exchange", "global_exchange", "sync")
    cycles.stackplot(values, [[getattr(row, name) for row in rows] for name in names], labels=names)
    cycles.set(xlabel=option, ylabel="cycles")
    cycles.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> list[Measurement]:
    """Measures, prints, and writes the files that are asked for."""
    command = parser()
    args = command.parse_args(arguments)
    if min(args.batch, args.ipus, *(getattr(args, size) for size in KERNELS[args.name][1])) < 1:
        command.error("sizes are positive")
    option, values = swept(args, command.error)
    mode = "training" if args.train else "inference"
    title = f"{args.name}, {mode}, {args.dtype}, {args.ipus} x {args.arch}"
    print(title)
    rows: list[Measurement] = []
    for value in values:
        row = measured(argparse.Namespace(**{**vars(args), option: value}))
        rows.append(row)
        phases = ", ".join(
            f"{name.replace('_', ' ')} {getattr(row, name):,}"
            for name in ("compute", "exchange", "global_exchange", "sync", "host_exchange")
        )
        rate = f"{row.items_per_second:,.0f} items/s, {row.flops_per_second / 1e12:.2f} TFLOP/s"
        print(f"{option} {value}: {rate} ({row.peak_share:.1%} of peak); cycles: {phases}")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [option, *asdict(rows[0])])
            writer.writeheader()
            writer.writerows({option: value, **asdict(row)} for value, row in zip(values, rows, strict=True))
    if args.plot:
        save_plot(args.plot, title, option, values, rows)
    return rows


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
