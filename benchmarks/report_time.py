"""CPU seconds of a compiled program's reports: `profile.summary()`, then its page, and the bytes of the page.

    python benchmarks/report_time.py
    python benchmarks/report_time.py --only bert-base stack-404 --json times.json

Programs are the models of `models/`, BERT-Base at the cost per byte at which it fits, and a stack of 404 residual
layers with its gradient, without a loop, each layer under a name of its own. Each is compiled from shapes alone in a
process of its own. `--figures` saves the figures of each profile as text, so that two versions can be compared by
`diff`. Times are of all threads of the process, after the compilation; nothing is run. Packing is the part of the
summary that packs tiles, which the compilation of a program that nearly fills them has done already. A program that
does not fit has its reports too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import optax
from models import MODELS, Model
from models.model import Struct, trained

import ipujax as ipu

LAYERS = 404
BARS = {"summary": 3.0, "page": 3.0, "megabytes": 6.0}  # of BERT-Base; of the stack 5 CPU s together
Times = dict[str, float]


def stack(layers: int = LAYERS, width: int = 64, rows: int = 32) -> Model:
    """Training step of residual layers, each under its own name.

    Args:
        layers: number of layers.
        width: features.
        rows: of a batch.
    """

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, layers)
        return [(jax.random.normal(k, (width, width)) / width, jnp.zeros(width)) for k in keys]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for number, (weights, bias) in enumerate(params):
            with jax.named_scope(f"layer_{number}"):
                x = x + jnp.tanh(x @ weights + bias)
        return jnp.mean(x**2)

    return trained(f"stack-{layers}", loss, init, optax.sgd(1e-3), Struct((rows, width), jnp.float32))


PROGRAMS = {**MODELS, f"stack-{LAYERS}": stack}
# A program that fits has been packed when it is compiled.
FITTING: dict[str, dict[str, Any]] = {"bert-base": {"byte_cost": 2.0, "allow_out_of_memory": False}}


def times(name: str, figures: Path | None) -> Times:
    """CPU seconds of the reports of a program, compiled in this process.

    Args:
        name: of `PROGRAMS`.
        figures: a folder, for the text of its figures.
    """
    model = PROGRAMS[name]()
    options = ipu.Options(**{**model.options, "allow_out_of_memory": True, **FITTING.get(name, {})})
    step = ipu.jit(model.step, device=model.device(), donate_argnums=model.donate_argnums, options=options, **model.jit)
    profile = step.lower(*model.args).compile().profile
    start = time.process_time()
    _ = profile.memory.tile_bytes
    packing_seconds = time.process_time() - start
    text = profile.summary()
    summary_seconds = time.process_time() - start
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        profile.to_html(page)
        page_seconds = time.process_time() - start - summary_seconds
        page_bytes = page.stat().st_size
    if figures is not None:
        parts = (profile.causes, profile.bound, profile.interval, profile.coverage)
        lines = [str(part) for each in parts for part in (each if isinstance(each, tuple) else [each])]
        (figures / f"{name}.txt").write_text("\n".join([text, *lines]) + "\n", encoding="utf-8")
    megabytes = page_bytes / 1e6
    return {"summary": summary_seconds, "packing": packing_seconds, "page": page_seconds, "megabytes": megabytes}


def times_apart(name: str, figures: Path | None) -> Times:
    """`times` in a process of its own."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(times, name, figures).result()


def table(rows: Mapping[str, Times]) -> str:
    """Lines of the table."""
    lines = [f"{'':<17}{'summary CPU s':>15}{'of it packing':>15}{'page CPU s':>12}{'page MB':>9}"]
    lines += [
        f"{name:<17}{t['summary']:>15.2f}{t['packing']:>15.2f}{t['page']:>12.2f}{t['megabytes']:>9.2f}"
        for name, t in rows.items()
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["bert-base", f"stack-{LAYERS}"], choices=list(PROGRAMS))
    parser.add_argument("--json", type=Path, help="write the times into this file")
    parser.add_argument("--figures", type=Path, help="write the figures of each profile into this folder")
    chosen = parser.parse_args(arguments)
    if chosen.figures is not None:
        chosen.figures.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Times] = {}
    for name in chosen.only:
        rows[name] = times_apart(name, chosen.figures)
        print(f"{name} done", file=sys.stderr, flush=True)
    print(table(rows))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
