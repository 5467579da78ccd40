"""Optimised HLO of `ipu.jit` compared with that of `jax.jit`: operations that only one of them has.

    python benchmarks/hlo_diff.py
    python benchmarks/hlo_diff.py --only argsort --only gpt-4

Each function is compiled in both ways for the shapes of its arguments, and the operations of the optimised HLO are
counted by opcode, those inside fusions too: copies, transposes, converts and loops show differences in time. A row is a
case; it lists, for each opcode that differs, the numbers of `jax.jit` and of `ipu.jit`: of the traced function and of
the program that it was lowered to. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from models import COMPARED, MODELS, Model
from models.cnn import cnn
from models.recogniser import recogniser

import ipujax as ipu

_OPCODE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = .*? ([a-z][a-z0-9-]*)\(", re.MULTILINE)
_WIDTH = 24


@dataclass(frozen=True)
class Case:
    """A function and the shapes of its arguments.

    Args:
        fun: any function of arrays.
        args: their shapes.
        donate_argnums: the arguments whose memory may be reused.
        device: the machine.
        init: from a key to the first arguments; all are as their shapes when None.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()
    device: ipu.IPUModel = ipu.IPUModel()
    init: Callable[[jax.Array], tuple[Any, ...]] | None = None

    def arrays(self) -> tuple[Any, ...]:
        """Arguments: the initial state, random floating-point numbers from 0 to 1, and zeros for whole numbers."""
        rng = np.random.default_rng(0)

        def filled(x: jax.ShapeDtypeStruct) -> jax.Array:
            is_float = jnp.issubdtype(x.dtype, jnp.floating)
            return jnp.asarray(rng.random(x.shape) if is_float else np.zeros(x.shape), x.dtype)

        state = () if self.init is None else self.init(jax.random.key(0))
        return (*state, *jax.tree.map(filled, self.args[len(state) :]))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an array of single precision."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def keep_largest(weights: Sequence[jax.Array]) -> list[jax.Array]:
    """Weights of which the smaller half is set to zero, by a sort of each."""
    return [jnp.where(jnp.abs(w) < jnp.sort(jnp.abs(w).ravel())[w.size // 2], 0, w) for w in weights]


OPERATIONS: dict[str, Case] = {
    "x @ w.T": Case(lambda x, w: x @ w.T, (floats(16, 1024), floats(1024, 1024))),
    "x @ w.T, many rows": Case(lambda x, w: x @ w.T, (floats(8210, 1024), floats(1024, 1024))),
    "einsum tbi,gi->tbg": Case(partial(jnp.einsum, "tbi,gi->tbg"), (floats(100, 4, 256), floats(1024, 256))),
    "argsort": Case(jnp.argsort, (floats(235_200),)),
    "permutation": Case(lambda x: jax.random.permutation(jax.random.key(0), x), (floats(235_200),)),
    "pruning": Case(keep_largest, ([floats(64, 256)] * 4,)),
}


def of_model(make: Callable[..., Model]) -> Case:
    """The training step of a model."""
    model = make()
    return Case(model.step, model.args, model.donate_argnums, model.device(), model.init)


CASES: dict[str, Callable[[], Case]] = {
    **{name: partial(lambda case: case, case) for name, case in OPERATIONS.items()},
    **{name: partial(of_model, make) for name, make in COMPARED.items()},
    "gcn": partial(of_model, MODELS["gcn"]),
    "graphnet": partial(of_model, MODELS["graphnet"]),
    "cnn": partial(of_model, cnn),
    "recogniser": partial(of_model, recogniser),
}


def opcodes(jitted: Any, args: Sequence[Any]) -> Counter[str]:
    """Operations of the compiled program, counted by opcode."""
    return Counter(_OPCODE.findall(jitted.lower(*args).compile().as_text()))


def differences(case: Case) -> dict[str, tuple[int, int]]:
    """By opcode that differs, how many operations `jax.jit` has and how many `ipu.jit`."""
    options = ipu.Options(allow_out_of_memory=True, progress=False)
    lowered = ipu.jit(case.fun, device=case.device, donate_argnums=case.donate_argnums, options=options).lower(
        *case.args
    )
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(case.args)]
    donated = [n for n, is_donated in enumerate(lowered.signature.donated) if is_donated]
    plain = opcodes(jax.jit(case.fun, donate_argnums=case.donate_argnums), case.args)
    ours = opcodes(jax.jit(lowered.evaluate, donate_argnums=donated), leaves)
    names = sorted(plain.keys() | ours.keys())
    return {name: (plain[name], ours[name]) for name in names if plain[name] != ours[name]}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row a case; returns 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CASES), action="append", help="these cases")
    chosen = parser.parse_args(argv)
    is_different = False
    for name in chosen.only or CASES:
        rows = differences(CASES[name]())
        is_different |= bool(rows)
        cells = [f"{opcode} {plain} → {ours}" for opcode, (plain, ours) in rows.items()]
        print(f"{name:<{_WIDTH}}{', '.join(cells) or 'the same operations'}", flush=True)
    return int(is_different)


if __name__ == "__main__":
    sys.exit(main())
