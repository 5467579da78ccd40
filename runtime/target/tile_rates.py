"""Rates of one tile that cost formulas share: the issue of its workers, and the accesses of its memory ports.

Input: a target, and bytes. Output: cycles; a formula's last step rounds them up.
Source: the constants of the target, each with its own. Figures of public cost formulas are for 64 bits a load from
ordinary memory and 64 bits a store, the widths of every preset.
Limits: no conflict of two accesses to one memory element; an access wider than a vector is of adjacent elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.target.target import Target

_LOAD_PORTS = 2  # of one cycle: ordinary memory serves one of them, interleaved memory both (reference A1)


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, each of which may be an array of machines: `max` for numbers, which is faster."""
    is_array = isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
    return np.maximum(a, b) if is_array else max(a, b)


def issue_round_cycles(target: Target) -> Any:
    """Cycles of a tile in which each of its workers issues one instruction.

    A compute set takes as many times the instructions of its slowest worker. Fewer workers than cycles of the issue
    period leave some of them idle; more workers wait for each other.
    """
    return larger(target.worker_contexts, target.worker_issue_period_cycles)


def load_cycles(num_bytes: Any, target: Target) -> Any:
    """Cycles to load bytes from ordinary memory: a float, or an array of floats."""
    return num_bytes * _LOAD_PORTS / target.load_bytes_per_cycle


def wide_load_cycles(num_bytes: Any, target: Target) -> Any:
    """Cycles to load bytes by all ports, as two operands are loaded at once: a float, or an array of floats."""
    return num_bytes / target.load_bytes_per_cycle


def store_cycles(num_bytes: Any, target: Target) -> Any:
    """Cycles to store bytes: a float, or an array of floats."""
    return num_bytes / target.store_bytes_per_cycle


def whole_cycles(cycles: Any) -> Any:
    """Cycles rounded up, int64 of the same shape."""
    return np.ceil(cycles).astype(np.int64)
