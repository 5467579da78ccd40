"""Cycles, memory and lowering time of whole training steps: the figures by which changes of the planners are judged.

    python benchmarks/whole_steps.py --json old.json
    python benchmarks/whole_steps.py --against old.json

The models, target and donation are fixed here and nowhere else: MLP and CNN of `examples/digits.py` (batch 64),
a 2-layer transformer (width 128, batch 8 of 64 tokens) and an LSTM (16 steps, 64 units, batch 16), float32, Adam, state
donated, one Mk2. Cycles are those of the compiled step without host exchange. Lowering is all from jaxpr to executable,
without tracing and XLA, as the median of processes that each lower one step, so that no cache is warm. On a busy
machine its CPU seconds (with tracing) are the better measure. Only names that every version of the package has are
used, so the same file measures an older checkout by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import ipujax as ipu

ARCH = "mk2"
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "digits.py"
DIGITS_BATCH = 64
LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCES, LENGTH = 2, 128, 4, 256, 8, 64
STEPS, UNITS, FEATURES, CLASSES, LSTM_BATCH = 16, 64, 64, 10, 16

RATIOS = ("cycles", "max_tile_bytes", "lowering_seconds", "cpu_seconds")

Struct = jax.ShapeDtypeStruct
Loss = Callable[..., jax.Array]
Figures = dict[str, float]


def load_example() -> ModuleType:
    """The module `examples/digits.py`."""
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def floats(**shapes: tuple[int, ...]) -> dict[str, Struct]:
    """Parameters of the given shapes."""
    return {name: Struct(shape, np.float32) for name, shape in shapes.items()}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def digits(name: str) -> tuple[Loss, Any, tuple[Struct, ...]]:
    """A model of the example: loss, shapes of its parameters and of a batch."""
    example = load_example()
    model, shapes = example.MODELS[name]

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model(params, images), labels)

    batch = Struct((DIGITS_BATCH, example.SIDE, example.SIDE, 1), np.float32), Struct((DIGITS_BATCH,), np.int32)
    return loss, jax.eval_shape(lambda: example.init(shapes)), batch


def transformer() -> tuple[Loss, Any, tuple[Struct, ...]]:
    """A causal language model over bytes: pre-norm blocks of attention and a GELU layer of four times the width."""
    block = floats(
        qkv=(WIDTH, 3 * WIDTH), out=(WIDTH, WIDTH), up=(WIDTH, 4 * WIDTH), down=(4 * WIDTH, WIDTH),
        up_bias=(4 * WIDTH,), down_bias=(WIDTH,), scale1=(WIDTH,), shift1=(WIDTH,), scale2=(WIDTH,), shift2=(WIDTH,),
    )  # fmt: skip
    params = floats(tokens=(VOCABULARY, WIDTH), places=(LENGTH, WIDTH), head=(WIDTH, VOCABULARY))

    def norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift

    def attention(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = (part.reshape(*part.shape[:2], HEADS, -1) for part in jnp.split(x @ p["qkv"], 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["tokens"][ids] + params["places"]
        for p in params["blocks"]:
            x = x + attention(p, norm(x, p["scale1"], p["shift1"]))
            hidden = jax.nn.gelu(norm(x, p["scale2"], p["shift2"]) @ p["up"] + p["up_bias"])
            x = x + hidden @ p["down"] + p["down_bias"]
        return cross_entropy(x @ params["head"], labels)

    ids = Struct((SEQUENCES, LENGTH), np.int32)
    return loss, {**params, "blocks": [block] * LAYERS}, (ids, ids)


def lstm() -> tuple[Loss, Any, tuple[Struct, ...]]:
    """A classifier of sequences: one LSTM by `lax.scan`, and a dense layer on its last output."""
    params = floats(wx=(FEATURES, 4 * UNITS), wh=(UNITS, 4 * UNITS), b=(4 * UNITS,), w=(UNITS, CLASSES))

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ params["wx"] + h @ params["wh"] + params["b"], 4, 1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((LSTM_BATCH, UNITS))
        (h, _), _ = lax.scan(cell, (zeros, zeros), x)
        return cross_entropy(h @ params["w"], labels)

    return loss, params, (Struct((STEPS, LSTM_BATCH, FEATURES), np.float32), Struct((LSTM_BATCH,), np.int32))


MODELS: dict[str, Callable[[], tuple[Loss, Any, tuple[Struct, ...]]]] = {
    "digits mlp": partial(digits, "mlp"),
    "digits cnn": partial(digits, "cnn"),
    "transformer": transformer,
    "lstm": lstm,
}


def measure(name: str) -> Figures:
    """Figures of one step, lowered once in this process."""
    loss, params, batch = MODELS[name]()
    optimizer = optax.adam(1e-3)

    def train_step(params: Any, opt_state: Any, *batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    device = ipu.IPUModel(num_ipus=1, arch=ARCH)
    # What happens once in a process, as imports inside functions, is not measured.
    ipu.jit(lambda x: x + 1, device=device).lower(Struct((4,), np.float32)).compile()
    # Whether a step fits is one of the figures.
    step = ipu.jit(train_step, device=device, donate_argnums=(0, 1), options=ipu.Options(allow_out_of_memory=True))
    start = time.process_time()
    compiled = step.lower(params, jax.eval_shape(optimizer.init, params), *batch).compile()
    cpu_seconds = time.process_time() - start
    profile = compiled.profile
    return {
        "cycles": profile.cycles - profile.phase_cycles["host_exchange"],
        "max_tile_bytes": int(profile.memory.max_tile_bytes),
        "fits": float(profile.memory.max_tile_bytes <= device.target.bytes_per_tile),
        "lowering_seconds": sum(spent for part, spent in compiled.timings.items() if part != "trace"),
        "cpu_seconds": cpu_seconds,
    }


def median_figures(name: str, repetitions: int) -> Figures:
    """Figures of a step, its lowering the median of processes of their own.

    Raises:
        AssertionError: two processes disagree on cycles or bytes.
    """
    spawn = get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn, max_tasks_per_child=1) as pool:
        results = list(pool.map(measure, [name] * repetitions))
    times = {
        key: statistics.median(result.pop(key) for result in results) for key in ("lowering_seconds", "cpu_seconds")
    }
    assert all(result == results[0] for result in results), results
    return {**results[0], **times}


def geometric_mean(values: list[float]) -> float:
    """The nth root of the product."""
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    """Prints a row a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append", help="these models alone")
    parser.add_argument("--repetitions", type=int, default=3, help="lowerings of each step")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--against", type=Path, help="figures of another version, for ratios to them")
    arguments = parser.parse_args()
    old = json.loads(arguments.against.read_text()) if arguments.against else {}
    print(f"{'':<12}{'cycles':>10}{'tile bytes':>12}{'fits':>6}{'lowering s':>12}{'CPU s':>8}", end="")
    print("".join(f"{key:>19} ×" for key in RATIOS) if old else "")
    new: dict[str, Figures] = {}
    ratios: dict[str, list[float]] = {key: [] for key in RATIOS}
    for name in arguments.only or MODELS:
        row = new[name] = median_figures(name, arguments.repetitions)
        print(f"{name:<12}{row['cycles']:>10,}{row['max_tile_bytes']:>12,}{'yes' if row['fits'] else 'NO':>6}", end="")
        print(f"{row['lowering_seconds']:>12.2f}{row['cpu_seconds']:>8.2f}", end="")
        if name in old:
            for key, values in ratios.items():
                values.append(row[key] / old[name][key])
                print(f"{values[-1]:>21.3f}", end="")
        print(flush=True)
    if ratios["cycles"]:
        print(f"{'geometric mean':<60}", *(f"{geometric_mean(values):>21.3f}" for values in ratios.values()), sep="")
    if arguments.json:
        arguments.json.write_text(json.dumps(new, indent=1) + "\n")


if __name__ == "__main__":
    main()
