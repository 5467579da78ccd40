"""Random ONNX nodes of all opsets, against onnxruntime and onnx's reference.

    python benchmarks/onnx_opsets.py [--count N] [--seed S] [--operator NAME] [--verbose]

Each model is one node of an operator whose form or meaning changed between opset 1 and the newest, with random valid
attributes and operands, in a random opset that has it. Results must be those of onnxruntime at that opset, or of
onnx's reference where onnxruntime does not run the model or the two differ; else the model is refused with a typed
error. The bar: no other result, no untyped error. Exits with 1 when it is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from tests.ipujax.onnx.opsets.cases import GENERATORS, draw, opsets_of
from tests.ipujax.onnx.opsets.oracles import Outcome, outcome

FAULTS = ("WRONG", "untyped error")


def random_nodes(count: int, seed: int, operators: list[str]) -> Iterator[tuple[str, int, Outcome]]:
    """Yield operator, opset and outcome of random nodes."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        op_type = operators[int(rng.integers(len(operators)))]
        opsets = opsets_of(op_type)
        opset = opsets[int(rng.integers(len(opsets)))]
        model, inputs = draw(op_type, opset, seed + number)
        yield op_type, opset, outcome(model, inputs)


def main() -> int:
    """Print the outcomes; return 1 if one is a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="models (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    parser.add_argument("--operator", choices=sorted(GENERATORS), help="draw this operator alone")
    parser.add_argument("--verbose", action="store_true", help="print a line for each model without an equal result")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of onnx's reference
    counts: Counter[str] = Counter()
    refusals: Counter[tuple[str, str]] = Counter()
    operators = [arguments.operator] if arguments.operator else sorted(GENERATORS)
    for op_type, opset, result in random_nodes(arguments.count, arguments.seed, operators):
        counts[result.kind] += 1
        if result.kind == "refused" and result.runs:
            refusals[op_type, result.text] += 1
        if result.kind in FAULTS or (arguments.verbose and result.kind != "equal"):
            print(f"{op_type} of opset {opset}: {result.kind}: {result.text}", flush=True)
    for (op_type, text), number in sorted(refusals.items()):
        print(f"refused, onnxruntime runs it: {number} × {op_type}: {text}")
    print(f"{arguments.count} models: " + ", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    return int(any(counts[kind] for kind in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
