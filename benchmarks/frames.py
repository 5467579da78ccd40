"""Deepest chain of the project's frames while a product of 256³ is lowered, on a cold cache.

    python benchmarks/frames.py

Input: none. Output: the frames of the deepest chain, outermost first, and their number. Frames of other packages, and
of Python's own modules, between them are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = tuple(f"{ROOT / room}{os.sep}" for room in ("ipujax", "lowering", "runtime"))


class DeepestChain:
    """Profiler of Python that keeps the deepest chain of the project's frames.

    Attributes:
        chain: code of each frame, outermost first.
    """

    def __init__(self) -> None:
        self.chain: tuple[CodeType, ...] = ()
        self._stack: list[CodeType] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not os.path.realpath(code.co_filename).startswith(ROOMS):
            return
        if event == "call":
            self._stack.append(code)
            if len(self._stack) > len(self.chain):
                self.chain = tuple(self._stack)
        elif event == "return" and self._stack:
            self._stack.pop()


def deepest_chain() -> tuple[CodeType, ...]:
    """Return the frames of the deepest chain while the product is lowered."""
    os.environ.pop("IPUJAX_CACHE_DIR", None)
    import jax
    import jax.numpy as jnp

    import ipujax as ipu

    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    function = ipu.jit(jnp.dot)
    profiler = DeepestChain()
    sys.setprofile(profiler)
    try:
        function.lower(matrix, matrix)
    finally:
        sys.setprofile(None)
    return profiler.chain


def main() -> None:
    """Print the frames."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    chain = deepest_chain()
    for number, code in enumerate(chain, 1):
        path = Path(os.path.realpath(code.co_filename)).relative_to(ROOT)
        print(f"{number:3} {path}:{code.co_firstlineno} {code.co_qualname}")
    print(f"{len(chain)} frames")


if __name__ == "__main__":
    main()
