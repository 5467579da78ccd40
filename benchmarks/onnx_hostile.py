"""Hostile ONNX models: each is fine, or refused by a typed error within 5 seconds of CPU and 1 GB of memory.

    python benchmarks/onnx_hostile.py [--count 300] [--seed 0]

Models whose declared sizes, trip counts, functions and nesting are extreme (families below, with random parameters),
and small good files with flipped bytes, cut ends, and fields replaced by extremes. Each is loaded, and, where it loads,
profiled as `ipu.jit(model).profile(...)` on shapes of its declared inputs. Models run in child processes, which count
CPU seconds and the growth of their resident memory after the imports. Outcomes:

- fine, typed: allowed;
- UNTYPED (another error than `ipu.IpuError`), SLOW, LARGE, DIED (no answer, or a signal): none may occur.

Compilation of a model that is fine does not count: a model is fine once it is traced. Exits with 1 when the bar is
missed.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

CPU_BAR_SECONDS = 5.0
MEMORY_BAR_BYTES = 1 << 30
_WALL_SECONDS = 60.0  # of one model, in a machine that others use
_LARGEST_SHAPE = 1 << 20  # elements of a declared input that a call is traced with
_CHILD_LIMIT_BYTES = 12 << 30
BAD = ("UNTYPED", "SLOW", "LARGE", "DIED")


def main() -> int:
    """Print outcomes by family; return 1 if one is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="models (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random parameters (default 0)")
    parser.add_argument("--verbose", action="store_true", help="print a line for each model")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return run_child()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.onnx_hostile_files import hostile_models

    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    worst_seconds = 0.0
    worst_bytes = 0
    with tempfile.TemporaryDirectory() as folder:
        paths = hostile_models(Path(folder), args.count, args.seed)
        for family, path, row in rows(paths):
            outcome = judged(row)
            outcomes[family][outcome] += 1
            worst_seconds = max(worst_seconds, row["seconds"])
            worst_bytes = max(worst_bytes, row["bytes"])
            if args.verbose or outcome in BAD:
                facts = f"{row['seconds']:5.1f} s {row['bytes'] >> 20:5} MB"
                print(f"{outcome:8}{facts}  {family}/{path.parent.name}: {row['text'][:230]}", flush=True)
    for family, counts in sorted(outcomes.items()):
        print(f"{family:24}" + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    total = sum(outcomes.values(), collections.Counter())
    missed = sum(total[outcome] for outcome in BAD)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(total.items()))
    print(f"{total.total()} models: {summary}; at most {worst_seconds:.1f} s of CPU and {worst_bytes >> 20} MB")
    return int(missed > 0)


def judged(row: dict[str, Any]) -> str:
    """Return the outcome of a model from what its child reported."""
    if row["outcome"] in BAD:
        return str(row["outcome"])
    if row["seconds"] > CPU_BAR_SECONDS:
        return "SLOW"
    return "LARGE" if row["bytes"] > MEMORY_BAR_BYTES else str(row["outcome"])


def rows(models: Iterator[tuple[str, Path]]) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yield family, path and the child's report of each model; a child that died is replaced."""
    child: subprocess.Popen[str] | None = None
    for family, path in models:
        child = child or started_child()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(f"{path}\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], _WALL_SECONDS)
        line = child.stdout.readline() if ready else ""
        if line:
            row = json.loads(line)
        else:
            child.kill()
            text = f"exit code {child.wait()}" if ready else f"no answer in {_WALL_SECONDS:.0f} seconds"
            row = {"outcome": "DIED", "seconds": 0.0, "bytes": 0, "text": text}
        yield family, path, row
        # Memory that a model left behind would be counted again, or hidden in the next one.
        if not line or row["bytes"] > MEMORY_BAR_BYTES // 4:
            child.kill()
            child.wait()
            child = None
    if child is not None:
        child.kill()
        child.wait()


def started_child() -> subprocess.Popen[str]:
    """Return a process that answers each path on its input with a line."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--child"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def run_child() -> int:
    """Answer each path on standard input with outcome, seconds of CPU and bytes of memory."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import ipujax.onnx

    warm_up()
    resource.setrlimit(resource.RLIMIT_AS, (_CHILD_LIMIT_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin:
        before = reset_peak()
        outcome, text, seconds = tried(ipujax.onnx.load, Path(line.rstrip("\n")))
        row = {"outcome": outcome, "seconds": seconds, "bytes": max(0, peak_bytes() - before), "text": text}
        print(json.dumps(row), file=answers, flush=True)
    return 0


def warm_up() -> None:
    """Trace a small model once, so that lazy imports are among the imports."""
    from onnx import TensorProto, helper

    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    nodes = [
        helper.make_node("Constant", [], ["c"], value_floats=[1.0, 2.0, 3.0]),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    model = helper.make_model(helper.make_graph(nodes, "g", [info], [result]), ir_version=8)
    import ipujax.onnx

    loaded = ipujax.onnx.load(model.SerializeToString())
    arguments = declared_arguments(loaded)
    assert arguments is not None
    profiled(loaded, arguments)


def tried(load: Any, path: Path) -> tuple[str, str, float]:
    """Return the outcome of a model, the text of its error, and CPU seconds: of a fine model without compilation."""
    from ipujax.runtime.errors import IpuError

    start = time.process_time()
    seconds = None
    try:
        model = load(path)
        arguments = declared_arguments(model)
        if arguments is not None:
            jax.eval_shape(model, model.params, *arguments)
            seconds = time.process_time() - start
            profiled(model, arguments)
    except IpuError as error:
        return "typed", f"{type(error).__name__}: {error.what}", seconds or time.process_time() - start
    except BaseException as error:
        return "UNTYPED", f"{type(error).__module__}.{type(error).__name__}: {error}", time.process_time() - start
    return "fine", "", seconds or time.process_time() - start


def declared_arguments(model: Any) -> list[jax.ShapeDtypeStruct] | None:
    """Return arguments of the declared shapes, with 2 for open sizes; None of those that are large or no numbers."""
    shapes = [tuple(dim if isinstance(dim, int) else 2 for dim in info.shape or ()) for info in model.inputs]
    dtypes = [np.dtype(info.dtype or np.float32) for info in model.inputs]
    is_tried = all(info.kind == "tensor" for info in model.inputs) and all(dtype.kind != "O" for dtype in dtypes)
    if not is_tried or sum(map(math.prod, shapes)) > _LARGEST_SHAPE:
        return None
    return list(map(jax.ShapeDtypeStruct, shapes, dtypes))


def profiled(model: Any, arguments: list[jax.ShapeDtypeStruct]) -> None:
    """Profile a model on eight tiles."""
    import ipujax as ipu

    ipu.jit(model, device=ipu.IPUModel(tiles_per_ipu=8)).profile(model.params, *arguments)


def reset_peak() -> int:
    """Start a new peak of resident memory; return the present one in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the peak of resident memory since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    sys.exit(main())
