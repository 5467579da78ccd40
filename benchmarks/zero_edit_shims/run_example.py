"""A training example of another repository, unchanged, with data from `modules`; results of its functions are written.

    python run_example.py REPOSITORY FILE RESULTS STEPS

Input: a Python file or a notebook, whose cells run in order. Output: for each jitted function the numbers of its first
ten calls, as JSON: scalars, and the mean of all floating-point results. The run ends after STEPS calls of one function.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

from benchmarks.zero_edit_shims.modules import SHIMS  # noqa: E402

_CALLS = 10


class _Probe:
    """Numbers of the first calls of jitted functions."""

    def __init__(self, steps: int) -> None:
        self.numbers: dict[str, list[list[float]]] = {}
        self._counts: dict[str, int] = {}
        self._steps = steps
        self._jit = jax.jit

    def jit(self, *args: Any, **settings: Any) -> Any:
        """Jit a function, and note its results."""
        jitted = self._jit(*args, **settings)
        return self._noted(jitted) if hasattr(jitted, "trace") else lambda fun: self._noted(jitted(fun))

    def _noted(self, jitted: Any) -> Callable[..., Any]:
        if str(getattr(jitted, "__module__", "")).startswith("optax"):  # parts of optimisers, no steps
            return jitted
        probe = self

        class Noted:
            def __init__(self) -> None:
                self.__wrapped__ = jitted.__wrapped__
                self.__name__ = getattr(jitted, "__name__", "jitted")

            def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
                results = jitted(*args, **kwargs)
                leaves = jax.tree.leaves(results)
                if not any(isinstance(x, jax.core.Tracer) for x in leaves) and leaves:
                    probe.note(self.__name__, leaves)
                return results

            def __get__(self, instance: Any, owner: Any = None) -> Any:
                return self if instance is None else lambda *args, **kwargs: self(instance, *args, **kwargs)

            def __getattr__(self, name: str) -> Any:
                return getattr(jitted, name)

        return Noted()

    def note(self, name: str, leaves: list[Any]) -> None:
        """Note the results of a call; end the run when one function was called often enough."""
        self._counts[name] = self._counts.get(name, 0) + 1
        rows = self.numbers.setdefault(name, [])
        if len(rows) < _CALLS:
            floats = [x for x in leaves if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)]
            values = [np.asarray(x, np.float64) for x in floats]
            row = [float(x) for x in values if x.ndim == 0]
            rows.append([*row, sum(float(x.mean()) for x in values if x.size)])
        if self._counts[name] >= self._steps:
            raise SystemExit(0)


def _run(path: str) -> None:
    if not path.endswith(".ipynb"):
        sys.argv = [path, *sys.argv[5:]]
        sys.path.insert(0, str(Path(path).resolve().parent))
        runpy.run_path(path, run_name="__main__")
        return
    sys.argv = [path]
    cells = [
        cell for cell in json.loads(Path(path).read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
    ]
    names: dict[str, Any] = vars(sys.modules["__main__"])
    for number, cell in enumerate(cells):
        lines = "".join(cell["source"]).splitlines()
        code = "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)
        fails = any(output.get("output_type") == "error" for output in cell["outputs"])
        try:
            exec(compile(code, f"{path}:{number}", "exec"), names)
        except Exception as error:
            if not fails:  # in the notebook as it is published too: the cell shows an error
                raise
            print(type(error).__name__)


def main() -> None:
    """Run the example and write its numbers."""
    repository, path, results, steps = sys.argv[1:5]
    probe = _Probe(int(steps))
    jax.jit = probe.jit
    sys.path += [str(folder) for folder in Path(path).resolve().parents if (folder / "examples").is_dir()]
    SHIMS[repository]()
    np.random.seed(0)  # examples draw data without a seed, and both runs need the same
    random.seed(0)
    start = time.perf_counter()
    try:
        _run(path)
    finally:
        seconds = time.perf_counter() - start
        Path(results).write_text(json.dumps({"numbers": probe.numbers, "seconds": seconds}), encoding="utf-8")


if __name__ == "__main__":
    main()
