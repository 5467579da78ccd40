"""Fewer garbage collections while a program is compiled, or its reports are made.

Both make millions of small objects, nearly all of them without cycles of references. Python looks for cycles after
every 700 new objects, which takes a tenth of the time and frees nothing: the 12-layer transformer of
`benchmarks/models` takes 0.91 × the processor seconds without (median of twelve pairs), and the same 391 MB. Of the
reports of BERT-Base collections took 13 %.

Input: code to run, in a context. Output: none; the threshold of the youngest generation is higher meanwhile.
Limits: thresholds are of the whole process. When threads compile side by side, the first that raised them lowers them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 50_000  # between two collections of the youngest generation


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Raise the threshold of the youngest generation inside the context, unless it is off or higher already."""
    youngest, *older = gc.get_threshold()
    if not 0 < youngest < _NEW_OBJECTS:
        yield
        return
    gc.set_threshold(_NEW_OBJECTS, *older)
    try:
        yield
    finally:
        gc.set_threshold(youngest, *older)
