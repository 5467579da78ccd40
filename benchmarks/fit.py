"""Fit, cycles, and memory of the fullest tile of each model: the figures by which the compiler is judged.

    python benchmarks/fit.py --only compared --json old.json
    python benchmarks/fit.py --only compared --against old.json
    python benchmarks/fit.py --only transformer-loop --layers 4

Models are in `models/`, one file each. Each step is lowered and compiled from shapes alone in a process of its own, one
at a time, so that no cache is warm; nothing is run, and XLA compiles nothing. Programs that do not fit are compiled too
(`allow_out_of_memory`), and the table says so. Columns, bytes being those of the fullest tile:

    cycles             of a whole step, state donated, without host exchange
    tile bytes         all that is in the tile's memory at its peak: data and code
    exchange           the part of its code that is exchange code, on the chip, between chips and with the host
    most exchange      exchange code of the tile with most of it
    sets               compute sets, including those that copy on a tile
    fits               whether every tile has enough memory, and enough of that from which code can be fetched

The table is the same in each run. Processor seconds from the function to the executable, with the check of memory,
differ, so they go to stderr; they are in the file of `--json` too. This file uses only names that earlier versions of
the package have, so that it can measure an older checkout by PYTHONPATH; options that the checkout lacks are left out,
and named.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np
from models import COMPARED, LARGE, MODELS, Model

import ipujax as ipu

Figures = dict[str, float]

ALL = {**MODELS, **LARGE}

COLUMNS = {  # figure → heading
    "cycles": "cycles",
    "tile_bytes": "tile bytes",
    "data_bytes": "data",
    "code_bytes": "code",
    "exchange_code_bytes": "exchange",
    "most_exchange_code_bytes": "most exchange",
    "compute_sets": "sets",
}
RATIOS = ("cycles", "tile_bytes", "code_bytes", "most_exchange_code_bytes")
WIDTHS = {name: max(len(heading), 11) + 2 for name, heading in COLUMNS.items()}


# --- one model --------------------------------------------------------------------------------------------------------


def figures(model: Model, machine: Mapping[str, Any], options: Mapping[str, Any]) -> Figures:
    """Figures of a model, compiled in this process.

    Args:
        model: the model to compile.
        machine: fields of `Target` to set otherwise.
        options: fields of `ipu.Options`, beside those of the model.
    """
    chosen = ipu.Options(**known_options({"allow_out_of_memory": True, **model.options, **options}))
    device = model.device(**machine)
    # What happens once in a process, as imports inside functions, is not measured.
    single = ipu.IPUModel(arch=model.arch)
    struct = jax.ShapeDtypeStruct((4,), np.float32)
    warm_up = ipu.jit(lambda x: x + 1, device=single).lower(struct).compile()
    warm_up.profile.memory.lacking()
    step = ipu.jit(model.step, device=device, donate_argnums=model.donate_argnums, options=chosen, **model.jit)
    args = model.args
    start = time.process_time()
    compiled = step.lower(*args).compile()
    memory = compiled.profile.memory
    lacking = memory.lacking()
    cpu_seconds = time.process_time() - start
    profile = compiled.profile
    tile = memory.worst_tile
    exchange = sum(memory.by_category[name] for name in memory.by_category if name.endswith("ExchangeCode"))
    return {
        "cycles": int(profile.cycles - profile.phase_cycles["host_exchange"]),
        "tile_bytes": int(memory.max_tile_bytes),
        "data_bytes": int(memory.max_tile_bytes - memory.code_bytes[tile]),
        "code_bytes": int(memory.code_bytes[tile]),
        "exchange_code_bytes": int(exchange[tile]),
        "most_exchange_code_bytes": int(exchange.max()),
        "most_code_bytes": int(memory.code_bytes.max()),
        "compute_sets": int(profile.graph_counts["numComputeSets"]),
        "fits": not lacking,
        "cpu_seconds": cpu_seconds,
    }


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that this version of the package has; the others are named on stderr."""
    names = {field.name for field in fields(ipu.Options)}
    for name in sorted(set(options) - names):
        print(f"ipu.Options has no {name} in this version: left out", file=sys.stderr, flush=True)
    return {name: value for name, value in options.items() if name in names}


def measure(name: str, sizes: Mapping[str, int], machine: Mapping[str, Any], options: Mapping[str, Any]) -> Figures:
    """Figures of a model, made with some sizes."""
    return figures(ALL[name](**sizes), machine, options)


def measure_apart(*arguments: Any) -> Figures:
    """`measure` in a process of its own."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


# --- the table --------------------------------------------------------------------------------------------------------


def header(is_compared: bool) -> str:
    """The first line; ratios are to the same figure of another version."""
    ratios = [f"{'× ' + COLUMNS[name]:>17}" for name in RATIOS if is_compared]
    return "".join([f"{'':<17}", *(f"{COLUMNS[name]:>{WIDTHS[name]}}" for name in COLUMNS), f"{'fits':>6}", *ratios])


def row(name: str, new: Figures, old: Figures | None) -> str:
    """The line of a model."""
    cells = [f"{name:<17}", *(f"{new[column]:>{WIDTHS[column]},}" for column in COLUMNS)]
    cells += [f"{'yes' if new['fits'] else 'NO':>6}"]
    return "".join([*cells, *(f"{ratio:>17.3f}" for ratio in ratios(new, old))])


def ratios(new: Figures, old: Figures | None) -> list[float]:
    """Each of `RATIOS`; none without old figures."""
    return [new[name] / old[name] for name in RATIOS] if old else []


def summary(new: Mapping[str, Figures], old: Mapping[str, Figures]) -> str:
    """Geometric mean and worst of the ratios of those models that are compared; empty when there are none."""
    names = [name for name in COMPARED if name in new and name in old]
    if not names:
        return ""
    columns = list(zip(*(ratios(new[name], old[name]) for name in names), strict=True))
    width = len(header(False))
    means = [math.exp(statistics.fmean(map(math.log, column))) for column in columns]
    return "\n".join(
        f"{f'{statistic} of {len(names)} of the {len(COMPARED)} compared models':<{width}}"
        + "".join(f"{value:>17.3f}" for value in values)
        for statistic, values in (("geometric mean", means), ("worst", [max(column) for column in columns]))
    )


# --- the script -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row a model; returns 1 if one could not be compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = ["compared", *ALL]
    parser.add_argument("--only", choices=choices, action="append", help="these models; `compared`: those of the means")
    parser.add_argument("--layers", type=int, help="layers of models that have them")
    parser.add_argument("--micro-batches", type=int, help="micro-batches of models that have them")
    parser.add_argument("--tiles", type=int, dest="tiles_per_ipu", help="tiles of each IPU")
    parser.add_argument("--bytes-per-tile", type=int, help="memory of a tile")
    parser.add_argument("--byte-cost", type=float, help="cycles per byte on the fullest tile, see `ipu.Options`")
    parser.add_argument("--json", type=Path, help="write the figures into this file, beside those of other models")
    parser.add_argument("--against", type=Path, help="such a file of another version, for ratios to it")
    settings = vars(parser.parse_args(argv))
    names = chosen_models(settings["only"])
    sizes, machine, options = (
        {name: settings[name] for name in group if settings[name] is not None}
        for group in (("layers", "micro_batches"), ("tiles_per_ipu", "bytes_per_tile"), ("byte_cost",))
    )
    for name in names:
        if missing := sorted(set(sizes) - set(inspect.signature(ALL[name]).parameters)):
            parser.error(f"{name} has no {' and no '.join(missing)} to choose; name models that have with --only")
    old = json.loads(settings["against"].read_text()) if settings["against"] else {}
    new: dict[str, Figures] = {}
    failed = False
    print(header(bool(old)))
    for name in names:
        try:
            new[name] = measure_apart(name, sizes, machine, options)
        except Exception as error:  # one model must not keep the others from being measured
            failed = True
            print(f"{name:<17}  failed: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(row(name, new[name], old.get(name)), flush=True)
        seconds = new[name]["cpu_seconds"]
        before = old.get(name, {}).get("cpu_seconds")
        print(f"{name}: {seconds:.1f} CPU s{f', × {seconds / before:.2f}' if before else ''}", file=sys.stderr)
        if settings["json"]:
            save(settings["json"], {name: new[name]})
    if lines := summary(new, old):
        print(lines)
    return int(failed)


def chosen_models(only: Sequence[str] | None) -> list[str]:
    """Names of models in their order, all but large ones if none is chosen."""
    chosen = set(MODELS if only is None else only)
    if "compared" in chosen:
        chosen |= set(COMPARED)
    return [name for name in ALL if name in chosen]


def save(path: Path, new: Mapping[str, Figures]) -> None:
    """Writes figures into a file, keeping those of other models."""
    figures_of_others = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**figures_of_others, **new}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
