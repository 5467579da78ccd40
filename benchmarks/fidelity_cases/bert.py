"""BERT-Base, pre-training phase 1, on a Bow Pod16: cycles of a sequence in the steady state of the pipeline.

What one more micro-batch takes is the difference of steps of 24 and of 16, so that the optimiser and the ramps of the
pipeline are apart.
"""

from __future__ import annotations

from models import MODELS

import ipujax as ipu
from fidelity_cases.case import Family, Row

_SEQUENCES_PER_SECOND = 16_391  # published, of 4 replicas
_REPLICAS = 4
_MICRO_BATCH = 32
_CLOCK_HZ = 1.85e9  # of a Bow
_MEASURED_CYCLES = _CLOCK_HZ * _REPLICAS / _SEQUENCES_PER_SECOND


def step_cycles(micro_batches: int, byte_price: float) -> int:
    """Cycles of a step of so many micro-batches, without host exchange, planned at a price of a byte."""
    model = MODELS["bert-base"](micro_batches=micro_batches)
    options = ipu.Options(allow_out_of_memory=True, byte_price=byte_price, **model.options)
    step = ipu.jit(model.step, device=model.device(), donate_argnums=model.donate_argnums, options=options, **model.jit)
    profile = step.lower(*model.args).compile().profile
    return int(profile.cycles - profile.phase_cycles["host_exchange"])


def sequence_cycles(byte_price: float) -> int:
    """Cycles of a sequence in each replica, in the steady state."""
    few, many = 16, 24
    more = step_cycles(many, byte_price) - step_cycles(few, byte_price)
    return round(more / (many - few) / _MICRO_BATCH)


def family() -> Family:
    """One published figure, of a program that fits and of one that does not care."""
    measured, unit = round(_MEASURED_CYCLES), "cycles a sequence"
    rows = [
        Row("planned for little memory, price of a byte 2", measured, sequence_cycles(2), 0.15, unit),
        Row("planned as if there were more memory, price ½", measured, sequence_cycles(0.5), unit=unit),
    ]
    source = (
        f"Graphcore's published performance results, BERT-Base phase 1 on a Bow Pod16: {_SEQUENCES_PER_SECOND:,} "
        "sequences a second of 4 replicas, each of 4 IPUs with 0, 4, 4 and 4 layers."
    )
    how = (
        "`benchmarks/models/bert.py`: half precision with half partials, a checkpoint a layer, micro-batches of "
        f"{_MICRO_BATCH}; the difference of steps of 24 and of 16 micro-batches, without host exchange. The published "
        "program fits its tiles. Ours does not yet: at the price of a byte at which it is smallest of ½, 1 and 2 its "
        "fullest tile needs 0.85 of 0.64 MB, at the first price 1.06 MB."
    )
    return Family("A pipeline: BERT-Base on a Bow Pod16", source, how, rows)
